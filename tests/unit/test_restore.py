"""Restore on one node: what is taken, and what is told."""

import contextlib
import functools
import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from support.clocks import hurried
from support.restoring import (
    CHUNK,
    flip,
    in_ranks,
    into_durable,
    into_memory,
    make_content,
    of_a_newer_release,
    save_id,
)
from support.supporting import build

from tiered_checkpoint_io.engine import chunks
from tiered_checkpoint_io.engine.chunks import drop_temporary, temporary_file
from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.durable.aliases import put_alias
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.restore.aside import SLOTS, aside_root
from tiered_checkpoint_io.engine.restore.catalog import Tiers, reading_order
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.engine.restore.restore import restore
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    FormatVersionError,
    RestoreError,
    StoreAccessError,
    StoreConfigError,
    StoreCredentialsError,
    StoreUnavailableError,
)
from tiered_checkpoint_io.memory.slots import clean_dead
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.base import ObjectInfo
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.testing.faulty import FaultyStore

LATEST = Selector("latest")
OLD, NEW = os.urandom(3 * CHUNK + 5), os.urandom(3 * CHUNK + 9)


class World:
    """Nodes, each with a memory of its own, and one durable tier."""

    def __init__(self, base, durable):
        self.base = Path(base)
        self.store = DirectoryStore(durable)
        self.tiers = {}

    def tier(self, node="n", **options):
        if node not in self.tiers or options:
            folder = self.base / node
            folder.mkdir(exist_ok=True)
            self.tiers[node] = MemoryTier.open(str(folder), "default", **options)
        return self.tiers[node]

    def restorer(self, node="n", store=None, dirpath=None):
        config = build(
            TieredCheckpointConfig, dirpath=self.store.url, memory_dir=str(self.base / node), wait_timeout_s=20
        )
        tier, log = self.tier(node), logging.getLogger("test")
        tiers = Tiers(config, tier, lambda: store or self.store, dirpath or self.store.url, log)
        return functools.partial(restore, tiers)

    def restore(self, selector=LATEST, node="n", store=None):
        """Alone; the restored one and its bytes."""
        restored = self.restorer(node, store)(selector, Group(node))
        return restored, read(restored)

    def restore_all(self, nodes, selector=LATEST, stores=None):
        """On all ranks; what each got, or raised."""
        for node in nodes:
            self.tier(node)

        def work(group):
            store = (stores or {}).get(group.rank)
            restored = self.restorer(group.node, store)(selector, group)
            return restored and (restored.content.save_id, restored.tier, read(restored))

        return in_ranks(nodes, work)


def read(restored):
    if restored is None:
        return None
    data = restored.path.read_bytes()
    restored.release()
    return data


@pytest.fixture
def world(memory_dir, tmp_path):
    return World(memory_dir, str(tmp_path / "durable"))


def memory_files(world, node="n"):
    return sorted(path.name for path in (world.tier(node).root / "saves").rglob("*.ckpt"))


# ------------------------------------------------------------------------------------------- one node
def test_what_the_durable_tier_gives_lies_in_memory_for_the_next_start(world):
    into_durable(world.store, "old.ckpt", OLD, 1)
    into_durable(world.store, "d/new.ckpt", NEW, 2)
    before = world.store.metrics.snapshot()
    restored, data = world.restore()
    after = world.store.metrics.snapshot()
    assert (data, restored.tier, restored.step, restored.bytes_read) == (NEW, "durable", 2, len(NEW))
    assert restored.newest_save_id == save_id(2)
    assert after["requests.list"] - before.get("requests.list", 0) == 1
    (stored,) = world.tier().parts()
    assert (stored.save_id, stored.drained) == (save_id(2), True)
    again, data = world.restore()
    assert (data, again.tier, again.bytes_read, again.rejected) == (NEW, "memory", 0, [])


def test_a_name_costs_no_list(world):
    into_durable(world.store, "old.ckpt", OLD, 1)
    into_durable(world.store, "new.ckpt", NEW, 2)
    put_alias(world.store, "last.ckpt", "old.ckpt")
    before = world.store.metrics.snapshot()
    for name in ("old.ckpt", "last.ckpt"):
        restored, data = world.restore(Selector("name", name))
        assert (restored.name, data) == ("old.ckpt", OLD)
    assert world.store.metrics.snapshot().get("requests.list") == before.get("requests.list")


def test_nothing_anywhere_is_none_and_an_unknown_name_is_an_error(world):
    assert world.restore() == (None, None)
    with pytest.raises(CheckpointNotFoundError, match=r"no\.ckpt"):
        world.restore(Selector("name", "no.ckpt"))


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


