"""Chunks of peers and of the durable tier that the ranks of one node have fetched, in files that all of them map.

The first rank that needs a chunk fetches it, under a lock on one byte that dies with its process; the others find it
there.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.chunks import (
    Copies,
    OpenFile,
    Span,
    Target,
    by_chunk,
    chunks_of,
    fetch_chunk,
    fetch_targets,
    writer_to,
)
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.memory.node import needs_space
from tiered_checkpoint_io.memory.tier import MemoryTier

#: Below the memory tier's root: chunks that this node has fetched, a folder a save.
READS = "reads"
_PAGE = mmap.PAGESIZE
_VERIFIED = 1
_FULL_HINT = (
    "memory_dir is full, and so is spill_dir or the folder for temporary files: give either more space"
    " (docker: --shm-size)"
)


class SharedFolder:
    """A folder for the chunks of one save on this node, for as long as some rank reads them."""

    def __init__(self, root: Path, key: str, clock: Clock = SYSTEM) -> None:
        """Makes the folder below a memory tier's root, or joins its readers.

        Each rank that comes first removes the remains of dead readers: these may be from before a power loss, and call
        chunks verified which never reached the disk. So each reader of a folder is a live one. Raises RestoreError if
        another process has been removing the folder for too long.
        """
        self.path = root / READS / key
        deadline = clock.monotonic() + clock.timing.chunk_folder_s
        while True:
            # Each time: a process that was removing a folder may have died on the way.
            clear_reads(root)
            with contextlib.suppress(FileExistsError):
                # Even exist_ok raises that, if another process removes the folder at this moment.
                os.makedirs(self.path, mode=0o700)
            self._descriptor = _hold(self.path, fcntl.LOCK_SH)
            if self._descriptor is not None:
                return
            if clock.monotonic() > deadline:
                raise RestoreError("another process holds the folder of fetched chunks", key=str(self.path))
            clock.sleep(clock.timing.chunk_poll_s)

    def close(self) -> None:
        """Leaves the folder; the last one to leave removes it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(self.path)
            os.close(descriptor)


def clear_reads(root: Path) -> None:
    """Removes the folders that no process reads from any more: their readers died."""
    for folder in sorted((root / READS).glob("*")):
        with contextlib.suppress(OSError):
            descriptor = _hold(folder, fcntl.LOCK_EX)
            if descriptor is not None:
                _remove(folder)
                os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder that this process has locked; under another name, as others wait for theirs."""
    going = folder.with_name(f"{folder.name}~{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        os.rename(folder, going)
        folder = going
    shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path, kind: int) -> int | None:
    """Returns a descriptor that locks ``folder``; None if another has it, or the folder is being removed."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.stat(folder).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None


def folder_for_files(memory: MemoryTier, size: int) -> Path:
    """Returns a folder outside of node memory for a private file of this size."""
    spill = memory.open_spill()
    return spill.root if spill is not None and spill.room() >= size else Path(tempfile.gettempdir())


