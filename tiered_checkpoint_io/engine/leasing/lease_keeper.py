"""Keeps this process' lease: claims it, beats, and notices where another run has come. See :mod:`leases`.

All of it happens on a thread of its own, so that training never waits for the store. What is known
for sure is known with the first look: that no other run is there, or that one of this node is alive.
A lease of another node that is still fresh may be that of a run which has just crashed; it is
watched, while training goes on, until it beats or has had its time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.leasing import leases
from tiered_checkpoint_io.engine.leasing.leases import Lease, Seen
from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.errors import StoreNotFoundError, StoreUnavailableError, UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.base import ObjectInfo

#: None of ours is as long.
_MAX_BYTES = 1 << 16
#: Where a process keeps its owner, so that those which it starts know that they belong to it.
_OWNER_VARIABLE = "TIERED_CHECKPOINT_OWNER"


def owner_of_process(clock: Clock) -> str:
    """The launch that this process belongs to.

    All ranks of one start have the same, by the store of torch.distributed, and so have the processes
    that one of them starts.

    Raises:
        UsageError: That store does not answer.
    """
    owner = current_run().first("owner", os.environ.get(_OWNER_VARIABLE) or clock.token(8))
    adopt_owner(owner)
    return owner


def adopt_owner(owner: str) -> None:
    """Makes this process one of another's launch."""
    os.environ[_OWNER_VARIABLE] = owner


def launch_rank() -> int:
    """This process' rank by what its launcher says, where torch.distributed does not know it yet."""
    ranks = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID")]
    return max((int(rank) for rank in ranks if rank.isdecimal()), default=0)


class _Watched(NamedTuple):
    modified: float
    since: float
    beats: bool


