"""A clock that is behind on a replaced node sorts no new run before the old one, of loops without a Trainer either."""

import logging
import os
import time

import pytest
import torch
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp
from tiered_checkpoint_io.clock import Clock

DAY_S = 24 * 3600.0


@pytest.fixture
def run(tmp_path, memory_dir, monkeypatch, caplog):
    """Saves a step by another run that neither loads nor looks, on a node of its own; returns its warnings."""
    caplog.set_level(logging.WARNING)

    def options(node):
        os.makedirs(f"{memory_dir}/{node}", exist_ok=True)
        return {"dirpath": str(tmp_path / "durable"), "memory_dir": f"{memory_dir}/{node}", "drain": "thread"}

    def run(kind, name, step, *, behind_s=0.0, memory_first=False):
        monkeypatch.setattr(Clock, "wall", lambda _: time.time() - behind_s)
        caplog.clear()
        state = {"model": {"w": torch.full((100,), float(step))}, "global_step": step}
        if kind == "dcp":
            writer = build(TieredStorageWriter, step=step, **options(f"{name}-{step}"))
            dcp.save(state, checkpoint_id=name, storage_writer=writer)
            writer.close()
        else:
            io = build(TieredCheckpointIO, **options(f"{name}-{step}"))
            if memory_first:
                io.save_checkpoint(state, "in-memory.ckpt", {"tiers": ["memory"]})
            io.save_checkpoint(state, name)
            io.teardown()
        return caplog.text

    run.options = options
    return run


@pytest.mark.parametrize(("kind", "memory_first"), [("synchronous", True), ("dcp", False)])
def test_what_a_new_run_saves_is_newer(run, kind, memory_first):
    run(kind, "before", 9)
    logged = run(kind, "after", 3, behind_s=DAY_S, memory_first=memory_first)
    assert ("this node's clock is behind" in logged) == memory_first
    # Under a name that is taken, the older of two saves would not be taken at all.
    run(kind, "before", 5, behind_s=2 * DAY_S)
    options = run.options("a-third-node")
    if kind == "dcp":
        state = {"model": {"w": torch.zeros(100)}}
        reader = build(dcp.load, state, checkpoint_id="before/tiered:latest", **options)
        assert (state["model"]["w"][0].item(), reader.opened.step) == (5, 5)
        reader.close()
        return
    io = build(TieredCheckpointIO, **options)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 5
    assert io.checkpointer.restored.name == "before"
    io.teardown()
