"""The files of a sharded checkpoint on the durable tier, read piece by piece."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tiered_checkpoint_io.engine.chunks import fetch_chunk, unverified
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store, too_short

#: Verified chunks that are kept: pieces of neighbouring tensors lie in the same ones.
_KEPT_CHUNKS = 4


class Folder:
    """A checkpoint's folder; each chunk whose hash is known is compared with it."""

    def __init__(self, store: Store, name: str, files: Iterable[FileEntry] | None = None) -> None:
        """Takes the folder, relative to the tier's root, and its files; None for a folder that others wrote."""
        self.where = ids.join_url(store.url, name) if name else store.url
        self._store = store
        self._prefix = name + "/" if name else ""
        self._of_others = files is None
        self._files = {entry.path: entry for entry in files or ()}
        self._chunk = functools.lru_cache(_KEPT_CHUNKS)(self._read_chunk)

    def size(self, path: str) -> int:
        """The size of a file, bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return self._entry(self._prefix + path).size

    def read(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of a file.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptCheckpointError: It ends earlier, or is not what was written.
        """
        entry = self._entry(self._prefix + path)
        if offset + length > entry.size:
            raise too_short(entry.path, entry.size, offset + length)
        data = bytearray()
        while missing := length - len(data):
            index, within = divmod(offset + len(data), entry.chunk_size)
            data += self._chunk(entry.path, index)[within : within + missing]
        return memoryview(data)

    def _entry(self, key: str) -> FileEntry:
        if self._of_others and key not in self._files:
            self._files[key] = unverified(key, self._store.size(key))
        if key not in self._files:
            raise CheckpointNotFoundError(
                f"the checkpoint has no file {key!r}", operation="read", tier="durable", key=self.where
            )
        return self._files[key]

    def _read_chunk(self, key: str, index: int) -> memoryview:
        entry = self._entry(key)
        chunk = memoryview(bytearray(entry.chunks[index][1]))
        fetch_chunk(self._store, entry, index, chunk)
        return chunk
