"""The IO in processes as frameworks make them: several threads that save at once."""

import threading

import pytest
import torch

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import UsageError

THREADS, SAVES, BOUND_S = 4, 5, 60.0


@pytest.fixture
def io(tmp_path, memory_dir):
    io = TieredCheckpointIO(
        str(tmp_path / "durable"),
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
    assert io.checkpointer.progress().counters == {"saved": THREADS * SAVES}
    for step in range(THREADS * SAVES):
        loaded = io.load_checkpoint(f"step={step}.ckpt")
        assert loaded["global_step"] == step
        assert bool((loaded["w"] == step).all())


def test_a_save_within_a_save_is_one_clear_error(io):
    """As of a signal handler that saves whatever it interrupts; the save that it interrupts ends well."""

    class Interrupting:
        def __reduce__(self):
            if not refused:
                refused.append(None)
                with pytest.raises(UsageError, match="in the middle of another save of the same thread"):
                    io.save_checkpoint(state(2), "step=2.ckpt")
            return (int, (7,))

    refused = []
    io.save_checkpoint({**state(1), "n": Interrupting()}, "step=1.ckpt")
    assert refused
    assert io.load_checkpoint("tiered:latest")["n"] == 7
