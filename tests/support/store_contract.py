"""StoreContract: every promise of a Store, as tests to inherit. Copy this file into the tests of your own store."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Lock
from typing import Any

import pytest

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import (
    ConditionalStore,
    CopyRefusedError,
    ServerCopy,
    Store,
    children_of,
    copy_to,
    folders_of,
    read_pieces,
)

ODD_KEYS = [
    "a",
    "a/b/c",
    "epoch=0-step=5.ckpt",
    "with space/ and more ",
    "plus+and%20percent%2Fslash",
    "ünïcode/ключ/鍵",
    "a.b/.hidden/..dots..",
    "glob[0-9]*?{a,b}",
    "q?a=1&b=2#frag;semi:colon@~!$'(),",
    "x" * 200,
]
BAD_KEYS = ["", "/absolute", "a/../../b", "../a", "a//b", "a/", "./a", "a/.", "nul\0byte"]


class StopHere(Exception):
    """Error that a caller's own code raises in the middle of an upload."""


class MemoryJournal:
    """An upload journal that lives as long as the test."""

    def __init__(self) -> None:
        self.state: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        return self.state

    def write(self, state: dict[str, object]) -> None:
        self.state = state

    def clear(self) -> None:
        self.state = None


def stop_here(_: int) -> None:
    """Ends the upload, as a progress report."""
    raise StopHere


