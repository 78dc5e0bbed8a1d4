"""A user's stories with only the IO, no Trainer: save, die, find, trust."""

import gc
import os
import signal
import time

import pytest
import torch
from support.bad_input import state
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import ConfigError


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
