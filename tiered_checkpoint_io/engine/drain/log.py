"""The logs of a namespace's memory: of operations, and of the events of a run.

*Operations*: one preallocated file through which the trainers and the drain of a node communicate. It holds a
dictionary. Each write puts the dictionary into the unused half, and the head of that half last. So a
writer that dies at any point leaves the old content, and a reader that meets a writer reads again.

::

    0      head of half 0, head of half 1   each: generation, length and checksum of its data, its own checksum
    40     bell: rung for changes outside the log
    4096   heartbeat: the drain's last report about itself; apart, so that it wakes no reader
    8192   half 0, half 1: JSON

All space is taken when the file is made, and a process keeps one descriptor open: a write needs neither space, nor an
inode, nor a descriptor. Writers take ``flock``, readers nothing. A lost or damaged file is replaced by an empty one,
with a warning: parts in memory are the truth, only outcomes and queued aliases and deletes are lost with it.

*Events*: one line of JSON for each event, appended to ``events.jsonl``. Trainers and the drain of a node write the
record, metrics read it. No decision depends on it: if memory has no room for a line, or no descriptor is left, the line
is lost. Beyond a bound, older events become one event of their totals: see :mod:`tiered_checkpoint_io.model.events`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory.node import MemoryFullError, flock, inode_at, inode_of, needs_space, register_owner
from tiered_checkpoint_io.model.events import Event, totals_of

#: Generation, length and checksum of the data; then the checksum of these.
_HEAD = struct.Struct("<QII")
_HEAD_SIZE = _HEAD.size + 4
_BELL_AT, _BELL_SIZE = 2 * _HEAD_SIZE, 8
_BEAT = struct.Struct("<II")
_BEAT_AT, _BEAT_SIZE = 4096, 4096
_HALVES_AT = 8192
#: Room for the outcomes that are kept, and for some thousand requests. Taken from the memory tier, so no more.
_HALF = 1 << 20
#: Bytes of the file.
LOG_SIZE = _HALVES_AT + 2 * _HALF
#: Share of a half that is left to the writes that empty the log.
_SPARE = 8

_log = logging.getLogger("tiered_checkpoint_io.drain")


class OperationLog:
    """One process' view of the log, up to date after each call."""

    def __init__(self, path: Path, *, clock: Clock = SYSTEM) -> None:
        """Takes the file, which is opened when it is there, and made by the first write."""
        self._path = path
        self._clock = clock
        self._guard = threading.RLock()
        self._file: int | None = None
        self._inode = (0, 0)
        #: Both heads as they were when the state was read.
        self._heads = b""
        self._state: dict[str, Any] = {}
        self._generation = 0
        register_owner(self)

    # ----------------------------------------------------------------------------------- reading
    def poll(self) -> bytes:
        """Returns bytes that differ from the last call's after a write or a ring; empty without a file."""
        with self._guard:
            file = self._opened()
            return os.pread(file, _BELL_AT + _BELL_SIZE, 0) if file is not None else b""

    def poll_with_heartbeat(self) -> bytes:
        """Returns the bytes of :meth:`poll`, which here also differ after a :meth:`beat`."""
        with self._guard:
            file = self._opened()
            return os.pread(file, _BEAT_AT + _BEAT_SIZE, 0) if file is not None else b""

    def entries(self, prefix: str) -> dict[str, Any]:
        """Returns all values below a prefix, by the rest of their keys."""
        with self._guard:
            self._take_up()
            return {key[len(prefix) :]: value for key, value in self._state.items() if key.startswith(prefix)}

    def get(self, key: str) -> Any:
        """Returns the value of a key; None if there is none."""
        with self._guard:
            self._take_up()
            return self._state.get(key)

    def heartbeat(self) -> bytes:
        """Returns the bytes that :meth:`beat` last wrote; empty if there are none, or during a write."""
        with self._guard:
            file = self._opened()
            raw = os.pread(file, _BEAT_SIZE, _BEAT_AT) if file is not None else b""
            if len(raw) < _BEAT.size:
                return b""
            length, checksum = _BEAT.unpack_from(raw)
            data = raw[_BEAT.size : _BEAT.size + length]
            return data if zlib.crc32(data) == checksum else b""

    # ----------------------------------------------------------------------------------- writing
    def open(self) -> None:
        """Makes the file if it is missing, so that later writes have their space; MemoryFullError without space."""
        with self._guard, self._locked():
            return

    def write(self, changes: Mapping[str, Any], *, leaves_room: bool = False) -> None:
        """Sets keys to JSON values, or removes those whose value is None: all of them, or none.

        With ``leaves_room``, the share :data:`_SPARE` of the space is left to other writers. Raises MemoryFullError if
        memory has no space for the file, or the file is full.
        """
        with self._guard, self._locked() as file:
            state = {key: value for key, value in {**self._state, **changes}.items() if value is not None}
            data = json.dumps(state, separators=(",", ":")).encode()
            if len(data) > _HALF - (_HALF // _SPARE if leaves_room else 0):
                text = "too much is queued for the operation log"
                raise MemoryFullError(text, operation="write", tier="memory", key=str(self._path))
            generation = self._generation + 1
            half = generation % 2
            os.pwrite(file, data, _HALVES_AT + half * _HALF)
            facts = _HEAD.pack(generation, len(data), zlib.crc32(data))
            os.pwrite(file, facts + zlib.crc32(facts).to_bytes(4, "little"), half * _HEAD_SIZE)
            self._state, self._generation = state, generation
            self._heads = os.pread(file, _BELL_AT, 0)

    def ring(self) -> None:
        """Wakes processes that poll: something has changed that is not in the log."""
        with self._guard:
            file = self._opened()
            if file is not None:
                os.pwrite(file, os.urandom(_BELL_SIZE), _BELL_AT)

    def beat(self, data: bytes) -> None:
        """Writes the heartbeat without a lock, as there is one drain; a text that is too long is left out."""
        with self._guard:
            file = self._opened()
            if file is not None and len(data) + _BEAT.size <= _BEAT_SIZE:
                os.pwrite(file, _BEAT.pack(len(data), zlib.crc32(data)) + data, _BEAT_AT)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the interpreter, the module may be empty by now.
        if self._file is not None:
            close(self._file)

    # ------------------------------------------------------------------------------------ inside
    def _opened(self, *, make: bool = False) -> int | None:
        if self._file is not None and inode_at(self._path) != self._inode:
            _log.warning("%s was removed: queued aliases and deletes, and outcomes, are lost", self._path)
            self.close()
            self._state, self._generation, self._heads = {}, 0, b""
        if self._file is None and not make and not os.path.exists(self._path):
            return None
        if self._file is None:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
            try:
                with needs_space("no space for the operation log", operation="open", key=str(self._path)):
                    self._file = os.open(self._path, flags, 0o600)
                    self._inode = inode_of(os.fstat(self._file))
            except FileNotFoundError:
                if make:
                    raise
        return self._file

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        file = self._opened(make=True)
        assert file is not None
        timing = self._clock.timing
        if not flock(file, timing.log_lock_s, timing.log_lock_poll_s, self._clock):
            raise MemoryTierError(
                "another process has held the operation log for too long",
                operation="write",
                tier="memory",
                key=str(self._path),
                hint="look for a process of this job that is stopped",
            )
        try:
            if os.fstat(file).st_size < LOG_SIZE:
                with needs_space("no space for the operation log", operation="open", key=str(self._path)):
                    os.posix_fallocate(file, 0, LOG_SIZE)
            self._take_up()
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _take_up(self) -> None:
        """Reads the writes of other processes."""
        file = self._opened()
        while file is not None and (heads := os.pread(file, _BELL_AT, 0)) != self._heads:
            halves = [_unsealed(heads[side * _HEAD_SIZE :][:_HEAD_SIZE]) for side in (0, 1)]
            is_damaged = None in halves
            state, found = {}, 0
            for generation, length, checksum in sorted(filter(None, halves), reverse=True):
                data = os.pread(file, length, _HALVES_AT + generation % 2 * _HALF) if generation else b""
                if zlib.crc32(data) == checksum:
                    state, found = json.loads(data or b"{}"), generation
                    break
                is_damaged = True
            if os.pread(file, _BELL_AT, 0) != heads:
                continue
            # No other process has overwritten the half meanwhile.
            self._heads, self._state, self._generation = heads, state, found
            if is_damaged and found:
                _log.warning("%s: a write was cut off, or one half is damaged; going on with the other", self._path)
            elif is_damaged:
                _log.warning("%s is damaged: queued aliases and deletes, and outcomes, are lost", self._path)

    def forked(self) -> None:
        """See :class:`node.Owner`: a copy of the descriptor would keep a lock alive that our parent dies with."""
        self._guard = threading.RLock()
        self.close()


def _unsealed(raw: bytes) -> tuple[int, int, int] | None:
    """Returns a head's generation, length and checksum; zeros if none was written yet, None if it is damaged."""
    if not any(raw):
        return (0, 0, 0)
    facts, checksum = raw[: _HEAD.size], raw[_HEAD.size :]
    if len(raw) < _HEAD_SIZE or zlib.crc32(facts).to_bytes(4, "little") != checksum:
        return None
    return _HEAD.unpack(facts)


EVENTS_FILE = "events.jsonl"
#: Some ten thousand events: a day of saves every ten seconds. Taken from the memory tier, so no more.
_MAX_BYTES = 1 << 20
#: Characters of a text that are kept.
_SHORT = 300
#: Bound of a wait for the lock: a writer holds it for under a millisecond; after the bound, it appends all the same.
_PATIENCE_S = 0.05
_POLL_S = 0.001


def note(root: Path, event: str, *, clock: Clock = SYSTEM, **facts: Any) -> None:
    """Appends an event to the record of a memory tier; never raises if space, descriptors or the folder are lacking."""
    short = {key: value[:_SHORT] if isinstance(value, str) else value for key, value in facts.items()}
    # A line that was cut off, on a full tmpfs, spoils no other: each begins with the end of the one before it.
    line = "\n" + json.dumps({"t": round(clock.wall(), 3), "event": event, **short}, separators=(",", ":"))
    with contextlib.suppress(OSError):
        descriptor = os.open(
            root / EVENTS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            locked = flock(descriptor, _PATIENCE_S, _POLL_S, clock)
            os.write(descriptor, line.encode())
            if locked and os.fstat(descriptor).st_size > _MAX_BYTES:
                _shorten(descriptor, clock)
        finally:
            os.close(descriptor)


def read_events(root: Path) -> list[Event]:
    """Returns the events of a memory tier, in their order, without those that can't be understood."""
    try:
        return _parse((root / EVENTS_FILE).read_bytes())
    except FileNotFoundError:
        return []


def _parse(data: bytes) -> list[Event]:
    found: list[Event] = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("t"), int | float):
                found.append(event)
    return found


def _shorten(descriptor: int, clock: Clock) -> None:
    """Has the older half of the events become one of their totals, in place: the file needs no further space."""
    events = _parse(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    half = len(events) // 2
    kept = [totals_of(events[:half]).event(clock.wall()), *events[half:]]
    # A reader that comes between the two sees fewer events.
    os.ftruncate(descriptor, 0)
    os.write(descriptor, "".join("\n" + json.dumps(each, separators=(",", ":")) for each in kept).encode())
