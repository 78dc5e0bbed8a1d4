"""The files of a sharded checkpoint on the durable tier, read piece by piece."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

#: Verified chunks that are kept: pieces of neighbouring tensors lie in the same ones.
_KEPT_CHUNKS = 4


class Folder:
    """A checkpoint's folder; each chunk whose hash is known is compared with it."""

    def __init__(self, store: Store, name: str, files: Iterable[FileEntry] | None = None) -> None:
        """Takes what it reads.

        Args:
            store: The durable tier.
            name: The folder, relative to the tier's root; empty for the root itself.
            files: Its files, with the hashes of their chunks; None for a folder that others wrote.
        """
        self.where = ids.join_url(store.url, name) if name else store.url
        self._store = store
        self._prefix = name + "/" if name else ""
        self._files = None if files is None else {entry.path: entry for entry in files}
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    def size(self, path: str) -> int:
        """The size of a file, bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        if self._files is None:
            return self._store.size(self._prefix + path)
        return self._entry(path).size

    def read(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of a file.

        Raises:
            FileNotFoundError: There is no such file.
            CorruptCheckpointError: It ends earlier, or is not what was written.
        """
        if self._files is None:
            return self._fetch(self._prefix + path, offset, length)
        entry = self._entry(path)
        if offset + length > entry.size:
            raise CorruptCheckpointError(
                f"{path!r} ends at byte {entry.size}; {offset + length} were expected",
                operation="read",
                tier="durable",
                key=self.where,
            )
        first, within = divmod(offset, entry.chunk_size)
        if within + length <= entry.chunk_size:
            return self._chunk(entry, first)[within : within + length]
        data = memoryview(bytearray(length))
        done = 0
        while done < length:
            index, within = divmod(offset + done, entry.chunk_size)
            piece = self._chunk(entry, index)[within : within + length - done]
            data[done : done + len(piece)] = piece
            done += len(piece)
        return data

    def _entry(self, path: str) -> FileEntry:
        entry = (self._files or {}).get(self._prefix + path)
        if entry is None:
            raise CheckpointNotFoundError(
                f"the checkpoint has no file {path!r}", operation="read", tier="durable", key=self.where
            )
        return entry

    def _chunk(self, entry: FileEntry, index: int) -> memoryview:
        key = entry.path, index
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while len(self._kept) >= _KEPT_CHUNKS:
            self._kept.popitem(last=False)
        data = self._fetch(entry.path, *entry.chunks[index])
        entry.check_chunk(index, data, tier="durable", where=ids.join_url(self._store.url, entry.path))
        self._kept[key] = data
        return data

    def _fetch(self, key: str, offset: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        if length:
            self._store.read_into(key, offset, data)
        return data
