"""This process's work on the lease of a dirpath.

A lease is written by conditional writes: of two runs that begin together, one has it. Its holder reads it every
``lease_beat_s``, and writes nothing while it is unchanged, because a bucket with versions keeps each write. A run that
finds another's lease writes its token into it, which asks for an answer: the holder writes the lease as it was. A
holder without an answer for ``lease_ttl_s`` is dead; a dead process of the same machine is known at once. The next
holder has the next generation. A run that ends leaves the lease free.

All this happens on a thread of its own, so that training never waits for the store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.durable.lease import UNREADABLE, Lease, holder_of, read, understood
from tiered_checkpoint_io.errors import ConfigError, StoreError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.node import Identity, are_one
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.base import ConditionalStore
from tiered_checkpoint_io.stores.fallbacks import conditional


class LeaseKeeper:
    """One process's work on the lease of a dirpath: it claims, asks, answers, and notices another holder."""

    def __init__(self, store: Callable[[], Store], namespace: str, log: Logger, *, owner: str, clock: Clock) -> None:
        """Asks nothing yet; ``store`` opens the durable tier, ``owner`` is that of :func:`owner_of_process`."""
        self._open = store
        self._log = log
        self._clock = clock
        self._timing = clock.timing
        process = Identity.of_this_process()
        self._mine = Lease(owner, clock.token(8), 0, "", namespace, socket.gethostname(), process)
        #: The lease as it was read or written last; empty if there was none.
        self._seen: bytes | None = None
        #: Time since which it is known to be so; None after a look that failed.
        self._since: float | None = None
        #: Token of the holder that this process has asked last.
        self._asked = ""
        #: True if the lease is this launch's.
        self.is_held = False
        #: Number of changes by other processes, each of which may have saved.
        self.met = 0
        self._looked, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._refusal: ConfigError | None = None
        self._was_shown = False
        #: Reason why the last look failed; None if the store has answered.
        self.failure: Exception | None = None

    @property
    def owner(self) -> str:
        """The launch that claims."""
        return self._mine.owner

    # ------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begins to claim, and to answer."""
        self._thread = self._clock.start(self._run, "tiered-lease")

    def check(self, wait_s: float = 0.0) -> None:
        """Waits for the first look, at most ``wait_s`` seconds.

        Raises:
            ConfigError: Another live run writes to the same place.
        """
        self._clock.wait(self._looked, wait_s)
        if self._refusal is not None:
            self._was_shown = True
            raise self._refusal

    def show(self) -> None:
        """Raises the error of :meth:`check`, if it was not raised yet."""
        if not self._was_shown:
            self.check()

    def close(self, timeout_s: float) -> None:
        """Leaves the lease free, if the store answers, and within ``timeout_s`` seconds."""
        if os.getpid() != self._mine.process.pid or self._thread is None:
            return
        self._stop.set()
        self._clock.join(self._thread, timeout_s if self._looked.is_set() and self.failure is None else 0.0)
        self._thread = None

    def _run(self) -> None:
        while not self._stop.is_set() and self._refusal is None:
            pause, failed = self._timing.lease_beat_s, self.failure
            try:
                pause, self.failure = self.step(), None
            except Exception as error:
                # Training continues: a store that does not answer takes no writes either. Other runs may be cut off as
                # well, so their silence so far proves nothing.
                self._since, self.failure = None, error
                if failed is None:
                    self._log.warning("could not check whether another run uses this dirpath: %s", error)
            self._looked.set()
            if self._refusal is None:
                self._clock.wait(self._stop, pause)
        if self.is_held and self.failure is None:
            # If that fails, the lease expires.
            with contextlib.suppress(Exception):
                self._leave()

    # ------------------------------------------------------------------------------------ steps
    def step(self) -> float:
        """Looks once, and claims, asks or answers; returns the seconds until the next look."""
        store, now = self._open(), self._clock.since_boot()
        before = self._seen
        self._seen, tag = read(store)
        if self._seen != before or self._since is None:
            self.met += self._seen != before and before is not None
            self._since = now
        lease, last = understood(self._seen), understood(before)
        is_free = not self._seen or (lease is not None and not lease.owner)
        if is_free or (lease is None and self.is_held):
            self._take(store, lease, tag)
        elif lease is not None and are_one(lease.owner, self.owner):
            self._join(store, lease, tag)
        elif self.is_held and lease is not None:
            self._refuse(f"{lease.who} took over while this run did not answer")
        else:
            has_answered = before is not None and self._seen != before
            if lease is not None:
                # Another run that asks changes the lease, too.
                has_answered = last is not None and last.token == lease.token and last.asker > lease.asker == ""
            self._judge(store, lease, tag, has_answered=has_answered, quiet_s=now - self._since)
        return self._timing.lease_beat_s if self.is_held else min(self._timing.lease_poll_s, self._timing.lease_beat_s)

    def _join(self, store: Store, lease: Lease, tag: str | None) -> None:
        """Answers, if this process is asked; shows the others of its launch that this process has come."""
        is_mine, here = lease.token == self._mine.token, self._mine.process.machine
        if not self.is_held or (is_mine and lease.asker) or (not is_mine and lease.process.is_alive(here) is False):
            self._write(store, replace(self._mine, generation=lease.generation), tag)

    def _judge(self, store: Store, lease: Lease | None, tag: str | None, *, has_answered: bool, quiet_s: float) -> None:
        """Yields to a holder that is alive, and takes the lease of a dead one; asks one that may be either."""
        is_alive = lease.process.is_alive(self._mine.process.machine) if lease is not None else None
        if is_alive or (is_alive is None and has_answered):
            self._refuse(f"{(lease or UNREADABLE).who} is running")
        elif is_alive is False or quiet_s > self._timing.lease_ttl_s:
            self._take(store, lease, tag)
        elif lease is not None and (not lease.asker or lease.token != self._asked):
            # Also if another run asks: each has to learn that the other may save.
            self._log.info("%s has the lease of the same dirpath; watching whether it is alive", lease.who)
            self._write(store, replace(lease, asker=self._mine.token), tag)

    def _take(self, store: Store, last: Lease | None, tag: str | None) -> None:
        """Claims a lease that is free, or a dead run's."""
        if not isinstance(store, ConditionalStore) and not self._mine.generation:
            text = "%s has no conditional writes: two runs that begin there together notice it only after %.0f s"
            self._log.warning(text, store.url, self._timing.lease_beat_s)
        self._write(store, replace(self._mine, generation=1 + (last.generation if last is not None else 0)), tag)

    def _write(self, store: Store, lease: Lease, tag: str | None) -> None:
        data = lease.to_json()
        try:
            conditional(store).put_if(ids.LEASE_KEY, data, tag)
        except StoreError as error:
            if error.reason != "changed":
                raise
            # The next look shows the lease of the faster process.
            return
        self._seen, self._since = data, self._clock.since_boot()
        if lease.token == self._mine.token:
            self._mine, self.is_held = lease, True
        else:
            self._asked = lease.token

    def _leave(self) -> None:
        store = self._open()
        data, tag = read(store)
        lease = understood(data)
        if lease is not None and lease.token == self._mine.token:
            self._write(store, replace(self._mine, owner="", token=""), tag)

    def other_that_may_live(self) -> str:
        """Returns the holder, for people, if it is another launch and may be alive; empty if there is none."""
        other = holder_of(self._open())
        if other is None or are_one(other.owner, self.owner):
            return ""
        return "" if other.process.is_alive(self._mine.process.machine) is False else other.who

    def _refuse(self, what: str) -> None:
        self.is_held = False
        self._refusal = ConfigError(
            f"another run writes to the same dirpath: {what}",
            operation="claim",
            tier="durable",
            key=self._open().url,
            hint="stop one of the two, or give it a dirpath of its own",
        )
        self._log.error("%s", self._refusal)
