"""How full node memory is, as an exporter tells it that runs in another container than the trainer."""

import shutil

import pytest
import torch
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io.engine import session
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.memory import node, spill, tier
from tiered_checkpoint_io.memory.budget import BUDGET_FILE
from tiered_checkpoint_io.metrics.catalog import FREE, USED
from tiered_checkpoint_io.metrics.collect import Collector
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

MIB = 1 << 20


@pytest.fixture
def job(tmp_path):
    """Two checkpoints of 8 MiB in a tmpfs for three."""
    with mounted_tmpfs(tmp_path / "small", 26 * MIB) as small, mounted_tmpfs(tmp_path / "spill", 10 * MIB) as spilled:
        options = {"dirpath": str(tmp_path / "durable"), "memory_dir": str(small), "spill_dir": str(spilled)}
        engine = Checkpointer(TieredCheckpointConfig(**options, memory_keep_last=2, memory_allocation_percentage=95))
        yield engine
        engine.session.release()


def train(engine):
    for step in range(1, 5):
        state = {"w": torch.full((2 * MIB,), float(step)), "global_step": step}
        engine.save(state, f"step={step}.ckpt", tiers={"memory"}, wait=False)
    return engine.session.open().tier


def space(root, of="memory"):
    found = [each for each in Collector(root).collect() if each.labels.get("tier") == of]
    return tuple(each.value / MIB for each in found if each.metric in (USED, FREE))


def of_another_container(monkeypatch):
    """A sidecar's limits: less than what the trainer has in memory."""
    monkeypatch.setattr(node, "memory_limit", lambda *_: 2 * MIB)
    for module in (node, spill, tier):
        monkeypatch.setattr(module, "memory_left", lambda *_: -MIB)


def test_a_slot_that_waits_for_the_next_save_is_free(job):
    memory = train(job)
    memory.prepare(8 * MIB, lambda: False)
    assert memory.room() < 4 * MIB
    used, free = space(memory.root)
    assert used == pytest.approx(16, abs=1)
    assert free >= 8, "nothing was skipped, and nothing will be"


def test_limits_of_the_exporter_do_not_count(job, monkeypatch):
    memory = train(job)
    memory.open_spill()
    (memory.root / CONFIG_FILE).write_text(job.session.config.to_json())
    expected = space(memory.root), space(memory.root, "spill")
    assert expected[1][1] > 9
    of_another_container(monkeypatch)
    assert (space(memory.root), space(memory.root, "spill")) == expected


def test_the_trainers_budget_counts_or_else_the_file_system(job, monkeypatch):
    monkeypatch.setattr(session, "node_budget", lambda *_: 20 * MIB)
    root = job.session.open().tier.root
    of_another_container(monkeypatch)
    assert sum(space(root)) == pytest.approx(20, abs=0.5)
    shutil.rmtree(root)
    job.session.open()
    assert (root / BUDGET_FILE).read_text() == str(20 * MIB), "noted again where memory was removed"
    (root / BUDGET_FILE).unlink()
    assert sum(space(root)) == pytest.approx(26, abs=0.5)
