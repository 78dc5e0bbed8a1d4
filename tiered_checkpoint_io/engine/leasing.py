"""Claims of a process for its launch: a lease on a dirpath, and a lock on a namespace of this node.

A lease is written by conditional writes: of two runs that begin together, one has it. Its holder reads it every
``lease_beat_s``, and writes nothing while it is unchanged, because a bucket with versions keeps each write. A run that
finds another's lease writes its token into it, which asks for an answer: the holder writes the lease as it was. A
holder without an answer for ``lease_ttl_s`` is dead; a dead process of the same machine is known at once. The next
holder has the next generation. A run that ends leaves the lease free. All this happens on a thread of its own, so that
training never waits for the store.

Two jobs in one namespace would remove each other's checkpoints by their retention, and each would configure the drain
for its own durable tier. A job is known by its launch, which is in a file; each of its processes holds a shared lock on
another file, which ends with the process. Memory of namespaces that have ended is room for others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import tier_at
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE as DRAIN_FILE
from tiered_checkpoint_io.engine.drain.worker import TRAINERS_FILE
from tiered_checkpoint_io.engine.durable.lease import UNREADABLE, Lease, holder_of, read, understood
from tiered_checkpoint_io.engine.durable.manifests import newest_save_id
from tiered_checkpoint_io.engine.ranks.run import current_rank, current_run, current_world_size
from tiered_checkpoint_io.engine.retention import only_here
from tiered_checkpoint_io.errors import ConfigError, StoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, size_text
from tiered_checkpoint_io.memory.node import (
    Identity,
    is_lost,
    release,
    share,
    try_lock,
    used,
    write_atomic,
)
from tiered_checkpoint_io.memory.parts import SAVES
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.base import ConditionalStore, conditional
from tiered_checkpoint_io.stores.retry import Question


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
        """Waits for the first look, at most ``wait_s`` seconds; ConfigError if another live run writes there."""
        self._clock.wait(self._looked, wait_s)
        if self._refusal is not None:
            raise self._refusal

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
        elif lease is not None and lease.owner == self.owner:
            self._join(store, lease, tag)
        elif self.is_held and lease is not None:
            self._refuse(f"{lease.who} took over while this run did not answer")
        else:
            has_answered = before is not None and self._seen != before
            if lease is not None:
                # Another run that asks changes the lease, too. Any process of the launch answers.
                has_answered = last is not None and last.owner == lease.owner and last.asker > lease.asker == ""
            self._judge(store, lease, tag, has_answered=has_answered, quiet_s=now - self._since)
        return self._timing.lease_beat_s if self.is_held else min(self._timing.lease_poll_s, self._timing.lease_beat_s)

    def _join(self, store: Store, lease: Lease, tag: str | None) -> None:
        """Answers, if this process is asked; shows the others of its launch that this process has come."""
        is_mine, here = lease.token == self._mine.token, self._mine.process.machine
        if not self.is_held or lease.asker or (not is_mine and lease.process.is_alive(here) is False):
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
        if other is None or other.owner == self.owner:
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


LOCK_FILE = "job.lock"
#: Locks of processes that may add to the memory: a trainer, and a job.
TRAINERS = (TRAINERS_FILE, LOCK_FILE)
_FACTS_FILE = "job.json"


class NamespaceLock:
    """One process' lock on a namespace of its node's memory."""

    def __init__(self, root: Path, dirpath: str, owner: str, log: Logger, clock: Clock) -> None:
        """Locks the namespace, for the launch ``owner`` with its durable checkpoints at ``dirpath``.

        If space or descriptors for the lock are lacking, this warns, and holds no lock.

        Raises:
            ConfigError: A live job of another launch has it.
        """
        mine = {"dirpath": dirpath, "owner": owner, "pid": os.getpid()}
        deadline = clock.monotonic() + clock.timing.namespace_wait_s
        self._held: int | None = None
        try:
            while (other := self._take(root, mine, clock)) is not None:
                if clock.monotonic() > deadline:
                    raise ConfigError(
                        f"another live job keeps its checkpoints in this node's memory under the same namespace: that"
                        f" of {other.get('dirpath')}, process {other.get('pid')}",
                        operation="save",
                        tier="memory",
                        key=str(root),
                        hint="give each job of a node a namespace of its own",
                    )
                # The other job's process may be about to end.
                clock.sleep(clock.timing.namespace_poll_s)
        except OSError as error:
            # No space, or no descriptor: a save may not need memory.
            log.warning("could not lock this namespace of node memory; another job in it goes unnoticed: %s", error)

    def _take(self, root: Path, mine: dict[str, Any], clock: Clock) -> dict[str, Any] | None:
        """Takes a shared lock, or returns the job that has it; the first process of a job writes its owner."""
        held = try_lock(root / LOCK_FILE)
        is_first = held is not None
        if held is None:
            held = try_lock(root / LOCK_FILE, shared=True)
        with contextlib.ExitStack() as given_back:
            if held is not None:
                given_back.callback(release, held)
                if is_first:
                    write_atomic(root / _FACTS_FILE, json.dumps(mine).encode(), clock)
                    share(held)
            other = _facts(root)
            # A damaged file names no job.
            if held is None or (other and other.get("owner") != mine["owner"]):
                return other
            given_back.pop_all()
        self._held = held
        return None

    @property
    def is_lost(self) -> bool:
        """True if the lock's file was removed, so that other jobs do not see the lock."""
        return self._held is not None and is_lost(self._held)

    def close(self) -> None:
        """Releases the lock."""
        held, self._held = self._held, None
        if held is not None:
            release(held)