class OptionalContract:
    """Skips what a store has not."""

    #: True if the promises of a ConditionalStore are tested: not if its server takes no notice of conditions.
    keeps_conditions = True

    # --------------------------------------------------------------------------------- deletes of many
    def test_many_are_removed_where_a_store_can_do_that(self, store: Store) -> None:
        delete_all = getattr(store, "delete_all", None)
        if delete_all is None:
            pytest.skip("this store removes one at a time")
        for number in range(5):
            store.put(f"many/{number} &<ü>", b"1")
        delete_all([*(f"many/{number} &<ü>" for number in range(4)), "many/none"])
        assert [entry.key for entry in store.list("")] == ["many/4 &<ü>"]

    # --------------------------------------------------------------------------------- reads in pieces
    def test_pieces_are_filled_and_reported_in_order(self, store: Store) -> None:
        data = os.urandom(3 << 20)
        store.upload("x", memoryview(data))
        pieces = [memoryview(bytearray(length)) for length in (1, 1 << 20, 0, 700_001, 5)]
        arrived: list[bytes] = []
        read_pieces(store, "x", 7, pieces, lambda index: arrived.append(bytes(pieces[index])))
        assert [len(each) for each in arrived] == [1, 1 << 20, 0, 700_001, 5]
        assert b"".join(arrived) == data[7 : 7 + sum(map(len, arrived))]
        assert store.metrics.snapshot()["bytes.down"] == sum(map(len, arrived))
        with pytest.raises(CorruptCheckpointError):
            read_pieces(store, "x", len(data) - 4, [pieces[0], pieces[-1]], lambda _: None)
        with pytest.raises(StoreNotFoundError):
            read_pieces(store, "none", 0, [pieces[0]], lambda _: None)

    # --------------------------------------------------------------------------------- copies
    def _skip_without_copy(self, store: Store) -> None:
        if getattr(store, "copy", None) is None:
            pytest.skip("this store can't copy")

    @pytest.mark.parametrize("size", [0, 1000, 17 << 20])
    def test_a_copy_is_an_object_of_its_own_and_sends_nothing(self, store: Store, size: int) -> None:
        self._skip_without_copy(store)
        data = os.urandom(size)
        store.upload("a/source", memoryview(data))
        store.put("b/target", b"old")
        before = store.metrics.snapshot()
        seen: list[bytes] = []
        journal = MemoryJournal()
        copy = ServerCopy("a/source", size, lambda: seen.append(store.get("b/target")))
        for _ in range(2):
            copied: list[int] = []
            copy_to(store, "b/target", copy, journal=journal, progress=copied.append)
            assert sum(copied) == size
            assert journal.read() is None
        assert seen[0] == b"old"
        assert store.get("b/target") == data
        counts = store.metrics.snapshot()
        assert all(counts.get(name) == before.get(name) for name in ("bytes.up", "bytes.sent"))
        assert sorted(entry.key for entry in store.list("")) == ["a/source", "b/target"]
        store.put("a/source", b"another")
        store.delete("a/source")
        assert store.get("b/target") == data

    def test_a_copy_that_is_called_off_or_impossible_leaves_the_old_object(self, store: Store) -> None:
        self._skip_without_copy(store)
        store.put("source", b"12345")
        store.put("target", b"old")
        for source, size, check, error in (
            ("source", 5, lambda: stop_here(0), StopHere),
            ("source", 6, lambda: None, CopyRefusedError),
            ("nothing", 5, lambda: None, StoreNotFoundError),
        ):
            with pytest.raises(error):
                copy_to(store, "target", ServerCopy(source, size, check))
            assert store.get("target") == b"old"
        assert sorted(entry.key for entry in store.list("")) == ["source", "target"]

    # --------------------------------------------------------------------------------- on a condition
    @pytest.fixture
    def conditional_store(self, store: Store) -> ConditionalStore:
        """Returns the store, if it is conditional; conditional writes are optional."""
        if not self.keeps_conditions or not isinstance(store, ConditionalStore):
            pytest.skip("this store does not write on a condition")
        return store

    @pytest.mark.parametrize("key", ["x", "a/b/c"])
    def test_what_is_as_it_was_read_goes(self, conditional_store: ConditionalStore, key: str) -> None:
        store = conditional_store
        assert store.tag(key) is None
        tag = store.put_if(key, b"1", None)
        assert store.get_tagged(key) == (b"1", tag)
        store.upload_if(key, memoryview(b"2"), tag)
        data, other = store.get_tagged(key)
        assert (data, store.tag(key)) == (b"2", other)
        assert other != tag
        store.delete_if(key, other)
        store.delete_if(key, other)
        assert store.tag(key) is None
        with pytest.raises(StoreNotFoundError):
            store.get_tagged(key)
        store.upload_if(key, memoryview(b"3"), None)
        assert store.get(key) == b"3"

    def test_what_changed_since_it_was_read_stays(self, conditional_store: ConditionalStore) -> None:
        store = conditional_store
        tag = store.put_if("x", b"1", None)
        store.put("x", b"22")
        for write in (
            lambda: store.put_if("x", b"3", tag),
            lambda: store.put_if("x", b"3", None),
            lambda: store.upload_if("x", memoryview(b"3"), tag),
            lambda: store.upload_if("x", memoryview(b"3"), None),
            lambda: store.delete_if("x", tag),
            lambda: store.put_if("gone", b"3", tag),
        ):
            with pytest.raises(StoreError) as caught:
                write()
            assert caught.value.retryable

        def look() -> None:
            raise StoreError("by what was looked at", reason="changed")

        with pytest.raises(StoreError, match="looked at"):
            store.upload_if("x", memoryview(b"3"), store.tag("x"), look=look)
        assert [(entry.key, entry.size) for entry in store.list("")] == [("x", 2)]
        assert store.metrics.snapshot().get("retries", 0) == 0

    def test_what_it_would_write_is_there_already(self, conditional_store: ConditionalStore) -> None:
        store = conditional_store
        tag = store.put_if("x", b"1", None)
        # A repeat, as if the answer to the first attempt was lost.
        assert store.put_if("x", b"1", None) == tag

    def test_of_many_who_read_the_same_one_writes(self, conditional_store: ConditionalStore) -> None:
        store = conditional_store
        tag = store.put_if("x", b"0", None)

        def write(number: int) -> bool:
            try:
                store.put_if("x", str(number).encode(), tag)
            except StoreError as error:
                if error.reason != "changed":
                    raise
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            written = list(pool.map(write, range(1, 17)))
        assert sum(written) == 1
        assert store.get("x") == str(written.index(True) + 1).encode()