def test_all_corrupt_is_an_error_that_lists_all_and_stays_one(world):
    into_durable(world.store, "old.ckpt", OLD, 1)
    flip(Path(world.store.url, "old.ckpt"))
    damaged = into_memory(world.tier(), world.store.url, "m.ckpt", NEW, 2)
    flip(damaged)
    with pytest.raises(RestoreError, match=r"memory m\.ckpt.*durable old\.ckpt"):
        world.restore()
    # Another rank of the node had read the same chunk.
    MemoryTier(world.tier().root).quarantine(damaged.parent, "a chunk differs")
    shutil.rmtree(world.store.url)
    # What was found corrupt must not become a start from scratch.
    with pytest.raises(RestoreError, match="quarantine"):
        world.restore()


def test_a_part_that_cannot_be_read_makes_way_for_the_same_save_from_the_durable_tier(world):
    into_durable(world.store, "a.ckpt", NEW, 2)
    path = into_memory(world.tier(), world.store.url, "a.ckpt", NEW, 2)
    (path.parent / "part.json").write_bytes(b'{"half')
    restored, data = world.restore()
    assert (data, restored.tier) == (NEW, "durable")
    assert "part.json" in restored.rejected[0]
    assert memory_files(world) == ["a.ckpt"]


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


@pytest.mark.parametrize("has_room", [False, True])
def test_a_spill_without_room_either_is_not_what_a_load_fails_for(world, tmp_path, monkeypatch, caplog, has_room):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    into_durable(world.store, "a.ckpt", NEW, 1)
    tier = world.tier(budget_bytes=CHUNK)
    tier.use_spill(str(tmp_path / "disk"))
    spill = tier.open_spill()
    spill._left = lambda: 1 << 30 if has_room else CHUNK
    with caplog.at_level(logging.INFO, "test"):
        restored, data = world.restore()
    assert (data, restored.path.is_relative_to(spill.root)) == (NEW, has_room)
    assert "resuming from a.ckpt (durable, " in caplog.text, "where it came from, not where it lies"


def test_a_worker_that_outlives_a_load_keeps_no_temporary_file(tmp_path):
    read_end, write_end = os.pipe()
    with temporary_file(tmp_path, 10) as (path, _):
        pass
    worker = os.fork()
    if worker == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    os.close(chunks._temporary.pop(path))  # as when its process is killed
    deadline = time.monotonic() + 5
    while (is_there := path.exists()) and time.monotonic() < deadline:
        clean_dead(str(tmp_path))
        time.sleep(0.01)
    os.close(write_end)
    os.close(read_end)
    os.waitpid(worker, 0)
    assert not is_there


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


def test_unavailable_is_an_error_but_memory_carries_on(world):
    into_durable(world.store, "a.ckpt", OLD, 1)
    away = FaultyStore(world.store, fail_at=1)
    with pytest.raises(StoreUnavailableError):
        world.restore(store=away)
    into_memory(world.tier(), world.store.url, "m.ckpt", NEW, 2)
    restored, data = world.restore(store=away)
    assert data == NEW
    assert "injected" in restored.rejected[0]


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
            with pytest.raises(StoreUnavailableError, match="has not answered for 1 s"):
                world.restore(store=Gone(world.store.url))
            assert time.monotonic() - started < 10
    finally:
        gone.set()
    assert "giving up in" in caplog.text


@pytest.mark.parametrize("kind", [StoreAccessError, StoreConfigError, StoreCredentialsError])
def test_a_refusal_is_an_error_even_if_memory_has_something_but_for_credentials_that_are_not_good(world, kind):
    class Refusing(FaultyStore):
        def list(self, prefix):
            raise kind("no")

    with pytest.raises(kind):
        world.restore(store=Refusing(world.store))
    into_memory(world.tier(), world.store.url, "m.ckpt", NEW, 2)
    is_silence = kind is StoreCredentialsError
    with contextlib.nullcontext() if is_silence else pytest.raises(kind):
        assert world.restore(store=Refusing(world.store))[1] == NEW


@pytest.mark.parametrize("where", ["memory", "durable"])
def test_what_a_newer_release_wrote_is_never_passed_over(world, where):
    into_durable(world.store, "old.ckpt", OLD, 1)
    if where == "durable":
        into_durable(world.store, "new.ckpt", NEW, 2)
        file = Path(world.store.url, manifest_key("new.ckpt"))
    else:
        file = into_memory(world.tier(), world.store.url, "new.ckpt", NEW, 2).parent / "part.json"
    file.write_bytes(of_a_newer_release(file.read_bytes()))
    for _ in range(2):
        with pytest.raises(FormatVersionError, match="upgrade"):
            world.restore()
    assert file.exists()
    assert world.restore(Selector("name", "old.ckpt"))[1] == OLD


def test_a_sharded_checkpoint_is_an_error_that_says_so(world):
    content = make_content("a.ckpt", NEW, 3, kind="sharded")
    world.store.put(manifest_key("a.ckpt"), Manifest("a.ckpt", content).to_json())
    assert {str(error)[:29] for error in world.restore_all(["n", "m"])} == {"a.ckpt is a sharded checkpoin"}


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
