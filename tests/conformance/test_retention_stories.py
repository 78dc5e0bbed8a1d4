"""Retention on the durable tier, over each kind of checkpoint; see :mod:`test_stories`, which has the table."""

# ruff: noqa: F811 - a fixture of another module is an argument here

import pytest
from support.draining import names

from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.durable.sweep import hold, release
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

from .kinds import lose_memory
from .test_stories import LATEST, dirpath, kind, on_a_directory, start  # noqa: F401 - fixtures

KEEP = {"retention": [{"latest": 2}, {"every_steps": 3}]}


@pytest.fixture
def store(dirpath):
    store = open_store(TieredCheckpointConfig(dirpath=dirpath))
    yield store
    store.close()


@pytest.fixture
def there(store):
    return lambda: names(store)


def test_the_durable_tier_keeps_what_policies_say_behind_each_save(start, store, there, memory_dir):
    start().save(1)
    held = hold(store, "step_1.ckpt", read_manifest(store, "step_1.ckpt").settled.save_id)
    job = start(**KEEP)
    for number in range(2, 8):
        # Some are waited for, some are behind the next.
        job.save(number, wait=number % 2 == 0)
    job.delete("step_1.ckpt")
    job.wait()
    assert there() == [f"step_{number}.ckpt" for number in (1, 3, 6, 7)]
    assert any("step_1.ckpt was not deleted: step_1.ckpt is in use" in said for said in said_by(job))
    release(store, held)
    job.save(8)
    job.close()
    assert there() == [f"step_{number}.ckpt" for number in (3, 6, 7, 8)]
    lose_memory(memory_dir)
    job = start()
    assert [job.load(which) for which in (LATEST, "step_3.ckpt")] == [8, 3]


def said_by(job):
    job.engine.session.poll()
    return job.messages.said
