"""The files of a sharded checkpoint on the durable tier, read piece by piece."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from tiered_checkpoint_io.engine.chunks import fetch_chunk, unverified
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store, too_short

#: Verified chunks that each thread keeps: pieces of neighbouring tensors lie in the same ones.
_KEPT_CHUNKS = 3


class Folder:
    """A checkpoint's folder; each chunk whose hash is known is compared with it. For many threads."""

    def __init__(self, store: Store, name: str, files: Iterable[FileEntry] | None = None) -> None:
        """Takes the folder, relative to the tier's root, and its files; None for a folder that others wrote."""
        self.where = ids.join_url(store.url, name) if name else store.url
        self._store = store
        self._prefix = name + "/" if name else ""
        self._of_others = files is None
        self._files = {entry.path: entry for entry in files or ()}
        self._kept = threading.local()

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
            data += self._chunk(entry, index)[within : within + missing]
        return memoryview(data)

    def _entry(self, key: str) -> FileEntry:
        if self._of_others and key not in self._files:
            self._files[key] = unverified(key, self._store.size(key))
        if key not in self._files:
            raise CheckpointNotFoundError(
                f"the checkpoint has no file {key!r}", operation="read", tier="durable", key=self.where
            )
        return self._files[key]

    def _chunk(self, entry: FileEntry, index: int) -> memoryview:
        kept: OrderedDict[tuple[str, int], memoryview] = vars(self._kept).setdefault("chunks", OrderedDict())
        key = (entry.path, index)
        if key not in kept:
            while len(kept) >= _KEPT_CHUNKS:
                kept.popitem(last=False)
            chunk = memoryview(bytearray(entry.chunks[index][1]))
            fetch_chunk(self._store, entry, index, chunk)
            kept[key] = chunk
        kept.move_to_end(key)
        return kept[key]
