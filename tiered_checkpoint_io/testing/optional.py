"""What a store may have beyond what all have: deletes of many, copies, writes on a condition; as tests to inherit."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import ConditionalStore, CopyRefusedError, ServerCopy, Store
from tiered_checkpoint_io.stores.fallbacks import copy_to, read_pieces


class StopHere(Exception):  # noqa: N818 - says what it is
    """What a caller's own code raises in the middle of an upload."""


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
    """A progress report that ends the upload."""
    raise StopHere


class OptionalContract:
    """Skips what a store has not."""

    #: Whether what a ConditionalStore promises is tested: not where its server takes no notice of conditions.
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
    def test_pieces_are_filled_in_order_and_told_as_they_are(self, store: Store) -> None:
        data = os.urandom(3 << 20)
        store.upload("x", memoryview(data))
        pieces = [memoryview(bytearray(length)) for length in (1, 1 << 20, 0, 700_001, 5)]
        told: list[bytes] = []
        read_pieces(store, "x", 7, pieces, lambda index: told.append(bytes(pieces[index])))
        assert [len(each) for each in told] == [1, 1 << 20, 0, 700_001, 5]
        assert b"".join(told) == data[7 : 7 + sum(map(len, told))]
        assert store.metrics.snapshot()["bytes.down"] == sum(map(len, told))
        with pytest.raises(CorruptCheckpointError):
            read_pieces(store, "x", len(data) - 4, [pieces[0], pieces[-1]], lambda _: None)
        with pytest.raises(StoreNotFoundError):
            read_pieces(store, "none", 0, [pieces[0]], lambda _: None)

    # --------------------------------------------------------------------------------- copies
    def _skip_without_copy(self, store: Store) -> None:
        if getattr(store, "copy", None) is None:
            pytest.skip("this store can't copy")

    @pytest.mark.parametrize("size", [0, 1000, 20 << 20])
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
        """The store, where it is one; conditional writes are optional."""
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
        # As where the answer to a first attempt was lost.
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