class ContentOnDemand:
    """Content whose pieces are copied when they are asked for, and counted."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lock = Lock()
        #: Bytes in pieces that are in use, and the most of them at once.
        self.held = self.peak = 0

    def __len__(self) -> int:
        return len(self._data)

    @contextmanager
    def _piece(self, bounds: slice) -> Iterator[memoryview]:
        with memoryview(bytearray(self._data[bounds])) as piece:
            size = len(piece)
            with self._lock:
                self.held += size
                self.peak = max(self.peak, self.held)
            try:
                yield piece
            finally:
                with self._lock:
                    self.held -= size

    def __getitem__(self, bounds: slice, /) -> AbstractContextManager[memoryview]:
        return self._piece(bounds)


class StoreContract(OptionalContract):
    """Inherit, and give a fixture ``store`` that yields an empty store."""

    #: Bytes of an upload that the store sends in several parts.
    large = 17 << 20

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Makes the store under test."""
        raise NotImplementedError

    def test_is_a_store_and_says_where(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url

    # --------------------------------------------------------------------------------- small objects
    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_what_was_put_is_read_listed_and_deleted(self, store: Store, key: str) -> None:
        store.put(key, b"first")
        store.put(key, b"second")
        assert store.get(key) == b"second"
        assert store.size(key) == 6
        assert [(entry.key, entry.size) for entry in store.list("")] == [(key, 6)]
        assert [entry.key for entry in store.list(key)] == [key]
        store.delete(key)
        store.delete(key)
        assert list(store.list("")) == []
        with pytest.raises(StoreNotFoundError):
            store.get(key)

    def test_keys_that_name_no_object_below_the_root_are_refused(self, store: Store) -> None:
        buffer = memoryview(bytearray(1))
        for call in (
            store.get,
            store.size,
            store.delete,
            lambda key: store.put(key, b"1"),
            lambda key: store.upload(key, buffer),
            lambda key: store.read_into(key, 0, buffer),
        ):
            for key in BAD_KEYS:
                with pytest.raises(ConfigError):
                    call(key)
        assert list(store.list("")) == []

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        for length in (0, 1):
            with pytest.raises(StoreNotFoundError):
                store.read_into("nothing/here", 0, memoryview(bytearray(length)))
        for call in (store.get, store.size):
            with pytest.raises(StoreNotFoundError) as caught:
                call("nothing/here")
            assert not caught.value.retryable
        assert list(store.list("nothing/")) == []
        store.delete("nothing/here")

    def test_a_folder_is_no_object(self, store: Store) -> None:
        store.put("folder/x", b"1")
        for call in (store.get, store.size):
            with pytest.raises(StoreNotFoundError):
                call("folder")

    def test_lists_by_prefix_at_any_depth(self, store: Store) -> None:
        for key in ("m/a.json", "m/b/c.json", "m2/x", "n"):
            store.put(key, b"1")
        assert sorted(entry.key for entry in store.list("m/")) == ["m/a.json", "m/b/c.json"]
        assert sorted(entry.key for entry in store.list("m")) == ["m/a.json", "m/b/c.json", "m2/x"]
        assert sorted(entry.key for entry in store.list("m/b")) == ["m/b/c.json"]
        assert len(list(store.list(""))) == 4
        assert folders_of(store, "m/") == {"b"}
        assert folders_of(store, "none/") == set()
        assert children_of(store, "m/") == {"a.json", "b/"}
        assert children_of(store, "") - {".tiered/"} == {"m/", "m2/", "n"}
        assert children_of(store, "none/") == children_of(store, "n/") == set()

    def test_lists_have_the_time_at_which_an_object_was_written(self, store: Store) -> None:
        store.put("x", b"1")
        (first,) = store.list("")
        store.put("y", b"1")
        later = {entry.key: entry.modified for entry in store.list("")}
        assert first.modified > 1_500_000_000
        assert later["x"] == pytest.approx(first.modified)
        assert later["y"] >= later["x"]

    def test_counts_what_it_is_asked(self, store: Store) -> None:
        store.put("x", b"12345")
        store.get("x")
        counts = store.metrics.snapshot()
        assert counts["requests.put"] == 1
        assert counts["requests.get"] == 1
        assert counts["bytes.up"] == counts["bytes.down"] == 5

    # --------------------------------------------------------------------------------- large objects
    def test_large_uploads_and_ranged_reads(self, store: Store) -> None:
        data = os.urandom(self.large)
        seen: list[int] = []
        journal = MemoryJournal()
        store.upload("big/x", memoryview(data), journal=journal, progress=seen.append)
        assert sum(seen) == len(data)
        assert journal.read() is None
        assert store.size("big/x") == len(data)
        ranges = [(0, 1), (0, len(data)), (7, 1 << 20), (len(data) - 5, 5), (9 << 20, 3 << 20), (3, 0)]

        def check(bounds: tuple[int, int]) -> None:
            around = bytearray(bounds[1] + 2)
            store.read_into("big/x", bounds[0], memoryview(around)[1:-1])
            assert around[1:-1] == data[bounds[0] : sum(bounds)]
            assert around[0] == around[-1] == 0

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check, ranges))
        assert store.metrics.snapshot()["bytes.down"] == sum(length for _, length in ranges)

    def test_content_that_is_made_when_it_is_sent(self, store: Store) -> None:
        data = os.urandom(self.large)
        for size in (0, 1, 1 << 20, self.large):
            content = ContentOnDemand(data[:size])
            store.upload("x", content)
            assert (store.get("x"), store.size("x"), content.held) == (data[:size], size, 0)

    def test_a_short_object_is_corrupt_not_short_data(self, store: Store) -> None:
        store.put("x", b"12345")
        for offset, length in ((0, 6), (4, 2), (5, 1), (99, 1)):
            with pytest.raises(CorruptCheckpointError):
                store.read_into("x", offset, memoryview(bytearray(length)))

    def test_a_failed_upload_leaves_the_old_object(self, store: Store) -> None:
        store.put("x", b"old")
        with pytest.raises(StopHere):
            store.upload("x", memoryview(os.urandom(self.large)), progress=stop_here)
        assert store.get("x") == b"old"
        assert [entry.key for entry in store.list("")] == ["x"]

    def test_a_failed_upload_is_taken_up_or_abandoned(self, store: Store) -> None:
        data = os.urandom(self.large)
        journal = MemoryJournal()
        for end in ("taken up", "abandoned"):
            with pytest.raises(StopHere):
                store.upload(end, memoryview(data), journal=journal, progress=stop_here)
            if end == "taken up":
                seen: list[int] = []
                store.upload(end, memoryview(data), journal=journal, progress=seen.append)
                assert store.get(end) == data
                assert sum(seen) == len(data)
            else:
                store.abandon(end, journal)
                store.abandon(end, journal)
                assert end not in [entry.key for entry in store.list("")]
            assert journal.read() is None

    def test_a_journal_of_another_upload_is_no_hindrance(self, store: Store) -> None:
        data = os.urandom(self.large)
        for state in ({}, {"upload_id": "gone", "key": "x", "size": len(data)}, {"odd": [1, None]}):
            journal = MemoryJournal()
            journal.write(dict(state))
            store.upload("x", memoryview(data), journal=journal)
            assert store.get("x") == data
            assert journal.read() is None

    def test_keeps_no_reference_to_the_callers_buffer(self, store: Store) -> None:
        for size in (1000, self.large):
            buffer: Any = bytearray(b"a" * size)
            with memoryview(buffer) as view:
                store.upload("x", view)
            buffer[:] = b"b" * size
            buffer.extend(b"resizable again")
            assert store.get("x") == b"a" * size
            into: Any = bytearray(size)
            with memoryview(into) as view:
                store.read_into("x", 0, view)
            into.extend(b"resizable again")
            with memoryview(buffer) as view, pytest.raises(StopHere):
                store.upload("x", view, progress=stop_here)
            buffer.extend(b"and after a failure too")

    # --------------------------------------------------------------------------------- at once
    def test_many_threads(self, store: Store) -> None:
        def work(number: int) -> None:
            store.put(f"t/{number}", str(number).encode())
            assert store.get(f"t/{number}") == str(number).encode()
            assert f"t/{number}" in [entry.key for entry in store.list("t/")]
            if number % 2:
                store.delete(f"t/{number}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(40)))
        assert len(list(store.list("t/"))) == 20

    def test_a_reader_sees_the_old_object_or_the_new_one(self, store: Store) -> None:
        versions = [bytes([number]) * (1 << 20) for number in range(8)]
        store.put("x", versions[0])
        done = Event()

        def write() -> None:
            try:
                for version in versions:
                    store.upload("x", memoryview(version))
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(write)
            while not done.is_set():
                assert store.get("x") in versions
            writer.result()
        assert store.get("x") == versions[-1]

    def test_errors_can_be_pickled_and_name_the_key(self, store: Store) -> None:
        with pytest.raises(StoreError) as caught:
            store.get("not/there")
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value)
        assert "not/there" in str(again)