class LeaseKeeper:
    """The lease of one process on one dirpath and namespace; claimed from the start on."""

    def __init__(
        self,
        store: Callable[[], Store],
        namespace: str,
        log: Logger,
        *,
        owner: str,
        clock: Clock,
    ) -> None:
        """Takes where to.

        Args:
            store: Opens the durable tier.
            namespace: The job's.
            log: Where to log.
            owner: See :func:`owner_of_process`.
            clock: For beats, and for how long others are silent.
        """
        self._open = store
        self._prefix = ids.lease_prefix(namespace)
        self._namespace = namespace
        self._log = log
        self._clock = clock
        self._timing = clock.timing
        self._pid = os.getpid()
        token = clock.token(8)
        self._key = ids.lease_key(namespace, token)
        self._is_written = False
        self._lease = Lease.of_this_process(owner, token)
        self._written: float | None = None
        #: Of each lease of others, when it was last seen to change, and what it says with which time.
        self._watched: dict[str, _Watched] = {}
        self._read: dict[str, tuple[float, Lease | None]] = {}
        self._looked = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_answered = self._warned = False
        self._refusal: UsageError | None = None
        self._was_shown = False

    # ------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begins to claim, and to beat."""
        self._thread = threading.Thread(target=self._run, name="tiered-lease", daemon=True)
        self._thread.start()

    def check(self, wait_s: float = 0.0) -> None:
        """Waits for the first look, at most ``wait_s`` seconds.

        Raises:
            UsageError: Another live run writes to the same place.
        """
        self._clock.wait(self._looked, wait_s)
        if self._refusal is not None:
            self._was_shown = True
            raise self._refusal

    def show(self) -> None:
        """As :meth:`check`, where the error was not raised yet.

        Raises:
            UsageError: Another live run writes to the same place.
        """
        if not self._was_shown:
            self.check()

    def close(self, timeout_s: float) -> None:
        """Gives the lease back, where the store answers, and within ``timeout_s`` seconds."""
        if os.getpid() != self._pid or self._thread is None:
            return
        self._stop.set()
        self._clock.join(self._thread, timeout_s if self._is_answered else 0.0)
        self._thread = None

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = self._timing.lease_beat_s
            try:
                pause = self.step()
                self._is_answered, self._warned = True, False
            except Exception as error:
                # No reason to stop training: a store that does not answer takes no writes either. Other runs may
                # be cut off as well, so their silence so far proves nothing.
                self._watched.clear()
                self._is_answered = False
                if not self._warned:
                    self._log.warning("could not check whether another run uses this dirpath: %s", error)
                    self._warned = True
            self._looked.set()
            if self._refusal is not None:
                break
            self._clock.wait(self._stop, pause)
        if self._is_written and self._is_answered:
            # Where that fails, the lease expires.
            with contextlib.suppress(Exception):
                self._open().delete(self._key)

    # ------------------------------------------------------------------------------------ steps
    def step(self) -> float:
        """Looks, or beats; gives the seconds until the next time.

        Raises:
            StoreError: The durable tier could not be asked.
        """
        store = self._open()
        now = self._clock.since_boot()
        late = self._written is not None and now - self._written > self._timing.lease_ttl_s
        if self._lease.held and not late:
            store.put(self._key, self._lease.to_json())
            self._written = now
            return self._timing.lease_beat_s
        others = self._look(store, now)
        self._written = now
        judged = [(seen, leases.is_alive(seen, self._lease, leases.born, self._timing)) for seen in others.values()]
        if self._lease.held:
            # A run that holds a lease now took ours for dead; one that only looks will see us alive.
            taken = [(seen, alive) for seen, alive in judged if alive is not False and seen.lease and seen.lease.held]
            if taken:
                self._refuse(taken[0][0], "took over while this run did not renew its lease")
            return self._timing.lease_beat_s
        verdict, other = leases.judge(self._lease, judged)
        if verdict == "refused":
            assert other is not None
            self._refuse(other, "is running")
        elif verdict == "free":
            for key, (_, alive) in zip(others, judged, strict=True):
                if alive is False:
                    store.delete(key)
            self._lease = replace(self._lease, held=True)
            store.put(self._key, self._lease.to_json())
        elif other is not None and other.quiet == 0:
            self._log.info(
                "%s has a lease on the same dirpath and namespace; watching whether it is alive",
                other.lease.who if other.lease else "an unknown process",
            )
        return (
            self._timing.lease_beat_s
            if verdict == "free"
            else min(self._timing.lease_poll_s, self._timing.lease_beat_s)
        )

    def _look(self, store: Store, now: float) -> dict[str, Seen]:
        """Writes our lease, and gives those of other owners, by their keys."""
        store.put(self._key, self._lease.to_json())
        self._is_written = True
        listed = {info.key: info for info in store.list(self._prefix)}
        mine = listed.pop(self._key, None)
        if mine is None:
            raise StoreUnavailableError(
                "the lease that was just written is not listed", operation="claim", tier="durable", key=self._key
            )
        seen = {}
        for key, info in listed.items():
            try:
                lease = self._content(store, info)
            except StoreNotFoundError:
                continue
            if lease is not None and lease.owner == self._lease.owner:
                continue
            last = self._watched.get(key)
            if last is None or last.modified != info.modified:
                self._watched[key] = last = _Watched(info.modified, now, beats=last is not None)
            seen[key] = Seen(lease, mine.modified - info.modified, last.beats, now - last.since)
        return seen

    def _content(self, store: Store, info: ObjectInfo) -> Lease | None:
        modified, lease = self._read.get(info.key, (None, None))
        if modified != info.modified or (lease is not None and not lease.held):
            # A lease that is written twice within a second may keep its time.
            lease = Lease.from_json(store.get(info.key)) if info.size <= _MAX_BYTES else None
            self._read[info.key] = (info.modified, lease)
        return lease

    def _refuse(self, other: Seen, what: str) -> None:
        lease = other.lease
        who = f"{lease.who} (launch {lease.owner})" if lease is not None else "a process whose lease can't be read"
        self._refusal = UsageError(
            f"another run writes to the same dirpath and namespace: {who} {what}",
            operation="claim",
            tier="durable",
            key=f"{self._open().url}, namespace {self._namespace}",
            hint="stop one of the two, or give it a dirpath or namespace of its own; a dead run's"
            f" lease expires within {self._timing.lease_ttl_s:.0f} s; no action needed",
        )
        self._log.error("%s", self._refusal)
