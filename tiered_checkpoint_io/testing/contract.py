"""StoreContract: what every Store promises, as tests to inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreNotFoundError
from tiered_checkpoint_io.storage.base import Store

ODD_KEYS = ["a", "a/b/c", "epoch=0-step=5.ckpt", "with space", "plus+and%20", "ünïcode/ключ", "a.b/.hidden", "x" * 200]


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


class StoreContract:
    """Inherit, and give a fixture ``store`` that yields an empty store."""

    #: Bytes of an upload that the store sends in several parts.
    large = 20 << 20

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """The store under test."""
        raise NotImplementedError

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_what_was_put_is_read_listed_and_deleted(self, store: Store, key: str) -> None:
        store.put(key, b"first")
        store.put(key, b"second")
        assert store.get(key) == b"second"
        assert store.size(key) == 6
        assert [(entry.key, entry.size) for entry in store.list("")] == [(key, 6)]
        store.delete(key)
        store.delete(key)
        assert list(store.list("")) == []
        with pytest.raises(StoreNotFoundError):
            store.get(key)

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        for call in (store.get, store.size, lambda key: store.read_into(key, 0, memoryview(bytearray(1)))):
            with pytest.raises(StoreNotFoundError):
                call("nothing/here")
        assert list(store.list("nothing/")) == []

    def test_lists_by_prefix_at_any_depth(self, store: Store) -> None:
        for key in ("m/a.json", "m/b/c.json", "m2/x", "n"):
            store.put(key, b"1")
        assert sorted(entry.key for entry in store.list("m/")) == ["m/a.json", "m/b/c.json"]
        assert sorted(entry.key for entry in store.list("m")) == ["m/a.json", "m/b/c.json", "m2/x"]

    @pytest.mark.parametrize("size", [0, 1, 1 << 20])
    def test_small_uploads(self, store: Store, size: int) -> None:
        data = os.urandom(size)
        store.upload("x", memoryview(data))
        assert store.get("x") == data

    def test_large_uploads_and_ranged_reads(self, store: Store) -> None:
        data = os.urandom(self.large)
        seen: list[int] = []
        store.upload("big/x", memoryview(data), journal=MemoryJournal(), progress=seen.append)
        assert sum(seen) == len(data)
        assert store.size("big/x") == len(data)
        ranges = [(0, 1), (0, len(data)), (7, 1 << 20), (len(data) - 5, 5), (9 << 20, 3 << 20)]

        def check(bounds: tuple[int, int]) -> None:
            buffer = bytearray(bounds[1])
            store.read_into("big/x", bounds[0], memoryview(buffer))
            assert bytes(buffer) == data[bounds[0] : sum(bounds)]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check, ranges))

    def test_a_short_object_is_corrupt_not_short_data(self, store: Store) -> None:
        store.put("x", b"12345")
        for offset, length in ((0, 6), (4, 2), (5, 1), (99, 1)):
            with pytest.raises(CorruptCheckpointError):
                store.read_into("x", offset, memoryview(bytearray(length)))

    def test_a_failed_upload_leaves_the_old_object(self, store: Store) -> None:
        store.put("x", b"old")

        def fail(_: int) -> None:
            raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"):
            store.upload("x", memoryview(os.urandom(self.large)), progress=fail)
        assert store.get("x") == b"old"
        assert [entry.key for entry in store.list("")] == ["x"]

    def test_a_failed_upload_is_taken_up_or_abandoned(self, store: Store) -> None:
        data = os.urandom(self.large)
        journal = MemoryJournal()

        def fail(_: int) -> None:
            raise RuntimeError("stop here")

        for end in ("taken up", "abandoned"):
            with pytest.raises(RuntimeError, match="stop here"):
                store.upload(end, memoryview(data), journal=journal, progress=fail)
            if end == "taken up":
                store.upload(end, memoryview(data), journal=journal)
                assert store.get(end) == data
            else:
                store.abandon(end, journal)
                assert "abandoned" not in [entry.key for entry in store.list("")]
            assert journal.read() is None

    def test_keeps_no_reference_to_the_callers_buffer(self, store: Store) -> None:
        buffer: Any = bytearray(b"a" * 1000)
        store.upload("x", memoryview(buffer))
        buffer[:] = b"b" * 1000
        assert store.get("x") == b"a" * 1000
        buffer.extend(b"resizable again")

    def test_many_threads(self, store: Store) -> None:
        def work(number: int) -> None:
            store.put(f"t/{number}", str(number).encode())
            assert store.get(f"t/{number}") == str(number).encode()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(40)))
        assert len(list(store.list("t/"))) == 40

    def test_counts_what_it_is_asked(self, store: Store) -> None:
        store.put("x", b"12345")
        store.get("x")
        counts = store.metrics.snapshot()
        assert counts["requests.put"] == 1
        assert counts["requests.get"] == 1
        assert counts["bytes.up"] == counts["bytes.down"] == 5
