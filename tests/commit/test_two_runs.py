"""Drains of two runs on one name: each write of an operation may meet one of another run, and all is as one after the other.

The store is a directory, whose conditional writes are real; what another run does comes between two requests.
"""

import contextlib
import itertools

import pytest
from support import committing
from support.faulty import FaultyStore
from support.sharded import FlatStore, Journals, readable

from tiered_checkpoint_io.engine.drain.process import DrainRunner
from tiered_checkpoint_io.engine.durable import copies, sweep
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError
from tiered_checkpoint_io.formats.image import Image, Segment
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

OLD, NEW = "20260101T000000.000000-00000001", "20260102T000000.000000-00000002"


class Meeting(FaultyStore):
    """Another run does something before the ``at``-th request."""

    def __init__(self, store, at, act):
        super().__init__(store)
        self._at, self._act = at, act

    def _count(self, operation, key):
        if super()._count(operation, key):
            raise AssertionError
        if self.operations == self._at:
            act, self._act = self._act, None
            act()
        return False


def save(store, name, number, run, **options):
    """Saves by the drain of a run; with ``created`` far in the past, the save waited for long."""
    return committing.save(store, name, number, save_id=ids.save_id(run, number), **{"created": 4e9, **options})


def delete(store, name, run):
    sweep.delete(store, name, before=ids.save_id(run, 9))


def alias(store, name, target, run):
    copies.put_alias(store, name, target, before=ids.save_id(run, 9))


@pytest.mark.parametrize("before", ["nothing", "an alias"])
def test_an_alias_whose_target_is_deleted_meanwhile_does_not_dangle(before, memory_dir):
    for at in itertools.count(1):
        store = FlatStore(f"{memory_dir}/{at}")
        for number, name in enumerate("ab", start=1):
            save(store, name, number, OLD)
        if before == "an alias":
            alias(store, "last", "b", OLD)
        met = Meeting(store, at, lambda: delete(store, "a", NEW))
        with contextlib.suppress(CheckpointNotFoundError):
            alias(met, "last", "a", OLD)
        if met.operations < at:
            return
        assert readable(store, "last") in (None, 2 if before == "an alias" else None), f"met at request {at}"


def test_a_save_that_was_replaced_half_done_does_not_come_back_to_files_that_are_about_to_go(memory_dir):
    """The older run's was killed behind W4, the newer one could not remove the other's files; both begin again."""
    kind = "sharded, one rank"
    for at in itertools.count(1):
        store, older, newer = FlatStore(f"{memory_dir}/{at}"), Journals(), Journals()
        save(store, "a", 1, OLD, kind=kind)
        with pytest.raises(StoreError):
            save(FaultyStore(store, fail_at=1, only=writes_switch), "a", 2, OLD, kind=kind, journals=older)
        save(FaultyStore(store, fail_at=1, only=deletes), "a", 3, NEW, kind=kind, journals=newer)
        met = Meeting(store, at, lambda: save(store, "a", 2, OLD, kind=kind, journals=older))
        save(met, "a", 3, NEW, kind=kind, journals=newer)
        if met.operations < at:
            return
        assert readable(store, "a") == 3, f"met at request {at}"


def writes_switch(operation, key):
    return operation == "upload" and (key == "a" or key.endswith(".metadata"))


def deletes(operation, _):
    return operation.startswith("delete")


def test_what_others_read_has_its_own_name_where_no_other_save_can_have_it(memory_dir, tmp_path, monkeypatch):
    # Its drain never works.
    monkeypatch.setattr(DrainRunner, "ensure", lambda _: None)
    session = Session(TieredCheckpointConfig.from_any(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir))
    saver = CoordinatedSaver(session)

    def meta_of(step, name, *, durable=True):
        """Saves as Lightning's strategies do, shards and ``meta.pt``; returns the name of the latter."""
        facts = saver.issue(name, step=step, world_size=1, durable=durable, dirpath=session.dirpath)
        shard = memoryview(b"shard of %d" % step)
        saver.capture(facts, 0, Image(len(shard), (Segment(0, shard),), (), planned=True))
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
