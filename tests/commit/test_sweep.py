"""Sweeps of saves that no manifest names; two runs on one name are simulated (``sim/two_runs.py``)."""

import os

import pytest
from support.committing import RUN, delete, part_only, save, swept
from support.faulty import FaultyStore
from support.sharded import make_part, objects, readable, views_of

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.files import Arrivals
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.engine.save.saver import PartSave
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.formats.image import Image, Segment
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path))


def test_a_name_with_an_unreadable_manifest_keeps_its_saves_and_others_do_not(store):
    save(store, "a", 1, kind="sharded")
    key = ids.manifest_key("a")
    intact = store.get(key)
    store.put(key, intact[:-10])
    part_only(store, "b", 2, 1)
    assert swept(store) == ["b"]
    store.put(key, intact)
    assert readable(store, "a") == 1


def test_a_file_that_another_writer_put_there_since_stays(store):
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


def test_a_drain_that_comes_back_can_not_commit_what_is_swept_at_that_moment(store):
    """The drain has found all files of its save, and is about to write the manifest."""
    for rank in (1, 0):
        part, data = make_part("a", 1, rank, kind="local")
        commit.put_part(store, part, views_of(data))
    arrivals = Arrivals(part)
    assert arrivals.look(store) and not arrivals.missing

    class MeetingSweep(FaultyStore):
        def put_if(self, key, data, expected):
            if key == ids.manifest_key("a") and not self.met:
                self.met = True
                assert swept(store) == ["a"]
            return store.put_if(key, data, expected)

        met = False

    with pytest.raises(Exception, match="of a file are there instead of"):
        commit.commit(MeetingSweep(store), part, views_of(data), arrivals.rows)
    assert readable(store, "a") is None


def test_what_others_read_has_its_own_name_where_no_other_save_can_have_it(memory_dir, tmp_path, monkeypatch):
    # Its drain never works.
    monkeypatch.setattr(DrainHandle, "ensure", lambda _: None)
    session = Session(TieredCheckpointConfig.from_any(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir))
    saver = CoordinatedSaver(session)

    def meta_of(step, name, *, durable=True):
        """Saves as Lightning's strategies do, shards and ``meta.pt``; returns the name of the latter."""
        facts = saver.issue(SaveFacts(name, "", step, 1, durable, coordinator=0, dirpath=session.dirpath))
        shard = memoryview(b"shard of %d" % step)
        image = Image(len(shard), (Segment(0, shard),), (), planned=True)
        saver.capture(PartSave(session, facts, 0, image))
        saver.finish(facts.save_id, lambda: b"metadata", wait=False, extra=("meta.pt", b"the rest of %d" % step))
        files = session.open().tier.parts()[-1].part.content.files
        (found,) = [each.basename for each in files if each.basename.startswith("meta")]
        return found

    try:
        assert meta_of(4, "epoch=0-step=4.ckpt") == "meta.pt"
        # A run that went back to an earlier step saves the same one again; the first may not be uploaded yet.
        assert meta_of(8, "step=8.ckpt", durable=False) == "meta.pt"
        assert meta_of(8, "step=8.ckpt") != "meta.pt"
        # A memory-only checkpoint may be uploaded later, by tiered-ckpt flush.
        session.known.remember({"step=10.ckpt"})
        assert meta_of(10, "step=10.ckpt", durable=False) != "meta.pt"
        assert meta_of(12, "preempted.ckpt", durable=False) != "meta.pt"
    finally:
        session.release()
