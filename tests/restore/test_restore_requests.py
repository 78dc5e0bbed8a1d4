"""Requests of a restore of many parts to the durable tier, and its result if a listing is damaged."""

import errno
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from support.committing import save
from support.faulty import FaultyStore
from support.restoring import in_ranks, into_durable
from support.sharded import bytes_of
from support.story import op_id

from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.catalog import discover
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.restore.shards import open_shards
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA
from tiered_checkpoint_io.stores.directory import DirectoryStore

LATEST = Selector("latest")
RANKS = 4
STEPS = 3


def file_of(rank, number=STEPS, which=0):
    return f"__{rank}_{which}-{number:08d}.distcp"


def opened(world, group=None, store=None):
    tiers = world.tiers_of(store=store)
    return open_shards(lambda: (tiers, LATEST), group or Group(), lambda _: None)


class Asked(FaultyStore):
    """Remembers what was asked for."""

    def __init__(self, store, **options):
        self.keys = []
        super().__init__(store, only=self._remember, **options)

    def _remember(self, operation, key):
        self.keys.append(key)
        return key.startswith(ids.SAVES_PREFIX)

    def listings(self):
        return sorted(key for key in self.keys if key.startswith(ids.SAVES_PREFIX))


@pytest.fixture
def world(world):
    """Returns a durable tier with three checkpoints of four ranks, and a node that has none of them in its memory."""
    for number in range(1, STEPS + 1):
        save(world.store, f"step_{number}", number, kind="sharded", world_size=RANKS)
    return world


def test_what_is_asked_for_by_its_name_is_looked_for_elsewhere_only_where_it_has_no_manifest_here(world):
    asked, above = Asked(world.store), Asked(DirectoryStore(str(Path(world.store.url).parent)))
    tiers = replace(world.tiers_of(store=asked), store_at=lambda _: above)
    assert len(discover(tiers, Selector("name", "step_1"), {}, "sharded").manifests) == 1
    assert (asked.keys, above.keys) == ([ids.manifest_key("step_1")], [])
    known = discover(tiers, Selector("name", "a/b/step_7"), {}, "sharded")
    assert (known.elsewhere, known.foreign) == (None, None)
    # Each folder except this dirpath is asked once, at any depth.
    assert len(above.keys) == len(set(above.keys)) == min(16, len(Path(world.store.url).parts))


def test_each_rank_reads_the_index_once_and_the_descriptions_of_what_it_loads(world):
    newest = op_id(STEPS)
    stores = [Asked(world.store) for _ in range(RANKS)]

    def load(group):
        basename = file_of(group.rank)
        found = opened(world, group, stores[group.rank])
        size = len(bytes_of(STEPS, group.rank, basename))
        loaded = bytes(found.files.ensure(basename, [(0, size)])[:size])
        found.files.ensure(file_of(group.rank, which=1), [(0, 10)])
        found.close()
        return loaded == bytes_of(STEPS, group.rank, basename)

    assert in_ranks(["n"] * RANKS, load) == [True] * RANKS
    for rank, store in enumerate(stores):
        assert store.listings() == [ids.index_key(newest), ids.description_key(newest, rank)]
    assert [store.keys.count(ids.MANIFEST_PREFIX) for store in stores] == [1, 0, 0, 0]
    assert [stores[0].keys.count(ids.manifest_key(f"step_{number}")) for number in (1, 2, 3)] == [1, 1, 1]


def test_without_room_in_memory_a_rank_reads_for_itself(world, monkeypatch):
    fallocate = os.posix_fallocate

    def full(descriptor, *args):
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("(deleted)"):
            raise OSError(errno.ENOSPC, "full")
        fallocate(descriptor, *args)

    monkeypatch.setattr(os, "posix_fallocate", full)
    found, expected = opened(world), bytes_of(STEPS, 1, file_of(1))
    buffer = bytearray(len(expected))
    found.files.fill(file_of(1), [(0, memoryview(buffer))])
    assert buffer == expected == found.files.ensure(file_of(1), [(0, len(expected))])[: len(expected)]
    found.close()


@pytest.mark.parametrize("damage", ["gone", "cut"])
@pytest.mark.parametrize("which", ["index", "description"])
def test_a_damaged_listing_leads_to_the_step_before_as_damaged_bytes_do(world, which, damage):
    newest = op_id(STEPS)
    key = ids.index_key(newest) if which == "index" else ids.description_key(newest, 0)
    world.store.delete(key) if damage == "gone" else world.store.put(key, world.store.get(key)[:-5])
    found = opened(world)
    assert found.step == STEPS - 1
    assert found.small[METADATA] == bytes_of(STEPS - 1, 0, METADATA)
    (note,) = found.rejected
    assert key in note
    found.close()


def test_a_full_one_behind_damaged_sharded_ones_is_loaded_by_a_caller_that_takes_both(world):
    """Strategies look for a sharded one first, then for a full one."""
    data = b"full" * 1000
    into_durable(world.store, "old.ckpt", data, 0)
    for number in range(1, STEPS + 1):
        world.store.delete(ids.index_key(op_id(number)))
    with pytest.raises(
        RestoreError, match="old.ckpt is a full checkpoint, not a sharded one; before it: .*step_3"
    ) as caught:
        opened(world)
    rejected = pickle.loads(pickle.dumps(caught.value)).rejected
    assert sorted(rejected) == [op_id(number) for number in range(1, STEPS + 1)]
    restored, loaded = world.restorer()(LATEST, Group(), rejected=rejected)
    assert loaded == data
    assert "this object is missing" in str(restored.rejected)
