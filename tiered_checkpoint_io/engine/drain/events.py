"""The record of a run: one line of JSON for each event, appended to ``events.jsonl`` below the memory tier's root.

Trainers and the drain of a node write the record, metrics read it. No decision depends on it: if memory has no room for
a line, or no descriptor is left, the line is lost. Beyond a bound, older events become one event of their totals. The
events are described in :mod:`tiered_checkpoint_io.model.events`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.memory.node import flock
from tiered_checkpoint_io.model.events import Event, totals_of

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
