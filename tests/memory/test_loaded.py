"""Loads into a node's memory take the room of as many checkpoints as saves may, and make room for more."""

import fcntl
import os
import threading

import pytest
import torch
from support.bad_input import state
from support.supporting import build
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.engine.restore.restore import NodeFetcher
from tiered_checkpoint_io.memory import parts
from tiered_checkpoint_io.memory.parts import PINNED

MIB = 1 << 20
LARGE = MIB  # of 4 MiB each


@pytest.fixture
def start(tmp_path, memory_dir):
    made = []

    def start(**options):
        options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread", **options}
        made.append(build(TieredCheckpointIO, **{"on_save_error": "raise", "wait_timeout_s": 30, **options}))
        return made[-1]

    yield start
    for io in made:
        io.teardown()


@pytest.fixture
def other_node(memory_dir):
    os.mkdir(f"{memory_dir}/other")
    return f"{memory_dir}/other"


def tier_of(io):
    return io.checkpointer.session.open().tier


def steps(io):
    return [stored.part.content.step for stored in tier_of(io).parts()]


def saved(io, numbers, **options):
    for step in numbers:
        io.save_checkpoint(state(step, **options), f"step_{step}.ckpt")


def test_a_node_that_only_loads_keeps_the_last_checkpoints(start, other_node):
    saved(start(), range(1, 7))
    io = start(memory_dir=other_node)
    for step in range(1, 7):
        loaded = io.load_checkpoint(f"step_{step}.ckpt")
        assert torch.equal(loaded["w"], state(step)["w"])
        assert io.checkpointer.restored.tier == "durable"
        assert steps(io) == [each for each in (step - 1, step) if each]
    # A newly loaded part stays, even if others are newer; parts on the node are loaded from its memory.
    io.load_checkpoint("step_2.ckpt")
    assert steps(io) == [2, 5, 6]
    io.load_checkpoint("step_1.ckpt")
    assert steps(io) == [1, 5, 6]
    io.load_checkpoint("tiered:latest")
    assert (io.checkpointer.restored.tier, steps(io)) == ("memory", [5, 6])


def test_what_a_process_has_mapped_stays_until_it_lets_go(start, other_node):
    """Its removal would free nothing."""
    saved(start(), range(1, 5))
    io = start(memory_dir=other_node, memory_keep_last=1)
    loaded = {step: io.load_checkpoint(f"step_{step}.ckpt") for step in range(1, 4)}
    assert steps(io) == [1, 2, 3]
    io.save_checkpoint(state(9), "step_9.ckpt", storage_options={"tiers": ["memory"]})
    assert all(torch.equal(loaded[step]["w"], state(step)["w"]) for step in loaded)
    loaded.clear()
    io.load_checkpoint("step_4.ckpt")
    assert steps(io) == [4, 9]


def test_a_load_removes_nothing_that_only_memory_has_or_that_no_load_has_opened(start, other_node):
    saved(start(), range(1, 4))
    io = start(memory_dir=other_node, memory_keep_last=2)
    io.load_checkpoint("step_1.ckpt")
    other = start(memory_dir=other_node, memory_keep_last=9)
    for step in (4, 5, 6):
        other.save_checkpoint(state(step), f"step_{step}.ckpt", storage_options={"tiers": ["memory"]})
        other.load_checkpoint(f"step_{step}.ckpt")
    saved(other, [7, 8])
    other.checkpointer.session.wait()
    # Another process has fetched it, and is about to open it.
    (loaded,) = [stored for stored in tier_of(io).parts() if stored.part.content.step == 1]
    (loaded.folder / PINNED).unlink()
    io.load_checkpoint("step_2.ckpt")
    io.load_checkpoint("step_3.ckpt")
    assert steps(io) == [1, 3, 4, 5, 6, 7, 8]


def test_what_loads_have_brought_makes_room_for_the_next(start, tmp_path, caplog):
    saved(start(dirpath=str(tmp_path / "elsewhere")), [1], size=LARGE)
    saved(start(), range(1, 5), size=LARGE)
    with mounted_tmpfs(tmp_path / "small", 12 * MIB) as small:
        # Memory has room for two, and first holds one of another durable tier.
        io = start(memory_dir=str(small), memory_keep_last=3)
        io.load_checkpoint(f"{tmp_path}/elsewhere/step_1.ckpt")
        for step in range(1, 5):
            assert io.load_checkpoint(f"step_{step}.ckpt")["global_step"] == step
        assert steps(io) == [3, 4]
        # The newest stays.
        assert io.load_checkpoint("step_1.ckpt")["global_step"] == 1
        assert steps(io) == [1, 4]
        assert "temporary file" not in caplog.text
        io.teardown()


@pytest.mark.parametrize("moment", ["fetch", "hold"])
def test_what_one_process_is_about_to_load_another_one_does_not_remove(start, other_node, monkeypatch, moment):
    """Several evaluations on one node: what each has verified must be there until it has it."""
    saved(start(), range(1, 5))
    first, second = (start(memory_dir=other_node, memory_keep_last=1) for _ in range(2))
    first.load_checkpoint("step_1.ckpt")
    original, late = getattr(NodeFetcher, moment), ["step_3.ckpt", "step_2.ckpt"]

    def beside(*arguments, **options):
        done = original(*arguments, **options)
        while late:
            second.load_checkpoint(late.pop())
        return done

    monkeypatch.setattr(NodeFetcher, moment, beside)
    assert torch.equal(first.load_checkpoint("step_1.ckpt")["w"], state(1)["w"])
    assert first.checkpointer.restored.tier == "memory"
    first.load_checkpoint("step_4.ckpt")
    assert steps(first) == [4]


def test_a_look_whether_it_is_read_does_not_hide_a_part(start):
    io = start()
    saved(io, [1])
    (stored,) = tier_of(io).parts()
    descriptor = os.open(stored.file(stored.part.content.files[0].basename), os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    threading.Timer(0.05, fcntl.flock, (descriptor, fcntl.LOCK_UN)).start()
    with parts.opened(stored):
        assert parts.is_read(stored)
    os.close(descriptor)
    assert not parts.is_read(stored)
