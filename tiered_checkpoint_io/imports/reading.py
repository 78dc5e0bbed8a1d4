"""The bytes of a file of others, read piece by piece from wherever it lies."""

from __future__ import annotations

import contextlib
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fsspec.spec import AbstractBufferedFile

from tiered_checkpoint_io.errors import CorruptCheckpointError
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

#: What NeMo calls the weights in its archive.
_WEIGHTS = "model_weights.ckpt"
_READ_AHEAD = 1 << 20


class Source:
    """A range of bytes of an object: the ``Content`` of an upload. For many threads.

    Attributes:
        look: Called before each read; what it raises ends the work.
    """

    def __init__(self, store: Store, key: str, size: int, *, start: int = 0) -> None:
        self._store = store
        self.key = key
        self._size = size
        self._start = start
        self.look: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, piece: slice, /) -> AbstractContextManager[memoryview]:
        start, stop, _ = piece.indices(self._size)
        return self._piece(start, max(0, stop - start))

    @contextlib.contextmanager
    def _piece(self, start: int, length: int) -> Iterator[memoryview]:
        self.look()
        with memoryview(bytearray(length)) as view:
            if length:
                self._store.read_into(self.key, self._start + start, view)
            yield view

    def opened(self) -> Any:
        """The same, as a file."""
        return _File(self)


class Hashed:
    """A source whose chunks are compared with their hashes once more as they are read: the ``Content`` of an upload.

    Its writer may still be at work.
    """

    def __init__(self, source: Source, entry: FileEntry) -> None:
        """Takes the source, and what it was when it was hashed."""
        self._source = source
        self._entry = entry
        #: The chunk that each thread has read last: the next piece may begin in it.
        self._last = threading.local()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, piece: slice, /) -> AbstractContextManager[memoryview]:
        start, stop, _ = piece.indices(len(self))
        return self._piece(start, stop)

    @contextlib.contextmanager
    def _piece(self, start: int, stop: int) -> Iterator[memoryview]:
        data, size = bytearray(), self._entry.chunk_size
        while len(data) < stop - start:
            index, within = divmod(start + len(data), size)
            data += self._chunk(index)[within : within + stop - start - len(data)]
        with memoryview(data) as view:
            yield view

    def _chunk(self, index: int) -> memoryview:
        known, chunk = getattr(self._last, "chunk", (-1, memoryview(b"")))
        if known != index:
            offset, length = self._entry.chunks[index]
            with self._source[offset : offset + length] as read:
                chunk = memoryview(bytes(read))
            if hash_bytes(chunk) != self._entry.hashes[index]:
                raise CorruptCheckpointError(
                    "it was written to while it was imported",
                    operation="import",
                    key=self._source.key,
                    hint="import it once nothing writes to it any more",
                )
            self._last.chunk = index, chunk
        return chunk


class _File(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    def __init__(self, source: Source) -> None:
        self._source = source
        super().__init__(None, source.key, block_size=_READ_AHEAD, size=len(source))

    def _fetch_range(self, start: int, end: int) -> bytes:
        with self._source[start:end] as piece:
            return bytes(piece)


def weights_in(source: Source, store: Store) -> Source:
    """The file of weights within NeMo's archive.

    Raises:
        CorruptCheckpointError: It is no such archive, or is compressed.
    """
    try:
        with source.opened() as file, tarfile.open(fileobj=file, mode="r:") as archive:
            member = next((each for each in archive if each.name.rpartition("/")[2] == _WEIGHTS), None)
    except tarfile.TarError as error:
        raise CorruptCheckpointError(
            f"not a NeMo archive: {error}", operation="import", key=source.key, hint="unpack a compressed one: gunzip"
        ) from error
    if member is None or not member.isreg():
        raise CorruptCheckpointError(
            f"the archive has no {_WEIGHTS}",
            operation="import",
            key=source.key,
            hint="of one with a distributed checkpoint, unpack it and import the folder",
        )
    return Source(store, source.key, member.size, start=member.offset_data)
