"""The operation log: one preallocated file through which the trainers and the drain of a node talk.

It holds a dictionary, and each record says which keys change. Two halves take turns: when the current one is full,
the whole dictionary goes to the other, as the first record of the next generation, and that half's head is written
last. So a writer that dies at any point leaves a file that reads as it did before its record, or behind it.

::

    0      head of half 0, head of half 1, tail   each: generation (the tail: and its end), checksum
    4096   heartbeat: what the drain last said of itself; no record, so that it wakes no reader
    8192   half 0, half 1: records of length, checksum (seeded with generation and offset), JSON

All space is taken when the file is made, and a process keeps one descriptor open: a commit needs neither space,
nor an inode, nor a descriptor. Writers take ``flock``, readers nothing. A file that is lost or damaged is begun
anew, with a warning: parts in memory are the truth, only outcomes and queued aliases and deletes are lost with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import MemoryFullError, MemoryTierError
from tiered_checkpoint_io.memory.space import needs_space

_HEAD = struct.Struct("<QQI")
_RECORD = struct.Struct("<II")
_TAIL_AT = 2 * _HEAD.size
_BEAT_AT, _BEAT_SIZE = 4096, 4096
_HALVES_AT = 8192
#: Room for 256 saves of a node with eight ranks. Taken from the memory tier, so no more than that.
_HALF = 1 << 20
#: A dictionary that takes more of its half than this is trimmed, so that records have room behind it.
_TRIM_ABOVE = 0.75

_log = logging.getLogger("tiered_checkpoint_io.drain")


class OperationLog:
    """One process' view of the log, up to date after each call."""

    def __init__(
        self, path: Path, *, expendable: Callable[[Mapping[str, Any]], Iterable[str]], clock: Clock = SYSTEM
    ) -> None:
        """Takes the file, which is opened when it is there, and made by the first write.

        Args:
            path: The file.
            expendable: The keys that may be dropped where there is too much, in that order.
            clock: For the wait for other writers.
        """
        self._path = path
        self._expendable = expendable
        self._clock = clock
        self._guard = threading.RLock()
        self._file: int | None = None
        self._state: dict[str, Any] = {}
        self._generation = self._end = 0
        _logs.add(self)

    # ----------------------------------------------------------------------------------- reading
    def poll(self) -> tuple[int, int]:
        """Takes up what others wrote; what is returned changes with every record."""
        with self._guard:
            if self._is_open():
                self._take_up()
            return self._generation, self._end

    def entries(self, prefix: str) -> dict[str, Any]:
        """All that the log holds below a prefix, by what follows it."""
        with self._guard:
            self.poll()
            return {key[len(prefix) :]: value for key, value in self._state.items() if key.startswith(prefix)}

    def get(self, key: str) -> Any:
        """The value of a key; None where there is none."""
        with self._guard:
            self.poll()
            return self._state.get(key)

    def heartbeat(self) -> bytes:
        """What :meth:`beat` last wrote; empty where there is nothing, or it is just being written."""
        with self._guard:
            if not self._is_open():
                return b""
            assert self._file is not None
            return _unpacked(os.pread(self._file, _BEAT_SIZE, _BEAT_AT), seed=0) or b""

    # ----------------------------------------------------------------------------------- writing
    def open(self) -> None:
        """Makes the file where it is missing, so that all later writes have their space.

        Raises:
            MemoryFullError: There is no space for it.
        """
        with self._guard, self._locked():
            return

    def write(self, changes: Mapping[str, Any]) -> None:
        """Sets keys to JSON values, or removes those whose value is None: all of them, or none.

        Raises:
            MemoryFullError: There is no space for the file, or too much in it that may not be dropped.
            MemoryTierError: Another process has held its lock for too long.
        """
        with self._guard, self._locked() as file:
            record = _packed(_encoded(changes), self._seed(self._generation, self._end))
            if self._end + len(record) > _HALF:
                self._change_half(file, _apply(dict(self._state), changes))
                return
            os.pwrite(file, record, self._start(self._generation) + self._end)
            _apply(self._state, changes)
            self._end += len(record)
            self._put_tail(file)

    def beat(self, data: bytes) -> None:
        """Writes the heartbeat: of the one drain, so without a lock. What is too long is left out."""
        with self._guard:
            if self._is_open() and len(data) + _RECORD.size <= _BEAT_SIZE:
                assert self._file is not None
                os.pwrite(self._file, _packed(data, seed=0), _BEAT_AT)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __del__(self) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ inside
    def _is_open(self, *, make: bool = False) -> bool:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            _log.warning("%s was removed: queued aliases and deletes, and outcomes, are lost", self._path)
            self.close()
            self._state, self._generation, self._end = {}, 0, 0
        if self._file is None:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
            try:
                with needs_space("no space for the operation log", operation="open", key=str(self._path)):
                    self._file = os.open(self._path, flags, 0o600)
            except FileNotFoundError:
                if make:
                    raise
        return self._file is not None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        self._is_open(make=True)
        file = self._file
        assert file is not None
        deadline = self._clock.monotonic() + self._clock.timing.log_lock_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if self._clock.monotonic() > deadline:
                    raise MemoryTierError(
                        "another process has held the operation log for too long",
                        operation="write",
                        tier="memory",
                        key=str(self._path),
                        hint="look for a process of this job that is stopped",
                    ) from error
                self._clock.sleep(self._clock.timing.log_lock_poll_s)
        try:
            if os.fstat(file).st_size < _HALVES_AT + 2 * _HALF:
                with needs_space("no space for the operation log", operation="open", key=str(self._path)):
                    os.posix_fallocate(file, 0, _HALVES_AT + 2 * _HALF)
            self._take_up()
            self._mend(file)
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _take_up(self) -> None:
        newest = self._newest()
        while newest > self._generation:
            state: dict[str, Any] = {}
            end = self._replay(newest, state, 0)
            again = self._newest()
            if again == newest:
                # This half was not written over meanwhile.
                self._state, self._end, self._generation = state, end, newest
            newest = again
        self._end = self._replay(self._generation, self._state, self._end)

    def _newest(self) -> int:
        """The newest generation that the file has a head of; 0 where there is none."""
        assert self._file is not None
        page = os.pread(self._file, 2 * _HEAD.size, 0)
        heads = (_unsealed(page, side * _HEAD.size) for side in (0, 1))
        return max((head[0] for side, head in enumerate(heads) if head is not None and head[0] % 2 == side), default=0)

    def _replay(self, generation: int, state: dict[str, Any], end: int) -> int:
        """Applies the records from ``end`` on; where they end."""
        assert self._file is not None
        start = self._start(generation)
        while generation and end + _RECORD.size < _HALF:
            # Most looks end here: nothing new.
            length, _ = _RECORD.unpack(os.pread(self._file, _RECORD.size, start + end).ljust(_RECORD.size, b"\0"))
            if not 0 < length <= _HALF - end - _RECORD.size:
                break
            data = _unpacked(os.pread(self._file, _RECORD.size + length, start + end), seed=self._seed(generation, end))
            if data is None:
                break
            _apply(state, json.loads(data))
            end += _RECORD.size + length
        return end

    def _mend(self, file: int) -> None:
        """Begins a generation where there is none yet, or where not all of the last one can be read."""
        page = os.pread(file, _TAIL_AT + _HEAD.size, 0)
        tail = _unsealed(page, _TAIL_AT) or (0, 0)
        lost = tail > (self._generation, self._end) or self._newest() < self._generation
        if lost or (not self._generation and any(page)):
            _log.warning("%s is damaged: some queued aliases and deletes, and outcomes, may be lost", self._path)
        elif self._generation:
            return
        # From the time, so that it is beyond all generations that other processes have seen of a damaged file.
        self._generation = max(self._generation, int(self._clock.wall() * 1000))
        self._change_half(file, self._state)

    def _change_half(self, file: int, state: dict[str, Any]) -> None:
        state = dict(state)
        excess = len(_encoded(state)) - int(_HALF * _TRIM_ABOVE)
        for key in self._expendable(state) if excess > 0 else ():
            excess -= len(_encoded({key: state.pop(key)}))
            if excess <= 0:
                break
        generation = self._generation + 1
        record = _packed(_encoded(state), self._seed(generation, 0))
        if len(record) > _HALF:
            raise MemoryFullError(
                "too much is queued for the operation log", operation="write", tier="memory", key=str(self._path)
            )
        os.pwrite(file, record, self._start(generation))
        os.pwrite(file, _sealed(generation, 0), generation % 2 * _HEAD.size)
        self._state, self._generation, self._end = state, generation, len(record)
        self._put_tail(file)

    def _put_tail(self, file: int) -> None:
        """Notes how far the records go, so that a damaged one is told from the end."""
        os.pwrite(file, _sealed(self._generation, self._end), _TAIL_AT)

    @staticmethod
    def _start(generation: int) -> int:
        return _HALVES_AT + generation % 2 * _HALF

    @staticmethod
    def _seed(generation: int, end: int) -> int:
        return zlib.crc32(struct.pack("<QQ", generation, end))

    def _forked(self) -> None:
        # A copy of the descriptor would keep a lock alive that our parent dies with.
        self._guard = threading.RLock()
        self.close()


def _apply(state: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state


def _encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _packed(data: bytes, seed: int) -> bytes:
    return _RECORD.pack(len(data), zlib.crc32(data, seed)) + data


def _unpacked(raw: bytes, seed: int) -> bytes | None:
    if len(raw) < _RECORD.size:
        return None
    length, checksum = _RECORD.unpack_from(raw)
    data = raw[_RECORD.size : _RECORD.size + length]
    return data if 0 < length == len(data) and zlib.crc32(data, seed) == checksum else None


def _sealed(generation: int, end: int) -> bytes:
    return _HEAD.pack(generation, end, zlib.crc32(struct.pack("<QQ", generation, end)))


def _unsealed(raw: bytes, offset: int) -> tuple[int, int] | None:
    if len(raw) < offset + _HEAD.size:
        return None
    generation, end, checksum = _HEAD.unpack_from(raw, offset)
    return (generation, end) if checksum == zlib.crc32(struct.pack("<QQ", generation, end)) else None


_logs: weakref.WeakSet[OperationLog] = weakref.WeakSet()


def _drop_in_child() -> None:
    for log in list(_logs):
        log._forked()


os.register_at_fork(after_in_child=_drop_in_child)
