"""A state becomes a part in memory: at once, whole, within its room; and a user's stories with only the IO."""

import gc
import os
import signal
import time
from collections import OrderedDict
from io import BytesIO

import numpy as np
import pytest
import torch
from support.bad_input import state
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.adapters.state import Rest
from tiered_checkpoint_io.engine import session
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.engine.drain.process import DrainRunner
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.parts import reading
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

MIB = 1 << 20


@pytest.fixture
def opened(memory_dir, tmp_path, monkeypatch):
    """Opens memory with a budget, for a job whose drain never gets to work."""
    monkeypatch.setattr(DrainRunner, "ensure", lambda _: None)
    made = []

    def open_memory(budget_bytes=None, keep_last=2):
        monkeypatch.setattr(session, "node_budget", lambda *_: budget_bytes)
        engine = Checkpointer(
            build(
                TieredCheckpointConfig,
                dirpath=str(tmp_path),
                memory_dir=memory_dir,
                memory_keep_last=keep_last,
                on_save_error="raise",
                max_pending=9,
            )
        )
        made.append(engine)
        return engine.session.open().tier, engine

    yield open_memory
    for engine in made:
        engine.session.release()


def state_of(step, mib=4):
    return {"w": torch.full((mib * MIB // 4,), float(step)), "global_step": step}


def save(engine, step, *, mib=4, durable=False):
    tiers = {"memory", "durable"} if durable else {"memory"}
    engine.save(state_of(step, mib), f"step={step}.ckpt", tiers=tiers, wait=False)
    return engine.session.open().tier.parts()[-1]


def steps(tier):
    return [stored.part.content.step for stored in tier.parts()]


def load(tier, stored):
    (entry,) = stored.part.content.files
    with reading(stored) as views:
        for index, (offset, length) in enumerate(entry.chunks):
            entry.check_chunk(index, views[entry.basename][offset : offset + length], tier="memory", where="x")
    return torch.load(stored.file(entry.basename), mmap=True, weights_only=True)


def test_a_steady_run_takes_no_space_and_no_new_file(opened, monkeypatch):
    tier, engine = opened(keep_last=2)
    for step in range(1, 5):
        save(engine, step)
    engine.session.open().capturer._preparing.join()
    used = tier.usage()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken again"))
    inodes = set()
    for step in range(5, 12):
        stored = save(engine, step)
        inodes.add(os.stat(stored.file(f"step={step}.ckpt")).st_ino)
        assert load(tier, stored)["w"][-1] == step
    assert len(inodes) == 3
    assert tier.usage() == pytest.approx(used, abs=MIB)


def test_short_of_room_memory_goes_below_keep_last_but_never_below_one(opened):
    tier, engine = opened(budget_bytes=22 * MIB, keep_last=3)
    for step in range(1, 8):
        save(engine, step, mib=7)
        assert steps(tier)[-1] == step
        assert 1 <= len(steps(tier)) <= 3
        assert tier.usage() <= 22 * MIB
        for stored in tier.parts():
            load(tier, stored)


def test_a_rank_that_does_not_speak_for_its_node_has_what_it_skips_noted(opened, warned, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    tier, engine = opened(budget_bytes=24 * MIB)
    save(engine, 1, durable=True)
    with warned(r"steps of memory alone are skipped: .*does not fit"):
        save(engine, 2, mib=100)
    # Said once.
    save(engine, 3, mib=100)
    assert [each["event"] for each in read_events(tier.root)] == ["skipped"] * 2


def test_a_capture_that_fails_leaves_no_part_and_gives_its_slot_back(opened, monkeypatch):
    def fails(*_, **__):
        raise ConfigError("resized")

    tier, engine = opened()
    for step in (1, 2, 3):
        save(engine, step)
    used = tier.usage()
    with monkeypatch.context() as patch:
        patch.setattr(Image, "fill", fails)
        for step in range(4, 14):
            with pytest.raises(ConfigError, match="resized"):
                save(engine, step)
    assert steps(tier) == [2, 3]
    # One more may be prepared for the next save.
    assert tier.usage() <= used + 6 * MIB
    save(engine, 14)
    assert steps(tier) == [3, 14]


@pytest.mark.parametrize(
    "of_callback",
    [{"best": 0.5, "kinds": (int, torch.float32, torch.Size([2]))}, np.ones(3), torch.ones(3)],
    ids=["plain", "objects", "tensors"],
)
def test_the_file_is_that_of_torch_save_at_the_moment_of_the_save(of_callback):
    state = {"epoch": 1, "loops": OrderedDict(fit={"batches": 3}), "callbacks": {"Mine": of_callback}}
    expected = BytesIO()
    torch.save(state, expected)
    rest = Rest(state, {})
    state["loops"]["fit"]["batches"] = 4
    if not isinstance(of_callback, dict):
        of_callback[0] = 7
    assert rest.file() == rest.file() == expected.getvalue()


@pytest.fixture
def make(memory_dir):
    made = []

    def make(dirpath, **options):
        options = {"on_save_error": "raise", "wait_timeout_s": 60, "drain": "thread", **options}
        io = build(TieredCheckpointIO, dirpath=dirpath, memory_dir=memory_dir, **options)
        made.append(io)
        return io

    yield make
    for io in made:
        io.teardown()


@pytest.mark.parametrize("told_by", ["saves of memory alone", "looks for outcomes"])
def test_a_drain_that_dies_amid_its_work_does_not_wait_for_the_next_durable_save(tmp_path, make, told_by):
    """The next may come an hour later, and the node may be gone by then."""
    engine = make(str(tmp_path), drain="process", memory_keep_last=1).checkpointer
    engine.save(state(1), "a.ckpt")
    pid = engine.session.progress().drain.pid
    # It dies during the upload, as for want of memory.
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
