"""The sweep of saves that no manifest names: old ones go, but no save that lives, is named, or is another writer's."""

import os

import pytest
from support.committing import RUN, delete, part_only, save, swept
from support.failing import failing
from support.faulty import FaultyStore
from support.sharded import make_part, named, objects, readable, views_of

from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.engine.durable.survey import Survey
from tiered_checkpoint_io.engine.durable.sweep import refresh, sweep
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.directory import DirectoryStore

NOW, HOUR = 10_000.0, 3600.0


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path))


def left(store, name, number, seconds):
    """Writes a part of a save that never became complete, so long before NOW."""
    part_only(store, name, number, 1)
    age(store, name, number, seconds)


def age(store, name, number, seconds):
    for entry in [*store.list(f"{name}/"), *store.list(ids.save_prefix(ids.save_id(RUN, number)))]:
        os.utime(f"{store.url}/{entry.key}", (NOW - seconds, NOW - seconds))


def gone(store, **options):
    return [name for _, name in sweep(store, Survey(), before=NOW - HOUR, **options)]


def test_a_save_goes_once_it_is_old_and_older_than_all_live_ones(store):
    save(store, "kept", 1, kind="sharded")
    for number, name in enumerate(("a", "b", "c", "d"), start=2):
        left(store, name, number, 100.0 if name == "c" else 2 * HOUR)
    assert gone(store, live=[ids.save_id(RUN, 2)]) == []
    assert gone(store) == ["a", "b"], "d is later than c, which was written to just now"
    assert refresh(store, ids.save_id(RUN, 5)) and not refresh(store, ids.save_id(RUN, 9))
    age(store, "c", 4, 2 * HOUR)
    assert gone(store) == ["c"], "d was refreshed"
    assert swept(store) == ["d"]
    assert objects(store) == named(store) and readable(store, "kept") == 1


def test_a_name_with_an_unreadable_manifest_keeps_its_saves_and_others_do_not(store):
    save(store, "a", 1, kind="sharded")
    key = ids.manifest_key("a")
    intact = store.get(key)
    store.put(key, intact[:-10])
    part_only(store, "b", 2, 1)
    assert swept(store) == ["b"]
    store.put(key, intact)
    assert readable(store, "a") == 1


def test_a_file_that_somebody_else_put_there_since_stays(store):
    save(store, "a.ckpt", 1)
    with pytest.raises(Exception, match="injected"):
        delete(
            FaultyStore(
                store,
                fail_at=1,
                when="after",
                only=lambda what, key: key == ids.manifest_key("a.ckpt") and what == "delete",
            ),
            "a.ckpt",
        )
    assert objects(store) == [ids.description_key(ids.save_id(RUN, 1), 0), "a.ckpt"]
    store.put("a.ckpt", b"of another program")
    os.utime(f"{store.url}/a.ckpt", (4e9, 4e9))
    assert swept(store) == ["a.ckpt"]
    assert objects(store) == ["a.ckpt"] and store.get("a.ckpt") == b"of another program"


def test_a_locked_file_keeps_no_other_save_and_is_asked_for_once(store):
    class Locked(DirectoryStore):
        asked = 0

        def delete(self, key):
            if key.startswith("a/__1_0"):
                self.asked += 1
                raise StoreError("locked", operation="delete", key=key, reason="access")
            super().delete(key)

    locked, survey = Locked(store.url), Survey()
    part_only(store, "a", 1, 1)
    part_only(store, "b", 2, 1)
    with failing("access", match="locked"):
        sweep(locked, survey, before=4e9)
    assert not list(store.list("b/"))
    assert sweep(locked, survey, before=4e9) == [] and locked.asked == 1
    assert swept(store) == ["a"] and objects(store) == []


def test_a_drain_that_comes_back_can_not_commit_what_is_swept_at_that_moment(store):
    """The drain has found all files of its save, and is about to write the manifest."""
    for rank in (1, 0):
        part, data = make_part("a", 1, rank, kind="local")
        commit.put_part(store, part, views_of(data))
    arrivals = Arrivals(part)
    assert arrivals.look(store) and not arrivals.missing

    class Meeting(FaultyStore):
        def put_if(self, key, data, expected):
            if key == ids.manifest_key("a") and not self.met:
                self.met = True
                assert swept(store) == ["a"]
            return store.put_if(key, data, expected)

        met = False

    with pytest.raises(Exception, match="of a file are there, in place of"):
        commit.commit(Meeting(store), part, views_of(data), arrivals.rows)
    assert readable(store, "a") is None
