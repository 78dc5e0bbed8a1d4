"""A clock that is behind on a replaced node sorts no new run before the old one, of loops without a Trainer either."""

import secrets
from pathlib import Path

import pytest
import torch
from support.launch import launch, said
from support.supporting import build
from support.training import wipe

from tiered_checkpoint_io import TieredCheckpointIO, dcp

WORKER = Path(__file__).with_name("loop_worker.py")
DAY_S = 24 * 3600.0


@pytest.fixture
def run(tmp_path, memory_dir, s3_url):
    """A process of its own saves a step under a name, on a node of its own; what it logged."""

    def run(kind, name, step, *, behind_s=0.0, memory_first=False):
        wipe(memory_dir)
        told = {"kind": kind, "name": name, "step": step, "behind_s": behind_s, "memory_first": memory_first}
        told |= {"dirpath": s3_url, "memory_dir": memory_dir, "namespace": f"node-{secrets.token_hex(4)}"}
        assert launch(tmp_path, [told], deadline_s=75, worker=WORKER) == ["saved"], said(tmp_path, 0)
        return (tmp_path / "log-0.txt").read_text()

    return run


@pytest.mark.parametrize(("kind", "memory_first"), [("synchronous", True), ("dcp", False)])
def test_what_a_new_run_saves_is_newer(run, s3_url, memory_dir, kind, memory_first):
    run(kind, "before", 9)
    logged = run(kind, "after", 3, behind_s=DAY_S, memory_first=memory_first)
    assert ("this node's clock is behind" in logged) == memory_first
    # Under a name that is taken, the older of two saves would not be taken at all.
    run(kind, "before", 5, behind_s=2 * DAY_S)
    wipe(memory_dir)
    options = {"dirpath": s3_url, "memory_dir": memory_dir, "namespace": "a-third-node", "drain": "thread"}
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
