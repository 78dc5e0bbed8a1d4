"""Restore on one node of what another run overwrites, or replaces, meanwhile."""

import pytest
from support.restoring import CHUNK, LATEST, NEW, OLD, into_durable, make_content, save_id

from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.directory import DirectoryStore

#: An object of an overwrite under way may be the larger or the smaller.
SHORT = OLD[: 2 * CHUNK]


def test_an_overwrite_under_way_gives_the_content_that_the_object_has(world):
    into_durable(world.store, "a.ckpt", SHORT, 1)
    old = read_manifest(world.store, "a.ckpt").content
    both = Manifest("a.ckpt", make_content("a.ckpt", NEW, 2), previous=(old,))
    world.store.put(manifest_key("a.ckpt"), both.to_json())
    restored, data = world.restore()
    assert (data, restored.content.save_id) == (SHORT, save_id(1))


class Overtaken(DirectoryStore):
    """Beside each first read of a file's bytes, the drain of another run goes on."""

    def __init__(self, root, **then):
        super().__init__(root)
        self.then = then

    def read_pieces(self, key, offset, pieces, filled):
        self.then.pop(key.partition(".")[0], lambda: None)()
        super().read_pieces(key, offset, pieces, filled)


@pytest.mark.parametrize("selector", [LATEST, Selector("name", "last.ckpt")], ids=["latest", "name"])
def test_what_another_run_overwrites_while_it_is_read_is_read_anew(world, selector, caplog):
    into_durable(world.store, "milestone.ckpt", SHORT, 1)
    into_durable(world.store, "last.ckpt", OLD, 2)
    overtaken = Overtaken(world.store.url, last=lambda: into_durable(world.store, "last.ckpt", NEW, 3))
    restored, data = world.restore(selector, store=overtaken)
    assert (data, restored.content.save_id, restored.newest_save_id) == (NEW, save_id(3), save_id(3))
    assert "last.ckpt was removed or overwritten while it was read" in caplog.text


def test_what_another_run_replaces_while_it_is_read_gives_way_to_the_new_one(world):
    def replaced():
        into_durable(world.store, "new.ckpt", NEW, 3)
        for key in (manifest_key("old.ckpt"), "old.ckpt"):
            world.store.delete(key)

    into_durable(world.store, "milestone.ckpt", SHORT, 1)
    into_durable(world.store, "old.ckpt", OLD, 2)
    assert world.restore(store=Overtaken(world.store.url, old=replaced))[1] == NEW


def test_an_overwrite_that_ends_between_two_reads_gives_the_new_content(world):
    new = make_content("a.ckpt", NEW, 2)

    def ended():
        world.store.put("a.ckpt", NEW)
        world.store.put(manifest_key("a.ckpt"), Manifest("a.ckpt", new).to_json())

    into_durable(world.store, "a.ckpt", OLD, 1)
    both = Manifest("a.ckpt", new, previous=(read_manifest(world.store, "a.ckpt").content,))
    world.store.put(manifest_key("a.ckpt"), both.to_json())
    reads = iter([lambda: None, ended])

    class Ending(DirectoryStore):
        def read_pieces(self, key, offset, pieces, filled):
            if offset == 0:
                next(reads, lambda: None)()
            super().read_pieces(key, offset, pieces, filled)

    assert world.restore(store=Ending(world.store.url))[1] == NEW
