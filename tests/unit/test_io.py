"""A user's stories with the IO alone, no Trainer: save, die, find, trust."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.launch import scripts

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.restore import restore
from tiered_checkpoint_io.errors import (
    ConfigError,
    RestoreError,
)
from tiered_checkpoint_io.model.ids import LEASE_PREFIX, manifest_key


@pytest.fixture(params=["directory", "s3"])
def dirpath(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return str(tmp_path / "durable")


@pytest.fixture
def make(memory_dir):
    made = []

    def make(dirpath, **options):
        options = {"on_save_error": "raise", "wait_timeout_s": 60, "drain": "thread", **options}
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
    io.checkpointer.session.wait()
    store = io.checkpointer.session.durable()
    assert read_manifest(store, "a.ckpt") is None
    keys = [entry.key for entry in store.list("") if not entry.key.startswith(LEASE_PREFIX)]
    assert sorted(keys) == [manifest_key("b.ckpt"), "b.ckpt"]
    assert torch.equal(wrapped.load_checkpoint("b.ckpt")["w"], state(2)["w"])


def test_plain_torch_reads_what_lies_on_the_durable_tier(tmp_path, make):
    io = make(str(tmp_path))
    io.save_checkpoint(state(3), "x/y.ckpt")
    assert torch.load(tmp_path / "x" / "y.ckpt")["global_step"] == 3


def test_a_checkpoint_of_others_loads_with_a_notice(tmp_path, make, caplog):
    torch.save(state(9), tmp_path / "plain.ckpt")
    io = make(str(tmp_path / "run"), log_dir=str(tmp_path / "logs"))
    assert io.load_checkpoint(str(tmp_path / "plain.ckpt"))["global_step"] == 9
    (log,) = (tmp_path / "logs").iterdir()
    assert "nothing verified it" in log.read_text()


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
import os, signal, sys, torch
from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
io = AsyncCheckpointIO(TieredCheckpointIO(dirpath=sys.argv[1], memory_dir=sys.argv[2]))
io.save_checkpoint({"w": torch.arange(3_000_000.0), "global_step": 7}, "a.ckpt")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_drain_outlives_a_killed_trainer(s3_url, make, memory_dir, tmp_path):
    (tmp_path / "train.py").write_text(CHILD)
    (done,) = scripts(tmp_path, tmp_path / "train.py", ([s3_url, memory_dir], os.environ.copy()))
    assert done.returncode == -signal.SIGKILL, done.stderr
    io = make(s3_url)
    io.checkpointer.session.open()
    io.checkpointer.session.wait(30)
    wipe(memory_dir)
    assert torch.equal(io.load_checkpoint("tiered:latest")["w"], torch.arange(3_000_000.0))


@pytest.mark.parametrize("told_by", ["saves of memory alone", "looks for outcomes"])
def test_a_drain_that_dies_amid_its_work_does_not_wait_for_the_next_durable_save(tmp_path, make, told_by):
    """The next may come an hour later, and the node may be gone by then."""
    engine = make(str(tmp_path), drain="process", memory_keep_last=1).checkpointer
    engine.save(state(1), "a.ckpt")
    pid = engine.session.progress().drain.pid
    # As where it dies amid the upload, for want of memory.
    os.kill(pid, signal.SIGSTOP)
    engine.save(state(2), "b.ckpt", wait=False)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while engine.session.is_pending("b.ckpt"):
        assert time.monotonic() < deadline
        if told_by == "looks for outcomes":
            engine.session.poll()
        else:
            engine.save(state(3), "c.ckpt", tiers=["memory"])
        time.sleep(0.05)
    assert torch.load(tmp_path / "b.ckpt")["global_step"] == 2
    assert engine.session.progress().drain.pid != pid


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
    io.checkpointer.session.wait()
    assert not (tmp_path / "last.ckpt").exists()
    assert wrapped.load_checkpoint("tiered:last")["global_step"] == 1


@pytest.mark.parametrize(
    ("closes", "loads"),
    [
        pytest.param(True, True, marks=pytest.mark.matrix),
        pytest.param(False, True, marks=pytest.mark.matrix),
        (True, False),
    ],
)
def test_what_an_io_saves_after_another_run_has_saved_is_newer(closes, loads, make, tmp_path, memory_dir):
    """A notebook trains, a job on another node goes on from there, and the notebook trains again."""
    dirpath, elsewhere = str(tmp_path / "durable"), str(Path(memory_dir, "elsewhere"))
    os.mkdir(elsewhere)
    notebook = make(dirpath)
    notebook.save_checkpoint(state(1), "step=1.ckpt")
    if closes:
        notebook.teardown()
    job = TieredCheckpointIO(dirpath=dirpath, memory_dir=elsewhere, on_save_error="raise")
    job.load_checkpoint("tiered:latest")
    job.save_checkpoint(state(2), "step=2.ckpt")
    job.teardown()
    if loads:
        assert notebook.load_checkpoint("tiered:latest")["global_step"] == 2
    notebook.save_checkpoint(state(3), "step=3.ckpt")
    notebook.teardown()
    for io in (make(dirpath), make(dirpath, namespace="another-node")):
        assert io.load_checkpoint("tiered:latest")["global_step"] == 3


def test_loading_from_elsewhere_again_and_again_opens_one_connection(make, s3_url):
    """Weights of another run, evaluated in a loop; the collector of garbage may come when it likes."""
    elsewhere = make(f"{s3_url}/other", namespace="other")
    elsewhere.save_checkpoint(state(1), "x.ckpt")
    elsewhere.teardown()
    io = make(f"{s3_url}/mine")
    gc.disable()
    try:
        used = []
        for _ in range(5):
            assert io.load_checkpoint(f"{s3_url}/other/x.ckpt")["global_step"] == 1
            used.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert used[-1] == used[0]


def test_a_home_directory_may_be_written_as_a_shell_has_it(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    io = make("~/runs/a")
    io.save_checkpoint(state(1), "~/runs/a/step=1.ckpt")
    assert (tmp_path / "runs" / "a" / "step=1.ckpt").is_file()
    assert io.load_checkpoint("~/runs/a/step=1.ckpt")["global_step"] == 1
    assert make("~/runs/b").load_checkpoint("~/runs/a/step=1.ckpt")["global_step"] == 1
    assert make("~").checkpointer.dirpath == str(tmp_path)
    # In a container whose user has no entry in the passwd file, it would be a folder "~" of the working directory.
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="dirpath is '~/runs/a': .*HOME is not set") as caught:
        make("~/runs/a")
    assert caught.value.hint == "set HOME, or write the whole path"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"global_step": 1 << 70}, "x.ckpt"),
        ({"epoch": 1 << 70}, "x.ckpt"),
        ({"global_step": -1}, f"step={1 << 70}.ckpt"),
    ],
)
def test_a_step_or_epoch_that_no_manifest_holds_leaves_a_checkpoint_all_the_same(changes, name, make, tmp_path):
    io = make(str(tmp_path / "durable"))
    io.save_checkpoint({**state(1), **changes}, name)
    for other in (io, make(str(tmp_path / "durable"), namespace="another-node")):
        assert torch.equal(other.load_checkpoint("tiered:latest")["w"], state(1)["w"])


def test_a_restore_from_memory_maps_the_file_once_and_verifies_what_it_maps(make, memory_dir, tmp_path, monkeypatch):
    mapped = []
    privately_mapped = restore.privately_mapped

    def counted(*arguments):
        mapped.append(privately_mapped(*arguments))
        return mapped[-1]

    io = make(str(tmp_path / "durable"), memory_keep_last=1)
    whole = torch.arange(300_000.0)
    saved = {
        "whole": whole,
        "view": whole[1000:5000:3],
        "again": whole,
        "half": torch.arange(70_000).to(torch.bfloat16).reshape(7, -1).T,
        "parameter": torch.nn.Parameter(torch.randn(5, 5)),
        "none": torch.empty(0),
        "global_step": 3,
    }
    io.save_checkpoint(saved, "step=3.ckpt", storage_options={"tiers": ["memory"]})
    (file,) = (each for each in Path(memory_dir).rglob("rank-*/*") if each.name == "step=3.ckpt")
    before = file.read_bytes()
    monkeypatch.setattr(restore, "privately_mapped", counted)
    monkeypatch.setattr(torch.UntypedStorage, "from_file", lambda *_, **__: pytest.fail("torch mapped it, too"))
    loaded = io.load_checkpoint("step=3.ckpt")
    assert len(mapped) == 1
    base = mapped.pop()
    end = base.data_ptr() + base.nbytes()
    del base
    oracle = torch.load(file)
    assert list(loaded) == list(oracle)
    for name, tensor in oracle.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(loaded[name], tensor)
            assert (loaded[name].dtype, loaded[name].stride()) == (tensor.dtype, tensor.stride())
            assert type(loaded[name]) is type(tensor)
    assert end - len(before) <= loaded["whole"].data_ptr() < end
    assert loaded["again"].data_ptr() == loaded["whole"].data_ptr() == loaded["view"].data_ptr() - 4000
    # It is the loader's own: neither do its changes get into the checkpoint, nor what is saved later into it.
    loaded["whole"].zero_()
    assert file.read_bytes() == before
    kept = loaded["half"].clone()
    for step in (4, 5, 6):
        io.save_checkpoint({"x": torch.randn(400_000)}, f"step={step}.ckpt", storage_options={"tiers": ["memory"]})
    assert torch.equal(loaded["half"], kept)
    assert not loaded["whole"].any()
