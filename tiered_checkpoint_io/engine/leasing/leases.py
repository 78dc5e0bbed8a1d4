"""Leases: their text, and a process's judgement of other leases. Pure, except for facts about this process.

Every process that saves to a dirpath keeps one small object of its own there, its lease. Every ``lease_beat_s`` it
lists what is there, and writes its own again if another launch's lease, not held, has come or was written again: so a
new run asks whether this one is alive. Otherwise it writes every ``lease_rest_s``, because a bucket with versions keeps
each write. No process writes to the object of another live process, so writes need not be exclusive: a process first
writes its own lease and then looks at all leases. Of two that begin together at least one sees the other, on any store
that lists written objects; conditional writes, which not every server has, would not make it safer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass

from tiered_checkpoint_io.clock import Timing
from tiered_checkpoint_io.memory.node import boot_id

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """Content of a lease.

    Attributes:
        owner: The launch, see :func:`model.launches.are_one`.
        token: The lease itself.
        held: True if its process has found no other run; false during the search.
        host: Its machine, for people.
        boot_id: The start of its machine; "" if unknown.
        pid_ns: The namespace of its pid; "" if unknown.
        pid: Its process.
        born: Start of its process, in the machine's clock ticks.
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
        """Returns the lease; None if it can't be understood: then only its beats show that its process is alive."""
        try:
            raw = json.loads(data)
            if raw.pop("format_version") != _VERSION:
                return None
            lease = cls(**raw)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            return None
        texts = (lease.owner, lease.token, lease.host, lease.boot_id, lease.pid_ns)
        known = all(isinstance(each, str) for each in texts) and isinstance(lease.held, bool)
        return lease if known and isinstance(lease.pid, int) and isinstance(lease.born, int) else None

    @classmethod
    def of_this_process(cls, owner: str, token: str) -> Lease:
        """Returns the lease of this process, not yet held."""
        pid = os.getpid()
        born = None
        with contextlib.suppress(OSError):
            born = _born(pid)
        return cls(owner, token, False, socket.gethostname(), boot_id(), _pid_ns(), pid, born or 0)


@dataclass(frozen=True, slots=True)
class Other:
    """A lease of another launch, as it looks now.

    Attributes:
        key: The object.
        lease: Its content; None if that can't be read or understood.
        beats: True if it was written again since we first saw it.
        quiet: Seconds for which it was not written again, as far as we have seen.
    """

    key: str
    lease: Lease | None
    beats: bool
    quiet: float

    @property
    def who(self) -> str:
        """The lease's process, for people."""
        if self.lease is None:
            return "a process whose lease can't be read"
        return f"process {self.lease.pid} on {self.lease.host} (launch {self.lease.owner})"

    @property
    def is_held(self) -> bool:
        """True if the lease says that its process has found no other."""
        return self.lease is not None and self.lease.held

    def is_alive(self, mine: Lease, timing: Timing) -> bool | None:
        """Returns True if the lease's process is alive; None if that is not known yet."""
        lease, here = self.lease, (mine.boot_id, mine.pid_ns)
        if lease is not None and "" not in here and (lease.boot_id, lease.pid_ns) == here:
            # A process that can't be read is hidden, or we are out of descriptors.
            with contextlib.suppress(OSError):
                return _born(lease.pid) == lease.born
        # The lease's age is no evidence: it is written seldom while no other run asks.
        if self.quiet > timing.lease_ttl_s:
            return False
        return True if self.beats else None


def _born(pid: int) -> int | None:
    """Returns the clock ticks since boot at which a process began; None for none, or a dead one."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in brackets, may hold anything.
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        if _exists(pid):
            raise
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _pid_ns() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