class FetchedFile:
    """A file of another tier, of which this node holds the chunks that some rank has needed."""

    def __init__(
        self,
        copies: Copies,
        folder: Path,
        *,
        is_private: bool = False,
        concurrency: int,
        timeout_s: float = math.inf,
        reads_alone: Callable[[int], bool] = lambda _: False,
        clock: Clock = SYSTEM,
    ) -> None:
        """Maps the node's file; fetches nothing yet.

        ``folder`` is a :class:`SharedFolder`'s path, unless the file is private: it then has no name.
        ``timeout_s`` bounds the wait for the next chunk that another rank fetches. ``reads_alone`` says if no other
        rank of this node reads a chunk, so that it need not be kept. Raises MemoryFullError if there is no space for
        the table of chunks.
        """
        entry = self.entry = copies.entry
        self._ranges = entry.chunks
        self._copies, self._reads_alone = copies, reads_alone
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._clock = clock
        #: Behind the data, a byte for each chunk: set if the chunk is here and verified. A chunk's lock is on the
        #: same byte.
        self._table = -(-entry.size // _PAGE) * _PAGE
        self._where = str(folder / entry.basename)
        if is_private:
            self._descriptor, self._where = tempfile.mkstemp(prefix="tiered-read-", dir=folder)
            os.unlink(self._where)
        else:
            self._descriptor = os.open(self._where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._take(self._table, len(self._ranges))
            self._mapping = mmap.mmap(self._descriptor, self._table + len(self._ranges))
        except BaseException:
            os.close(self._descriptor)
            raise
        self.view = memoryview(self._mapping)
        self._write, self._file = writer_to(self._descriptor), OpenFile(self._descriptor, self._where)

    def whole(self) -> Path:
        """Fetches all of the file; returns the path by which processes of this node find it, until it is closed."""
        self.ensure([(0, self.entry.size)])
        # The table of chunks is no part of it.
        os.ftruncate(self._descriptor, self.entry.size)
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def ensure(self, spans: Iterable[Span]) -> memoryview:
        """Fetches the chunks of ``(offset, length)`` spans to this node, verified; returns the file.

        Raises:
            CorruptCheckpointError: A chunk differs from its hash, or the object is short.
            StoreError: The store could not be read.
            MemoryFullError: No space for the chunks.
            RestoreError: Other ranks have been fetching chunks, of which none has arrived for ``timeout_s``.
        """
        missing = self._missing(chunks_of(self.entry, spans))
        deadline = math.inf
        while missing:
            before = len(missing)
            in_parallel(self._fetch, missing, self._concurrency, as_needed=True)
            # Chunks that others were fetching are here by now, or theirs to finish, or ours if they died.
            missing, now = self._missing(missing), self._clock.monotonic()
            if deadline == math.inf or len(missing) < before:
                # This rank's own fetches are no wait. If chunks arrive, the other ranks are alive.
                deadline = now + self._timeout_s
            if missing and now > deadline:
                raise RestoreError(
                    f"another process of this node has not fetched {len(missing)} chunks in time",
                    operation="restore",
                    tier="durable",
                    key=self._where,
                )
            if missing:
                self._clock.sleep(self._clock.timing.chunk_poll_s)
        return self.view

    def fill(self, targets: Sequence[Target]) -> None:
        """Fills targets, see :mod:`chunks`; raises as :meth:`ensure`, the targets then have undefined content."""
        wanted = by_chunk(self.entry, targets)
        self._ensure_shared(wanted)

        def one(index: int) -> None:
            if self._is_here(index):
                for offset, buffer in wanted[index]:
                    self._file.read_into(self.entry.path, offset, buffer)
            else:
                self._copies.read(lambda store, entry: fetch_targets(store, entry, index, wanted[index]))

        in_parallel(one, wanted, self._concurrency, as_needed=True)

    def begin(self, spans: Iterable[Span]) -> int:
        """Fetches chunks that other ranks read too; returns how many chunks :meth:`fill` reads at once."""
        self._ensure_shared(chunks_of(self.entry, spans))
        return self._concurrency

    def _ensure_shared(self, indices: Iterable[int]) -> None:
        self.ensure(self._ranges[index] for index in indices if not self._reads_alone(index))

    def close(self) -> None:
        """Unmaps the file; tensors that were copied from it are not concerned."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()
        os.close(self._descriptor)

    # ------------------------------------------------------------------------------------ inside
    def _is_here(self, index: int) -> bool:
        return self._mapping[self._table + index] == _VERIFIED

    def _missing(self, indices: Iterable[int]) -> list[int]:
        return [index for index in indices if not self._is_here(index)]

    def _fetch(self, index: int) -> None:
        """Fetches a chunk, unless another process is doing so."""
        if not _lock(self._descriptor, fcntl.F_WRLCK, self._table + index):
            return
        try:
            if not self._is_here(index):
                room = self._room(index)
                self._copies.read(lambda store, entry: fetch_chunk(store, entry, index, room, write=self._write))
                self._mapping[self._table + index] = _VERIFIED
        finally:
            _lock(self._descriptor, fcntl.F_UNLCK, self._table + index)

    def _room(self, index: int) -> memoryview:
        offset, length = self._ranges[index]
        self._take(offset, length)
        return self.view[offset : offset + length]

    def _take(self, offset: int, length: int) -> None:
        # A mapped page without space would end the process when it is touched.
        with needs_space(
            f"no space for {length} bytes of {self.entry.path}", operation="restore", key=self._where, hint=_FULL_HINT
        ):
            if length:
                os.posix_fallocate(self._descriptor, offset, length)


def _lock(descriptor: int, kind: int, byte: int) -> bool:
    """Locks or unlocks one byte for this open file, for all threads; False if another has it."""
    request = struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True
