"""The files of a sharded checkpoint, read piece by piece from wherever they lie."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Store

#: Verified chunks that are kept: pieces of neighbouring tensors lie in the same ones.
_KEPT_CHUNKS = 4


class Folder(Protocol):
    """A folder of files.

    Attributes:
        tier: ``memory``, ``durable`` or ``local``, for errors.
        where: Its path or URL.
    """

    tier: str
    where: str

    def size(self, path: str) -> int:
        """The size of a file, bytes.

        Raises:
            CheckpointNotFoundError: There is no such file.
        """
        ...

    def read(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of a file.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CorruptCheckpointError: It ends earlier, or is not what was written.
        """
        ...


class LocalFolder:
    """A folder of a file system, of whose content no hashes are known."""

    tier = "local"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = str(path)

    def size(self, path: str) -> int:
        try:
            return self._path(path).stat().st_size
        except OSError as error:
            raise self._translated(error, path) from error

    def read(self, path: str, offset: int, length: int) -> memoryview:
        try:
            with self._path(path).open("rb", buffering=0) as file:
                file.seek(offset)
                data = bytearray(length)
                view, got = memoryview(data), 0
                while got < length and (count := file.readinto(view[got:])):
                    got += count
        except OSError as error:
            raise self._translated(error, path) from error
        if got < length:
            raise _too_short(self, path, offset + got, offset + length)
        return view

    def _path(self, path: str) -> Path:
        return Path(self.where) / ids.validate_name(path)

    def _translated(self, error: OSError, path: str) -> CheckpointNotFoundError | RestoreError:
        kind = CheckpointNotFoundError if isinstance(error, FileNotFoundError) else RestoreError
        return kind(
            f"{path}: {error.strerror or error}", operation="read", tier=self.tier, key=os.path.join(self.where, path)
        )


class StoredFolder:
    """A checkpoint's folder on the durable tier: each chunk is compared with its hash."""

    tier = "durable"

    def __init__(self, store: Store, name: str, files: Iterable[FileEntry]) -> None:
        """Takes what it reads.

        Args:
            store: The durable tier.
            name: The checkpoint's name, which is its folder.
            files: Its files, with the hashes of their chunks.
        """
        self.where = ids.join_url(store.url, name)
        self._store = store
        self._files = {entry.path.removeprefix(name + "/"): entry for entry in files}
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    def size(self, path: str) -> int:
        return self._entry(path).size

    def read(self, path: str, offset: int, length: int) -> memoryview:
        entry = self._entry(path)
        if offset + length > entry.size:
            raise _too_short(self, path, entry.size, offset + length)
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
        entry = self._files.get(path)
        if entry is None:
            raise CheckpointNotFoundError(
                f"the checkpoint has no file {path!r}", operation="read", tier=self.tier, key=self.where
            )
        return entry

    def _chunk(self, entry: FileEntry, index: int) -> memoryview:
        key = entry.path, index
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        while len(self._kept) >= _KEPT_CHUNKS:
            self._kept.popitem(last=False)
        offset, length = entry.chunks[index]
        data = memoryview(bytearray(length))
        self._store.read_into(entry.path, offset, data)
        entry.check_chunk(index, data, tier=self.tier, where=ids.join_url(self._store.url, entry.path))
        self._kept[key] = data
        return data


class PlainStoredFolder:
    """A folder on the durable tier that others wrote, of whose content no hashes are known."""

    tier = "durable"

    def __init__(self, store: Store, name: str) -> None:
        """Takes what it reads.

        Args:
            store: The durable tier.
            name: The folder, relative to the tier's root; empty for the root itself.
        """
        self.where = ids.join_url(store.url, name) if name else store.url
        self._store = store
        self._prefix = name + "/" if name else ""

    def size(self, path: str) -> int:
        return self._store.size(self._prefix + path)

    def read(self, path: str, offset: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        if length:
            self._store.read_into(self._prefix + path, offset, data)
        return data


def _too_short(folder: Folder, path: str, end: int, wanted: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path!r} ends at byte {end}; {wanted} were expected", operation="read", tier=folder.tier, key=folder.where
    )