def _facts(root: Path) -> dict[str, Any]:
    try:
        facts = json.loads((root / _FACTS_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def lock_out(root: Path, held: contextlib.ExitStack) -> set[str]:
    """Locks trainers and drains out of a namespace until ``held`` ends; returns the locks that others hold."""
    locks = {name: try_lock(root / name) for name in (*TRAINERS, DRAIN_FILE)}
    for lock in filter(None, locks.values()):
        held.callback(release, lock)
    return {name for name, lock in locks.items() if lock is None}


def delete(root: Path, spills: Iterable[Path], clock: Clock) -> None:
    """Deletes the memory of a namespace, and its spills.

    Memory is renamed first, so that no process finds it or queues anything there; a drain without work that holds its
    lock leaves, because its file is gone. The spill goes before the memory, which names the spill to the next command
    if this one is killed.
    """
    going = [root.with_name(f"{left_by(root)}{clock.token(8)}")] if root.is_dir() else []
    for renamed in going:
        root.rename(renamed)
    for folder in filter(Path.is_dir, (*spills, *going)):
        shutil.rmtree(folder)


def left_by(root: Path) -> str:
    """Returns the prefix of the names by :func:`delete`, under which a killed process leaves remains."""
    return f".{root.name}.cleaned-"


def make_room(tier: MemoryTier, missing: int, log: Logger, clock: Clock) -> str:
    """Deletes ended namespaces of this user whose checkpoints are durable, the oldest first, until there is room.

    Returns advice that names the namespaces which take memory too; empty if there is room, or if they do not matter.
    """
    if tier.budget is not None and tier.budget - tier.usage() < missing:
        return ""
    taken, left = [], []
    roots = [each for each in tier.root.parent.glob("[!.]*") if each != tier.root and (each / SAVES).is_dir()]
    for root in sorted(roots, key=lambda each: each.stat().st_mtime):
        # Another process may do the same.
        with contextlib.ExitStack() as held, contextlib.suppress(FileNotFoundError):
            if tier.room() >= missing:
                break
            other, size = tier_at(root), size_text(used(root))
            if lock_out(root, held):
                left.append(f"{root.name} ({size}, in use)")
            elif _is_needed(other):
                where = f"--memory-dir {root.parent.parent} --namespace {root.name}"
                free = f"`tiered-ckpt flush {where}`, then `tiered-ckpt clean --yes {where}`"
                left.append(f"{root.name} ({size}, not all known to be durable: {free})")
            else:
                delete(root, [other.spill.root] if other.spill is not None else [], clock)
                taken.append(f"{root.name} ({size})")
    if taken:
        log.info("took memory of ended runs, whose checkpoints are all durable: %s", ", ".join(taken))
    return "" if tier.room() >= missing or not left else f"other namespaces take memory too: {', '.join(left)}"


def _is_needed(tier: MemoryTier) -> bool:
    """Returns True if memory may hold anything that is not known to be on the durable tier, and is needed."""
    queue, there = Queue(tier.root), dict[tuple[Place, str], str]()
    for each in queue.outcomes():
        if each.state == "committed" and each.action in ("save", "delete"):
            there[each.place, each.name] = each.op_id if each.action == "save" else ""
    return bool(queue.look(tier) or tier.unreadable() or only_here(tier.held(), there))


#: The launch of this process; a forked child is of its parent's.
_owner = ""


def owner_of_process(clock: Clock) -> str:
    """Returns this process's launch: all ranks of one start have the same, by the store of torch.distributed.

    Raises ConfigError if that does not answer.
    """
    global _owner
    _owner = current_run().first("owner", _owner or clock.token(8))
    return _owner


def launch_rank() -> int:
    """Returns this process' rank as its launcher says, if torch.distributed does not know it yet.

    Slurm counts all its tasks. They form one job if MASTER_ADDR is set.
    """
    names = ["RANK", "LOCAL_RANK", *(["SLURM_PROCID"] if os.environ.get("MASTER_ADDR") else [])]
    ranks = [os.environ.get(name, "") for name in names]
    return max((int(rank) for rank in ranks if rank.isdecimal()), default=0)


class Claims:
    """The lease and the namespace lock of one process, each taken when it is first needed."""

    def __init__(
        self,
        config: TieredCheckpointConfig,
        log: Logger,
        clock: Clock,
        *,
        root: Callable[[], Path],
        store: Callable[[], Store],
        in_time: Callable[[float], float],
        follows: Callable[[], bool] = lambda: False,
    ) -> None:
        """Claims nothing yet; ``in_time`` shortens waits, ``follows`` says if save ids sort after existing ones."""
        self._config = config
        self._log = log
        self._clock = clock
        self._root = root
        self._store = store
        self._in_time = in_time
        self._follows = follows
        #: The look for the newest save id; None before it begins, and once all was given back.
        self._look: Question[str | None] | None = None
        self._lease: LeaseKeeper | None = None
        self._met = 0
        self._namespace: NamespaceLock | None = None

    def claim(self, *, saves: bool = True) -> None:
        """Claims the dirpath for this launch, in the background; a repeated call looks at the result.

        Raises as :meth:`check`.

        The first call waits for the first look, which finds nearly every other run, for ``lease_first_look_s``, and
        ``durable_timeout_s`` at most. A rank other than 0 that torch.distributed does not know yet claims nothing. With
        ``saves``, a save follows, which has to sort after the existing saves.
        """
        self.check()
        began = self._clock.monotonic()
        patience_s = self._in_time(min(self._clock.timing.lease_first_look_s, self._config.support.durable_timeout_s))
        is_new, look = self._lease is None, None
        if is_new and current_world_size() == 1 and launch_rank() > 0:
            return
        try:
            if self._lease is None:
                owner = owner_of_process(self._clock)
                lease = LeaseKeeper(self._store, self._config.namespace, self._log, owner=owner, clock=self._clock)
                lease.start()
                self._lease = lease
            if saves and self._look is None and not self._follows():
                # With a clock that is behind, new saves would be older than existing ones.
                look = self._look = Question(self._find_newest, clock=self._clock)
        except OSError as error:
            # A failure here is no reason to stop training: the next save claims.
            self._log.warning("could not check whether another run uses this dirpath: %s", error)
            return
        self._lease.check(patience_s if is_new else 0.0)
        if look is not None:
            look.within(max(0.0, began + patience_s - self._clock.monotonic()))

    def _find_newest(self) -> str | None:
        try:
            return newest_save_id(self._store())
        except Exception as error:
            text = "could not look up the newest checkpoint; by a late clock, new ones may count as older: %s"
            self._log.warning(text, error)
            return None

    @property
    def newest(self) -> str | None:
        """The newest save id on the durable tier, once a look before the first save there has found it."""
        look = self._look
        return look.result() if look is not None and look.within(0.0) else None

    def check(self) -> None:
        """Looks at the result of a claim; and, once, or again if its file was lost, at the owner of this namespace.

        Raises ConfigError if another live run writes to the dirpath, or another live job of this node to the namespace.
        """
        # The save raises other errors of memory.
        with contextlib.suppress(OSError):
            if self._namespace is not None and self._namespace.is_lost:
                self._namespace.close()
                self._namespace = None
        if self._namespace is None and current_rank() == 0 and (current_world_size() > 1 or launch_rank() == 0):
            self._namespace = self._lock_namespace()
        if self._lease is not None:
            self._lease.check()

    @property
    def owner(self) -> str | None:
        """The launch that this process claimed the dirpath for; None if it has claimed none."""
        return None if self._lease is None else self._lease.owner

    def met_others(self) -> bool:
        """Returns True if other runs may have saved to the dirpath since the last call."""
        met = 0 if self._lease is None else 1 + self._lease.met
        is_new, self._met = met != self._met, met
        return is_new

    def release_lease(self) -> None:
        """Gives the lease back, within ``lease_close_s`` seconds."""
        if self._lease is not None:
            self._lease.close(self._in_time(self._clock.timing.lease_close_s))
            self._lease = None

    def close(self) -> None:
        """Gives lease and lock back."""
        # Other processes may save before this process' next save.
        self._look = None
        self.release_lease()
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None

    def _lock_namespace(self) -> NamespaceLock | None:
        try:
            root, owner = self._root(), owner_of_process(self._clock)
        except (OSError, TieredCheckpointError):
            # The save that follows fails for the same reason, and reports it.
            return None
        if not self._config.is_named:
            self._log.info("no namespace was given: checkpoints are in node memory under %s", root.name)
        return NamespaceLock(root, self._config.dirpath, owner, self._log, self._clock)
