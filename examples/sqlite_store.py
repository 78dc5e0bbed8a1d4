"""A durable tier in one SQLite file, with URLs such as acme:///folder/name: see docs/stores.md."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import Metrics, ObjectInfo, UploadContent, UploadJournal, validate_key

PIECE = 8 << 20
OBJECTS = "create table if not exists objects (key text primary key, size integer, modified real)"
PIECES = "create table if not exists pieces (key text, start integer, data blob, primary key (key, start))"


class AcmeStore:
    """Keeps the contract of a Store."""

    def __init__(self, url: str) -> None:
        self.url = url  # as the user writes it; it holds no secret
        self.metrics = Metrics()
        self._path = "/" + url.partition("://")[2].strip("/") + ".sqlite"

    @contextlib.contextmanager
    def _database(self, operation: str, key: str, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """Runs one transaction: its writes appear at its end, or not at all."""
        self.metrics.add(f"requests.{operation}")
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            connection = sqlite3.connect(self._path, timeout=60, isolation_level=None)
            with contextlib.closing(connection) as database, database:
                database.execute("begin immediate" if writes else "begin")
                database.execute(OBJECTS)
                database.execute(PIECES)
                yield database
        except sqlite3.OperationalError as error:
            raise StoreError(str(error), operation=operation, key=key, reason="unavailable") from error
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(str(error), operation=operation, key=key) from error

    def _size(self, database: sqlite3.Connection, operation: str, key: str) -> int:
        row = database.execute("select size from objects where key = ?", (key,)).fetchone()
        if row is None:
            raise StoreNotFoundError("no such object", operation=operation, key=key)
        return int(row[0])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._database("list", prefix) as database:
            rows = database.execute("select * from objects where substr(key, 1, length(?1)) = ?1", (prefix,)).fetchall()
        return iter([ObjectInfo(*row) for row in rows])

    def size(self, key: str) -> int:
        with self._database("head", validate_key(key)) as database:
            return self._size(database, "head", key)

    def get(self, key: str) -> bytes:
        with self._database("get", validate_key(key)) as database:
            data = bytearray(self._size(database, "get", key))
            self._fill(database, key, 0, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._database("get", validate_key(key)) as database:
            size = self._size(database, "get", key)
            if offset + len(buffer) > size:
                raise CorruptCheckpointError(f"it ends at byte {size}", operation="read", tier="durable", key=key)
            self._fill(database, key, offset, buffer)

    def _fill(self, database: sqlite3.Connection, key: str, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        query = "select start, data from pieces where key = ? and start > ? and start < ?"
        for start, data in database.execute(query, (key, offset - PIECE, end)):
            first, last = max(offset, start), min(end, start + len(data))
            buffer[first - offset : last - offset] = data[first - start : last - start]
        self.metrics.add("bytes.down", len(buffer))

    def put(self, key: str, data: bytes) -> None:
        self.upload(key, memoryview(data))

    def upload(
        self,
        key: str,
        data: UploadContent,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        with self._database("put", validate_key(key), writes=True) as database:
            self._forget(database, key)
            database.execute("insert into objects values (?, ?, ?)", (key, len(data), time.time()))
            for start in range(0, len(data), PIECE):
                with data[start : start + PIECE] as piece:  # it may be made only now
                    copy = bytes(piece)
                database.execute("insert into pieces values (?, ?, ?)", (key, start, copy))
                self.metrics.add("bytes.up", len(copy))
                if progress is not None:
                    progress(len(copy))
        if journal is not None:
            journal.clear()  # an upload that was interrupted left nothing

    def abandon(self, key: str, journal: UploadJournal) -> None:  # noqa: ARG002
        journal.clear()

    def delete(self, key: str) -> None:
        with self._database("delete", validate_key(key), writes=True) as database:
            self._forget(database, key)

    def _forget(self, database: sqlite3.Connection, key: str) -> None:
        database.execute("delete from objects where key = ?", (key,))
        database.execute("delete from pieces where key = ?", (key,))

    def close(self) -> None:
        pass


def open_acme(url: str, config: Any) -> AcmeStore:  # noqa: ARG001
    """Opens the store; ``config`` is the TieredCheckpointConfig of the run. An entry point names this function."""
    return AcmeStore(url)
