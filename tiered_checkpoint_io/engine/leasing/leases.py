"""Who writes to a place on the durable tier, and which of two runs that want to may.

Every process that saves to a dirpath and namespace keeps one small object of its own there, its
lease, and writes it again every ``lease_beat_s``. No process writes to the object of another, so
nothing has to be exclusive: a process first writes its own lease and then looks at all there are.
Of two that begin at the same time at least one sees the other, on any store that lists what was
written; conditional writes, which not every server has, would not make it safer.

What a process makes of the leases that it sees is decided here, by pure functions of what was
seen; :mod:`lease_keeper` reads and writes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from tiered_checkpoint_io.clock import Timing

_VERSION = 1

Verdict = Literal["free", "wait", "refused"]


@dataclass(frozen=True, slots=True)
class Lease:
    """What a lease says.

    Attributes:
        owner: The launch: all processes that belong together have the same.
        token: The lease itself.
        held: Whether its process has found no other; false while it still looks.
        host: Where it runs, for people.
        boot_id: Which start of which machine; "" where that can't be told.
        pid_ns: Within which its pid means something; "" where that can't be told.
        pid: Its process.
        born: When that began, in the machine's clock ticks.
    """

    owner: str
    token: str
    held: bool
    host: str
    boot_id: str
    pid_ns: str
    pid: int
    born: int

    def to_json(self) -> bytes:
        return json.dumps({"format_version": _VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Lease | None:
        """The lease; None where it can't be understood: then only its beats show that its process is alive."""
        try:
            raw = json.loads(data)
            raw.pop("format_version")
            lease = cls(**raw)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None
        texts = (lease.owner, lease.token, lease.host, lease.boot_id, lease.pid_ns)
        known = all(isinstance(each, str) for each in texts) and isinstance(lease.held, bool)
        return lease if known and isinstance(lease.pid, int) and isinstance(lease.born, int) else None

    @classmethod
    def of_this_process(cls, owner: str, token: str) -> Lease:
        """The lease of this process, not yet held."""
        boot_id, pid_ns, pid = _boot_id(), _pid_ns(), os.getpid()
        return cls(owner, token, False, socket.gethostname(), boot_id, pid_ns, pid, born(pid) or 0)

    @property
    def who(self) -> str:
        """The process, for people."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease of somebody else, as it looks now.

    Attributes:
        lease: What it says; None where that can't be understood.
        age: Seconds between its last beat and our own, by the store's clock.
        beats: Whether it was written again since we first saw it.
        quiet: For how long it was not, as far as we have seen, seconds.
    """

    lease: Lease | None
    age: float
    beats: bool
    quiet: float


def is_alive(seen: Seen, mine: Lease, born: Callable[[int], int | None], timing: Timing) -> bool | None:
    """Whether the process that holds a lease is alive; None where only time will show.

    Args:
        seen: The lease.
        mine: Our own.
        born: When a process of this machine began; None where there is none.
        timing: How often a lease is renewed, and when it expires.
    """
    lease = seen.lease
    if lease is not None and "" not in (here := (lease.boot_id, lease.pid_ns)) and here == (mine.boot_id, mine.pid_ns):
        return born(lease.pid) == lease.born
    # One that is old may be that of a run which the store was away for: it will beat again.
    beat_s, ttl_s = timing.lease_beat_s, timing.lease_ttl_s
    if seen.quiet > (2 * beat_s if seen.age > ttl_s else ttl_s):
        return False
    return True if seen.beats else None


def judge(mine: Lease, others: list[tuple[Seen, bool | None]]) -> tuple[Verdict, Seen | None]:
    """Whether a process that looks may hold its lease.

    It is refused where another run holds one. Of two that look, the one whose owner sorts first waits
    for the other to withdraw; each sees which it is.

    Args:
        mine: Our lease.
        others: Those of other owners, each with what :func:`is_alive` says.

    Returns:
        The verdict, and whom it is about.
    """
    waiting: Seen | None = None
    for seen, alive in others:
        if alive is False:
            continue
        lease = seen.lease
        if alive and (lease is None or lease.held or lease.owner < mine.owner):
            return "refused", seen
        waiting = seen
    return ("wait", waiting) if waiting is not None else ("free", None)


def born(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since boot; None where there is none, or it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in brackets, may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_ns() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
