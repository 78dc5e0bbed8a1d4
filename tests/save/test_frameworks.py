"""The IO in processes as frameworks make them: threads that save at once, and forked ones."""

import gc
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import ConfigError

THREADS, SAVES, BOUND_S = 4, 5, 60.0


@pytest.fixture
def io(request, tmp_path, memory_dir):
    io = build(
        TieredCheckpointIO,
        str(tmp_path / "durable"),
        drain=getattr(request, "param", "thread"),
        memory_dir=memory_dir,
        wait_timeout_s=60,
        memory_keep_last=THREADS * SAVES,
        max_pending=THREADS * SAVES,
        on_save_error="raise",
    )
    yield io
    io.teardown()


def state(step):
    return {"w": torch.full((50_000,), float(step)), "global_step": step}


def test_threads_may_save_at_once(io):
    failed, begun = [], threading.Barrier(THREADS)

    def save(thread):
        begun.wait(BOUND_S)
        for number in range(SAVES):
            step = thread * SAVES + number
            try:
                io.save_checkpoint(state(step), f"step={step}.ckpt", {"wait": step % 2 == 0})
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=save, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert failed == []
    assert io.checkpointer.session.progress().counters == {"saved": THREADS * SAVES}
    for step in range(THREADS * SAVES):
        loaded = io.load_checkpoint(f"step={step}.ckpt")
        assert loaded["global_step"] == step
        assert bool((loaded["w"] == step).all())


def test_a_save_within_a_save_is_one_clear_error(io):
    """A signal handler may save within a save; the interrupted save ends well."""

    class Interrupting:
        def __reduce__(self):
            if not refused:
                refused.append(None)
                with pytest.raises(ConfigError, match="in the middle of another save of the same thread"):
                    io.save_checkpoint(state(2), "step=2.ckpt")
            return (int, (7,))

    refused = []
    io.save_checkpoint({**state(1), "n": Interrupting()}, "step=1.ckpt")
    assert refused
    assert io.load_checkpoint("tiered:latest")["n"] == 7


@pytest.mark.parametrize("io", ["process"], indirect=True)
def test_a_forked_process_begins_anew_and_leaves_alone_what_is_its_parents(io, memory_dir):
    """For a worker of a DataLoader, or a rank of ``ddp_fork`` whose parent has used the IO."""
    for step in (1, 2, 3):
        io.save_checkpoint(state(step), f"step={step}.ckpt")
    deadline = time.monotonic() + BOUND_S
    # The next save's slot is made in the background; a fork then would inherit the lock of the slots' folder.
    while any(each.name == "tiered-prepare" for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    free = sorted(Path(memory_dir).rglob("slots/slot-*"))
    assert free

    def child(answers):
        # A DataLoader does the same: OpenMP does not survive a fork.
        torch.set_num_threads(1)
        here = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        mapped = Path("/proc/self/maps").read_text().splitlines()
        answers.send([line for line in (*here, *mapped) if memory_dir in line])
        io.save_checkpoint(state(4), "step=4.ckpt")
        answers.send(io.load_checkpoint("tiered:latest")["global_step"])
        io.teardown()
        # An interpreter that ends in full collects what it has inherited.
        gc.collect()
        answers.send("ended")

    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=child, args=(there,), daemon=True)
    worker.start()
    told = [here.recv() for _ in range(3) if here.poll(BOUND_S)]
    worker.join(BOUND_S)
    assert told == [[], 4, "ended"]
    assert worker.exitcode == 0
    assert set(free) <= set(Path(memory_dir).rglob("slots/slot-*"))
    io.save_checkpoint(state(5), "step=5.ckpt")
    for step in (1, 2, 3, 4, 5):
        assert bool((io.load_checkpoint(f"step={step}.ckpt")["w"] == step).all())
    save_ids = [stored.save_id for stored in io.checkpointer.session.open().tier.parts()]
    assert len(set(save_ids)) == 5
