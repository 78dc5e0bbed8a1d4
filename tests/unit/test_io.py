"""A user's stories with the IO alone, no Trainer: save, die, find, trust."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.engine.commit import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    FormatVersionError,
    InvalidNameError,
    MemoryUnsafeError,
    RestoreError,
    SaveError,
    StoreError,
    UsageError,
)
from tiered_checkpoint_io.ids import manifest_key
from tiered_checkpoint_io.storage.directory import DirectoryStore
from tiered_checkpoint_io.storage.wrappers import Retry


@pytest.fixture(params=["directory", "s3"])
def dirpath(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return str(tmp_path / "durable")


@pytest.fixture
def make(memory_dir):
    made = []

    def make(dirpath, **options):
        options = {"on_save_error": "raise", "wait_timeout_s": 60, **options}
        io = TieredCheckpointIO(dirpath=dirpath, memory_dir=memory_dir, **options)
        made.append(io)
        return io

    yield make
    for io in made:
        io.teardown()


def state(step):
    return {"w": torch.arange(1000.0) + step, "global_step": step, "epoch": 0}


def wipe(memory_dir):
    for folder in Path(memory_dir).rglob("rank-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_the_newest_is_found_in_memory_then_on_the_durable_tier(dirpath, make, memory_dir):
    io = make(dirpath)
    assert not io.load_checkpoint("tiered:latest")
    io.save_checkpoint(state(5), f"{io.config.dirpath}/epoch=0-step=5.ckpt")
    io.save_checkpoint(state(6), f"{io.config.dirpath}/m/epoch=0-step=6.ckpt", storage_options={"tiers": ["memory"]})
    io.teardown()

    fresh = make(dirpath)
    assert fresh.load_checkpoint("tiered:latest")["global_step"] == 6
    assert fresh.checkpointer.restored.tier == "memory"
    assert torch.equal(fresh.load_checkpoint("epoch=0-step=5.ckpt")["w"], state(5)["w"])
    fresh.teardown()

    wipe(memory_dir)
    other = make(dirpath)
    loaded = other.load_checkpoint("tiered:latest")
    assert loaded["global_step"] == 5
    assert torch.equal(loaded["w"], state(5)["w"])
    assert other.checkpointer.restored.tier == "durable"
    other.teardown()
    again = make(dirpath)
    again.load_checkpoint("tiered:latest")
    assert again.checkpointer.restored.tier == "memory"


def test_async_returns_before_and_remove_comes_behind(s3_url, make):
    io = make(s3_url)
    wrapped = AsyncCheckpointIO(io)
    wrapped.save_checkpoint(state(1), "a.ckpt")
    tensors = state(2)
    wrapped.save_checkpoint(tensors, "b.ckpt")
    tensors["w"].zero_()
    wrapped.remove_checkpoint("a.ckpt")
    io.checkpointer.wait()
    store = io.checkpointer.session.durable()
    assert read_manifest(store, "a.ckpt") is None
    assert sorted(entry.key for entry in store.list("")) == [manifest_key("b.ckpt"), "b.ckpt"]
    assert torch.equal(wrapped.load_checkpoint("b.ckpt")["w"], state(2)["w"])


def test_plain_torch_reads_what_lies_on_the_durable_tier(tmp_path, make):
    io = make(str(tmp_path))
    io.save_checkpoint(state(3), "x/y.ckpt")
    assert torch.load(tmp_path / "x" / "y.ckpt")["global_step"] == 3


def test_a_checkpoint_of_others_loads_with_a_notice(tmp_path, make, caplog):
    torch.save(state(9), tmp_path / "plain.ckpt")
    io = make(str(tmp_path / "run"), log_dir=str(tmp_path / "logs"))
    assert io.load_checkpoint(str(tmp_path / "plain.ckpt"))["global_step"] == 9
    assert "nothing verified it" in (tmp_path / "logs" / "default_checkpointing.log").read_text()


@pytest.mark.parametrize("damage", ["flip", "truncate", "part.json"])
def test_a_damaged_copy_in_memory_gives_way_to_the_durable_one(tmp_path, make, memory_dir, damage):
    io = make(str(tmp_path))
    io.save_checkpoint(state(1), "a.ckpt")
    io.teardown()
    (file,) = Path(memory_dir).rglob("part.json" if damage == "part.json" else "a.ckpt")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    file.write_bytes(data[: len(data) // 2] if damage != "flip" else data)
    io = make(str(tmp_path))
    assert torch.equal(io.load_checkpoint("tiered:latest")["w"], state(1)["w"])
    assert io.checkpointer.restored.tier == "durable"
    assert io.checkpointer.restored.rejected


def test_a_damaged_newest_gives_way_to_the_older_and_all_damaged_is_an_error(tmp_path, make, memory_dir):
    io = make(str(tmp_path))
    for step in (1, 2):
        io.save_checkpoint(state(step), f"{step}.ckpt")
    io.teardown()
    wipe(memory_dir)

    def flip(name):
        data = bytearray((tmp_path / name).read_bytes())
        data[1000] ^= 1
        (tmp_path / name).write_bytes(data)

    flip("2.ckpt")
    io = make(str(tmp_path))
    assert io.load_checkpoint("tiered:latest")["global_step"] == 1
    io.teardown()
    wipe(memory_dir)
    flip("1.ckpt")
    io = make(str(tmp_path))
    with pytest.raises(RestoreError, match="2.ckpt"):
        io.load_checkpoint("tiered:latest")


def test_going_back_on_purpose_is_honoured(tmp_path, make):
    io = make(str(tmp_path))
    io.save_checkpoint(state(500), "step=500.ckpt")
    io.teardown()
    io = make(str(tmp_path))
    io.save_checkpoint(state(110), "step=110.ckpt")
    io.teardown()
    assert make(str(tmp_path)).load_checkpoint("tiered:latest")["global_step"] == 110


CHILD = """
import sys, torch
from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
io = AsyncCheckpointIO(TieredCheckpointIO(dirpath=sys.argv[1], memory_dir=sys.argv[2]))
io.save_checkpoint({"w": torch.arange(3_000_000.0), "global_step": 7}, "a.ckpt")
print("saved", flush=True)
sys.stdin.read()
"""


def test_the_drain_outlives_a_killed_trainer(s3_url, make, memory_dir, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), s3_url, memory_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"saved\n"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    io = make(s3_url)
    io.checkpointer.session.open()
    io.checkpointer.wait(30)
    wipe(memory_dir)
    assert torch.equal(io.load_checkpoint("tiered:latest")["w"], torch.arange(3_000_000.0))


def test_memory_too_small_is_durable_only_with_one_warning(tmp_path, make, monkeypatch):
    io = make(str(tmp_path))
    monkeypatch.setattr("tiered_checkpoint_io.engine.session.node_budget", lambda *_: 1 << 10)
    with pytest.warns(UserWarning, match="memory tier can't hold") as caught:
        io.save_checkpoint(state(1), "a.ckpt")
        io.save_checkpoint(state(2), "b.ckpt")
    assert len(caught) == 1
    with pytest.raises(SaveError, match="memory_allocation_percentage"):
        io.save_checkpoint(state(3), "c.ckpt", storage_options={"tiers": ["memory"]})
    assert io.load_checkpoint("tiered:latest")["global_step"] == 2


def test_bad_names_and_options_are_refused_and_nothing_is_saved(tmp_path, make):
    io = make(str(tmp_path / "run"))
    for name in ("../x.ckpt", f"{tmp_path}/other/x.ckpt", "", "/abs.ckpt", "a//b", ".tiered/x", "a\nb", "x" * 300):
        with pytest.raises(InvalidNameError):
            io.save_checkpoint(state(1), name)
    for options in ({"tier": ["memory"]}, {"tiers": ["disk"]}, {"tiers": []}):
        with pytest.raises(UsageError):
            io.save_checkpoint(state(1), "a.ckpt", storage_options=options)
    assert not io.load_checkpoint("tiered:latest")
    with pytest.raises(CheckpointNotFoundError, match="a.ckpt"):
        io.load_checkpoint("a.ckpt")


def test_memory_that_is_not_ours_is_refused_and_left(tmp_path, make, memory_dir):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (Path(memory_dir) / f"tiered-{os.getuid()}").symlink_to(target)
    io = make(str(tmp_path / "d"))
    with pytest.raises(MemoryUnsafeError, match="symbolic link"):
        io.load_checkpoint("tiered:latest")
    assert not list(target.iterdir())
    (Path(memory_dir) / f"tiered-{os.getuid()}").unlink()
    (Path(memory_dir) / f"tiered-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(MemoryUnsafeError, match="open to others"):
        make(str(tmp_path / "d")).load_checkpoint("tiered:latest")


def test_unreachable_is_an_error_never_a_start_from_scratch(make, monkeypatch):
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "x")
    monkeypatch.setitem(Retry.__init__.__kwdefaults__, "deadline_s", 0.5)
    io = make("s3://bucket/run", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(StoreError, match="endpoint_url"):
        io.load_checkpoint("tiered:latest")
    io.save_checkpoint(state(4), "a.ckpt", storage_options={"tiers": ["memory"]})
    assert io.load_checkpoint("tiered:latest")["global_step"] == 4


def test_a_missing_bucket_fails_the_save_and_names_it(s3_server, make):
    io = make("s3://there-is-no-such-bucket/run")
    with pytest.raises(SaveError, match="there-is-no-such-bucket"):
        io.save_checkpoint(state(4), "a.ckpt")
    # The failed save stays queued; forget it, so that teardown has nothing to wait for.
    for stored in io.checkpointer.session.open().tier.parts():
        io.checkpointer.session.open().tier.mark_drained(stored)


def test_a_newer_format_is_never_skipped_silently(tmp_path, make, memory_dir):
    io = make(str(tmp_path))
    io.save_checkpoint(state(1), "a.ckpt")
    io.teardown()
    wipe(memory_dir)
    store = DirectoryStore(str(tmp_path))
    store.put(manifest_key("b.ckpt"), store.get(manifest_key("a.ckpt")).replace(b'"version": 1', b'"version": 7'))
    with pytest.raises(FormatVersionError, match="upgrade"):
        make(str(tmp_path)).load_checkpoint("tiered:latest")


def test_the_thread_drain_does_the_same(tmp_path, make):
    io = make(str(tmp_path), drain="thread")
    io.save_checkpoint(state(1), "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt")["global_step"] == 1


def test_alias_uploads_nothing_and_is_loadable_at_once(tmp_path, make):
    io = make(str(tmp_path))
    wrapped = AsyncCheckpointIO(io)
    wrapped.save_checkpoint(state(1), "a.ckpt")
    io.checkpointer.alias("last.ckpt", "a.ckpt")
    assert wrapped.load_checkpoint("last.ckpt")["global_step"] == 1
    io.checkpointer.wait()
    assert not (tmp_path / "last.ckpt").exists()
    assert wrapped.load_checkpoint("tiered:last")["global_step"] == 1
