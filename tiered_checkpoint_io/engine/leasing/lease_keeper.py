"""Keeps this process' lease: claims it, beats, and notices when another run has come. See :mod:`leases`.

This work happens on a thread of its own, so that training never waits for the store. The first look finds for sure that
no other run is there, or that a run of this node is alive. A fresh lease of another node may belong to a run that has
just crashed; it is watched during training until it beats or expires.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.leasing.leases import Lease, Other
from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.errors import ConfigError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.launches import are_one, is_another_job, job_of
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.base import ObjectInfo
from tiered_checkpoint_io.stores.refusals import Refusals

#: Size in bytes that no lease of ours has.
_MAX_BYTES = 1 << 16
#: Number of processes, each started by the one before, that are known to belong together.
_ANCESTORS = 32
#: Variable with a process's owner, so that child processes know that they belong to it.
_OWNER_VARIABLE = "TIERED_CHECKPOINT_OWNER"
#: Variable with that owner's job of the scheduler: a submitted job inherits its environment, but is another run.
_JOB_VARIABLE = "TIERED_CHECKPOINT_OWNER_JOB"
#: The owner of a process, by its id: a forked child has its parent's memory, but is another process.
_owners: dict[int, str] = {}


def owner_of_process(clock: Clock) -> str:
    """Returns this process's launch: a name of its own, after those of the processes that started it.

    Names of another job of the scheduler, which submitted this one, are left out. All ranks of one start have the same,
    by the store of torch.distributed. See :func:`model.launches.are_one`.

    Raises:
        ConfigError: The store does not answer.
    """
    pid = os.getpid()
    job, recorded = job_of(os.environ), os.environ.get(_JOB_VARIABLE)
    is_submitted = recorded is not None and is_another_job(job, recorded)
    if pid not in _owners:
        inherited = "" if is_submitted else os.environ.get(_OWNER_VARIABLE, "")
        line = [*filter(None, inherited.split("/")), clock.token(8)]
        _owners[pid] = "/".join(line[-_ANCESTORS:])
    _owners[pid] = os.environ[_OWNER_VARIABLE] = current_run().first("owner", _owners[pid])
    if recorded is None or is_submitted:
        os.environ[_JOB_VARIABLE] = job
    return _owners[pid]


def launch_rank() -> int:
    """Returns this process' rank as its launcher says, if torch.distributed does not know it yet.

    Slurm counts all its tasks. They form one job if MASTER_ADDR is set.
    """
    names = ["RANK", "LOCAL_RANK", *(["SLURM_PROCID"] if os.environ.get("MASTER_ADDR") else [])]
    ranks = [os.environ.get(name, "") for name in names]
    return max((int(rank) for rank in ranks if rank.isdecimal()), default=0)


class _Watched(NamedTuple):
    modified: float
    since: float
    beats: bool


class LeaseKeeper:
    """The lease of one process on one dirpath, claimed from the start on.

    Runs of any namespace are seen; the namespace is part of the key, and names the owner to people and ``flush``.
    """

    def __init__(self, store: Callable[[], Store], namespace: str, log: Logger, *, owner: str, clock: Clock) -> None:
        """Asks nothing yet; ``store`` opens the durable tier, ``owner`` is that of :func:`owner_of_process`."""
        self._open = store
        self._log = log
        self._clock = clock
        self._timing = clock.timing
        self._pid = os.getpid()
        token = clock.token(8)
        self._key = ids.lease_key(namespace, token)
        self._lease = Lease.of_this_process(owner, token)
        #: Time of its last write, and of the store's last answer.
        self._written = self._answered = 0.0
        #: Time of the last write of each lease but ours, as of the last list.
        self._seen: dict[str, float] = {}
        #: Time of the last change of each lease of others.
        self._watched: dict[str, _Watched] = {}
        #: Number of times that others have come or gone, or have written their leases again; or may have, while we were
        #: cut off.
        self.met = 0
        self._looked = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        #: True if the store answered the last time.
        self._is_answered: bool | None = None
        self._refusal: ConfigError | None = None
        #: Reason why the last look failed.
        self.failure: Exception | None = None
        self._was_shown = False

    @property
    def owner(self) -> str:
        """The launch that claims."""
        return self._lease.owner

    @property
    def is_held(self) -> bool:
        """True if the lease has found no other run."""
        return self._lease.held

    # ------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begins to claim, and to beat."""
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
        """Gives the lease back, if the store answers, and within ``timeout_s`` seconds."""
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
                self._is_answered, self.failure = True, None
            except Exception as error:
                # Training continues: a store that does not answer takes no writes either. Other runs may be cut off as
                # well, so their silence so far proves nothing.
                self._watched.clear()
                if self._is_answered is not False:
                    self._log.warning("could not check whether another run uses this dirpath: %s", error)
                self._is_answered, self.failure = False, error
            self._looked.set()
            if self._refusal is not None:
                break
            self._clock.wait(self._stop, pause)
        if self._is_answered and (self._lease.held or self._refusal is not None):
            # If that fails, the lease expires. A run that ends before it knows of others leaves its lease to expire,
            # too: the others must learn of it at one of their looks, because both may have saved.
            with contextlib.suppress(Exception):
                self._open().delete(self._key)

    # ------------------------------------------------------------------------------------ steps
    def step(self) -> float:
        """Looks, or beats; returns the seconds until the next time."""
        beat_s = self._timing.lease_beat_s
        store, now = self._open(), self._clock.since_boot()
        is_lost = False
        if self._lease.held:
            listed = {info.key: info for info in store.list(ids.LEASE_PREFIX)}
            # A run that took our lease for dead has removed it.
            is_lost = listed.pop(self._key, None) is None or now - self._answered > self._timing.lease_ttl_s
            is_asked = self._is_asked(store, listed)
            if not is_lost and not is_asked and now - self._written < self._timing.lease_rest_s:
                self._answered = now
                return beat_s
        store.put(self._key, self._lease.to_json())
        self._written = now
        if self._lease.held and not is_lost:
            self._answered = now
            return beat_s
        others = self._look(store, now)
        self.met += is_lost
        self._answered = now
        alive = {other: other.is_alive(self._lease, self._timing) for other in others}
        living = [other for other in others if alive[other] is not False]
        if self._lease.held:
            # A run that holds a lease now took ours for dead; one that only looks will see us alive.
            taken = next((other for other in living if other.is_held), None)
            if taken is not None:
                self._refuse(taken, "took over while this run did not renew its lease")
            return beat_s
        # We yield to it: of two that look, the owner that sorts last does.
        ours = [each for each in living if each.lease and not each.lease.held and each.lease.owner >= self._lease.owner]
        first = next((other for other in living if alive[other] and other not in ours), None)
        if first is not None:
            self._refuse(first, "is running")
        elif not living:
            for other in others:
                self._bury(store, other)
            self._lease = replace(self._lease, held=True)
            store.put(self._key, self._lease.to_json())
            return beat_s
        elif living[-1].quiet == 0:
            self._log.info("%s has a lease on the same dirpath; watching whether it is alive", living[-1].who)
        return min(self._timing.lease_poll_s, beat_s)

    def _bury(self, store: Store, dead: Other) -> None:
        """Removes the lease of a run that is dead; one that may not be deleted, by a policy for one, says so no more.

        In its place is another of ours that is not held: else retention would take that run to be there for ever.
        """
        refused = Refusals()
        with refused.kept():
            store.delete(dead.key)
        if refused and (dead.is_held or dead.lease is None):
            with refused.kept():
                store.put(dead.key, self._lease.to_json())

    def _look(self, store: Store, now: float) -> list[Other]:
        """Returns the leases of other owners, after ours was written."""
        listed = {info.key: info for info in store.list(ids.LEASE_PREFIX)}
        mine = listed.pop(self._key, None)
        if mine is None:
            raise StoreError("the lease is not listed", operation="claim", key=self._key, reason="unavailable")
        others = self._others(store, listed.values())
        self._meet(listed, others)
        for at, other in enumerate(others):
            modified, last = listed[other.key].modified, self._watched.get(other.key)
            if last is None or last.modified != modified:
                self._watched[other.key] = last = _Watched(modified, now, beats=last is not None)
            others[at] = replace(other, beats=last.beats, quiet=now - last.since)
        return others

    def _others(self, store: Store, listed: Iterable[ObjectInfo]) -> list[Other]:
        """Returns the leases of other launches among these, as if they were seen for the first time."""
        others = []
        for info in listed:
            try:
                lease = Lease.from_json(store.get(info.key)) if info.size <= _MAX_BYTES else None
            except StoreNotFoundError:
                continue
            except StoreError as error:
                if error.reason != "archived":
                    raise
                # A lifecycle rule has archived the old lease: it counts as unreadable.
                lease = None
            if lease is None or not are_one(lease.owner, self._lease.owner):
                others.append(Other(info.key, lease, beats=False, quiet=0.0))
        return others

    def _is_asked(self, store: Store, listed: Mapping[str, ObjectInfo]) -> bool:
        """Returns True if another launch may ask if we are alive: its lease is new, or was written again."""
        try:
            others = self._others(store, [info for key, info in listed.items() if self._seen.get(key) != info.modified])
        except StoreError:
            # A lease that can't be read may ask; the next look reads it again.
            return True
        # A held lease asks nothing: its process has looked.
        return any(not each.is_held for each in self._meet(listed, others))

    def _meet(self, listed: Mapping[str, ObjectInfo], others: Sequence[Other]) -> list[Other]:
        """Takes note of all leases, and of other launches' leases; returns the new ones of the latter."""
        new = [each for each in others if self._seen.get(each.key) != listed[each.key].modified]
        # A process of this launch that has come or gone may have saved, too.
        self.met += bool(new or listed.keys() != self._seen.keys())
        self._seen = {key: info.modified for key, info in listed.items()}
        return new

    def may_be_alive(self) -> Other | None:
        """Returns a lease of another launch whose process may live, if there is no room to write ours."""
        store = self._open()
        others = self._others(store, [info for info in store.list(ids.LEASE_PREFIX) if info.key != self._key])
        return next((each for each in others if each.is_alive(self._lease, self._timing) is not False), None)

    def _refuse(self, other: Other, what: str) -> None:
        self._refusal = ConfigError(
            f"another run writes to the same dirpath: {other.who} {what}",
            operation="claim",
            tier="durable",
            key=self._open().url,
            hint="stop one of the two, or give it a dirpath of its own",
        )
        self._log.error("%s", self._refusal)
