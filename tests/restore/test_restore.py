"""Restore on one node: what is taken, and what is told."""

import contextlib
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from support.clocks import hurried
from support.failing import failing
from support.faulty import FaultyStore
from support.restoring import (
    CHUNK,
    LATEST,
    NEW,
    OLD,
    flip,
    in_ranks,
    into_durable,
    into_memory,
    read,
    save_id,
)

from tiered_checkpoint_io.engine.chunks import drop_temporary, temporary_file
from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.aside import SLOTS, aside_root
from tiered_checkpoint_io.engine.restore.catalog import reading_order
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.stores.base import ObjectInfo
from tiered_checkpoint_io.stores.directory import DirectoryStore


def memory_files(world, node="n"):
    return sorted(path.name for path in (world.tier(node).root / "saves").rglob("*.ckpt"))


# ------------------------------------------------------------------------------------------- one node


def test_corrupt_in_memory_then_corrupt_on_the_durable_tier_then_the_older_one(world):
    into_durable(world.store, "old.ckpt", OLD, 1)
    into_durable(world.store, "new.ckpt", NEW, 2)
    flip(into_memory(world.tier(), world.store.url, "new.ckpt", NEW, 2))
    flip(Path(world.store.url, "new.ckpt"))
    restored, data = world.restore()
    assert (data, restored.step, restored.newest_save_id) == (OLD, 1, save_id(2))
    told = [note.split(" (step")[0] for note in restored.rejected]
    assert told == ["rank 0: memory new.ckpt", "rank 0: durable new.ckpt"]
    assert all("differ from their hash" in note for note in restored.rejected)
    (quarantined,) = (world.tier().root / "quarantine").iterdir()
    assert (quarantined / "new.ckpt").stat().st_size == len(NEW)
    # The quarantine is no reason to refuse what is intact, on the next start either.
    assert world.restore()[1] == OLD


def test_other_damage_does_not_hide_a_checkpoint_that_is_asked_for_by_name(world):
    Path(world.store.url).mkdir()
    Path(world.store.url, "plain.ckpt").write_bytes(NEW)
    path = into_memory(world.tier(), world.store.url, "other.ckpt", OLD, 2)
    (path.parent / "part.json").write_bytes(b"")
    for _ in range(2):
        restored, data = world.restore(Selector("name", "plain.ckpt"))
        assert (data, restored.content) == (NEW, None)
    with pytest.raises(CheckpointNotFoundError, match="may have been"):
        world.restore(Selector("name", "other.ckpt"))


def test_the_memory_of_another_durable_tier_is_not_ours(world):
    into_memory(world.tier(), "s3://elsewhere/run", "a.ckpt", NEW, 2)
    Queue(world.tier().root).submit(Request(save_id(3), "alias", "last.ckpt", "s3://elsewhere/run", "old.ckpt"))
    into_durable(world.store, "old.ckpt", OLD, 1)
    assert world.restore()[1] == OLD
    assert world.restore(Selector("last")) == (None, None)


def test_more_than_one_batch_of_corrupt_ones_still_finds_the_intact_one(world):
    into_durable(world.store, "step=0.ckpt", OLD, 1)
    for number in range(2, 37):
        into_durable(world.store, f"step={number}.ckpt", NEW, number)
        os.unlink(Path(world.store.url, f"step={number}.ckpt"))
        # Times in the order of saving, whatever the clock's grain.
        os.utime(Path(world.store.url, manifest_key(f"step={number}.ckpt")), (number, number))
    os.utime(Path(world.store.url, manifest_key("step=0.ckpt")), (1, 1))
    flip(into_memory(world.tier(), world.store.url, "m.ckpt", NEW, 50))
    restored, data = world.restore()
    assert (data, restored.step, len(restored.rejected)) == (OLD, 1, 36)


def test_a_copied_bucket_whose_times_tell_nothing_still_gives_the_newest():
    listed = [ObjectInfo(manifest_key(f"step={number}.ckpt"), 1, 1000.0 - number) for number in range(100)]
    order = reading_order([*listed, ObjectInfo(".tiered/manifests/not-one", 1, 2000.0)])
    assert "step=99.ckpt" in order[:32]
    assert order[0] == "step=0.ckpt"
    assert sorted(order) == sorted(f"step={number}.ckpt" for number in range(100))


def test_without_room_in_memory_a_temporary_file_serves_and_goes(world, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    into_durable(world.store, "a.ckpt", NEW, 1)
    folder = aside_root(world.tier(budget_bytes=CHUNK)) / SLOTS
    (folder / "tiered-checkpoint-of-a-killed-one.ckpt").touch()
    restored = world.restorer()(LATEST, Group("n"))
    assert restored.path.parent == folder
    assert folder.is_relative_to(tmp_path)
    # A load beside this one leaves it.
    with temporary_file(folder, 10) as (path, _):
        assert sorted(folder.iterdir()) == sorted([restored.path, path])
    drop_temporary(path)
    assert read(restored) == NEW
    assert not list(folder.iterdir())
    assert memory_files(world) == []


@pytest.mark.parametrize("released", [False, True])
def test_what_was_mapped_from_a_restored_file_is_never_written_over(world, released):
    path = into_memory(world.tier(), world.store.url, "a.ckpt", NEW, 1)
    restored = world.restorer()(LATEST, Group("n"))
    with open(restored.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        file.close()
        if released:
            restored.release()
        world.tier().remove(world.tier().parts()[0])
        slot = world.tier().acquire(len(NEW))
        slot.view[:4] = b"over"
        assert mapped[:] == NEW
    restored.release()
    assert not path.exists()


def test_a_store_that_never_answers_is_an_error_after_the_bound_that_is_told(world, caplog):
    """As a folder of a file server that is gone: what asks it has no bound of its own."""
    gone = threading.Event()

    class Gone(DirectoryStore):
        def list(self, prefix):
            gone.wait(30)
            return super().list(prefix)

    try:
        with hurried(retry_deadline_s=0.3, s3_read_s=0.3, silence_line_s=0.1):
            started = time.monotonic()
            with failing("unavailable", match="has not answered for 1 s"):
                world.restore(store=Gone(world.store.url))
            assert time.monotonic() - started < 10
    finally:
        gone.set()
    assert "giving up in" in caplog.text


@pytest.mark.parametrize("reason", ["access", "config", "credentials"])
def test_a_refusal_is_an_error_even_if_memory_has_something_but_for_credentials_that_are_not_good(world, reason):
    class Refusing(FaultyStore):
        def list(self, prefix):
            raise StoreError("no", reason=reason)

    with failing(reason):
        world.restore(store=Refusing(world.store))
    into_memory(world.tier(), world.store.url, "m.ckpt", NEW, 2)
    is_silence = reason == "credentials"
    with contextlib.nullcontext() if is_silence else failing(reason):
        assert world.restore(store=Refusing(world.store))[1] == NEW


def test_processes_without_a_group_read_each_byte_once(world):
    into_durable(world.store, "a.ckpt", NEW, 1)
    world.tier()

    class Meeting(FaultyStore):
        """Holds the first read back until another process reads too, or half a second is over."""

        known = threading.Barrier(3, timeout=10)
        reading = threading.Barrier(2, timeout=0.5)
        began = 0

        def get(self, key):
            data = super().get(key)
            self.known.wait()
            return data

        def read_into(self, key, offset, buffer):
            if offset == 0:
                Meeting.began += 1
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.reading.wait()
            super().read_into(key, offset, buffer)

    got = in_ranks(["n"] * 3, lambda _: world.restore(store=Meeting(world.store))[1])
    assert got == [NEW] * 3
    assert Meeting.began == 1
