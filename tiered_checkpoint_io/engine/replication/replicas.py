"""Replicas: the drain of each node reads parts from the drains of other nodes, and keeps them in its own memory.

Trainers note the nodes of their job, see :mod:`engine.replication.meeting`; from then on the drains replicate by
themselves, also while no trainer lives. The leader's drain asks the others for reports, all ask it for orders: see
:mod:`engine.replication.agreement`. Both are GETs, of which none waits. A part is read as a restore reads it: verified.

Marks tell the trainer, which alone removes its own parts: a part that is *awaited* stays, and of the *replicated* saves
the newest one does. A part becomes awaited only if the trainer has not begun to remove it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.chunks import SlotDestination, copies_at, describe, read_part
from tiered_checkpoint_io.engine.replication.agreement import Agreement, Group, Held, Node, Orders, Pull, Report
from tiered_checkpoint_io.engine.retention import form_of, outdated_replicas
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, of_step, rate
from tiered_checkpoint_io.memory.node import MemoryFullError, is_tmpfs, memory_left, memory_of, write_atomic
from tiered_checkpoint_io.memory.parts import REPLICAS, SAVES, StoredPart
from tiered_checkpoint_io.memory.slots import Slot
from tiered_checkpoint_io.memory.tier import MemoryTier, noted_budget
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores.peer import Endpoint, PeerStore

#: Folder of the groups that trainers note, one file each; and the file for trainers: saves that were given up.
_GROUPS, _GIVEN_UP = "groups", "replicas.json"
#: The leader needs so much time for each node's report, seconds: no node asks it more often.
_REPORT_S = 0.004


def join(root: Path, group: Group) -> None:
    """Adds this node's drain to a group, instead of an earlier one of the same nodes; raises MemoryFullError."""
    (root / _GROUPS).mkdir(mode=0o700, exist_ok=True)
    for each, path in _groups(root):
        if each.series == group.series and [node.memory for node in each.nodes] == [n.memory for n in group.nodes]:
            path.unlink(missing_ok=True)
    write_atomic(root / _GROUPS / group.id, group.to_json())


def leave_groups(root: Path) -> None:
    """Forgets the groups of an earlier job."""
    for _, path in _groups(root):
        path.unlink(missing_ok=True)


def given_up(root: Path) -> dict[str, str]:
    """Returns the reasons why the last saves were not replicated, by save."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((root / _GIVEN_UP).read_bytes()))
    return {}


def of_series(held: Iterable[StoredPart], series: str | None) -> list[StoredPart]:
    """Returns the parts of the ranks that have saved a series, by their folder; all of them if it is None."""
    return [each for each in held if series is None or _folder(each.part.series) == _folder(series)]


def form_key(part: Part) -> str:
    """Returns equal keys for saves of which the later replace the earlier with peers."""
    return f"{part.place} {form_of(part)}"


def _folder(series: str) -> str:
    # Groups without folders differ in the rest of the name.
    return ids.folder_of(series) or series


def _groups(root: Path) -> Iterator[tuple[Group, Path]]:
    with contextlib.suppress(FileNotFoundError):
        for path in sorted((root / _GROUPS).iterdir()):
            with contextlib.suppress(OSError, ValueError):
                yield Group.from_json(path.read_bytes()), path


class _Membership:
    """This node in a group."""

    def __init__(self, group: Group, number: int, newest: dict[str, str], clock: Clock) -> None:
        self.group, self.number = group, number
        #: The newest save of each form that this node had when the ranks met.
        self.newest_before = newest
        self.orders = Orders()
        #: Name of the last orders that are carried out.
        self.done = ""
        patience_s = clock.timing.replica_patience_s
        self.agreement = Agreement(group, clock.token(4), patience_s=patience_s) if number == 0 else None


class Replicas:
    """The replication of one node."""

    def __init__(self, root: Path, tier: MemoryTier, logger: Logger, clock: Clock) -> None:
        """Does nothing until :meth:`look` finds a group."""
        self._root, self._tier = root, tier
        #: ``memory_keep_last``.
        self.keep_last = 1
        #: Has room for replicas once there is a group.
        self._kept = tier.replicas
        self._log, self._clock = logger, clock
        self._lock = threading.Lock()
        self._members: dict[str, _Membership] | None = None
        self._peers: dict[Node, PeerStore] = {}
        #: Nodes that did not answer, and when to ask them again.
        self._away: dict[Node, float] = {}
        #: Saves of which a part did not come: the reason, and when to try again.
        self._failed: dict[str, tuple[str, float]] = {}
        self._thread: threading.Thread | None = None
        self._pulling: threading.Thread | None = None
        self._bell, self._is_closing = threading.Event(), False
        self._saves: frozenset[str] = frozenset()
        self._moved_at = -clock.timing.replication_linger_s
        self._said: dict[str, str] = {}

    # ------------------------------------------------------------------------------- for the drain
    def look(self) -> None:
        """Takes part in the groups that trainers have noted; never raises."""
        with self._lock, contextlib.suppress(OSError):
            found = {group.id: group for group, _ in _groups(self._root)}
            if self._members is not None and found.keys() == self._members.keys():
                return
            held = [*self._tier.parts(), *self._kept.parts()]
            newest = {form_key(each.part): each.save_id for each in sorted(held, key=lambda each: each.save_id)}
            members = {group_id: each for group_id, each in (self._members or {}).items() if group_id in found}
            memory = memory_of(self._root)
            for group in found.values():
                numbers = [number for number, node in enumerate(group.nodes) if node.memory == memory]
                if group.id not in members and numbers:
                    members[group.id] = _Membership(group, numbers[0], newest, self._clock)
            self._members, self._moved_at = members, self._clock.monotonic()
            self._bell.set()
            if self._thread is None and members:
                left, budget = memory_left if is_tmpfs(str(self._root)) else None, noted_budget(self._root)
                self._kept = MemoryTier(self._root, budget_bytes=budget, folder=REPLICAS, left=left, clock=self._clock)
                self._thread = self._clock.start(self._run, "tiered-replicas")
            elif self._thread is None:
                self._carry_out()

    def answer(self, group_id: str, node: int | None) -> bytes | None:
        """Returns this node's report, or its orders to another node; None if it has none."""
        member = (self._members or {}).get(group_id)
        if member is None:
            return None
        if node is None:
            return self._report(member).to_json()
        return member.agreement.orders(node).to_json() if member.agreement is not None else None

    @property
    def is_busy(self) -> bool:
        """True while this node's drain is to stay for replicas: something is about to change, here or elsewhere."""
        if not self._members:
            return False
        timing, quiet_s = self._clock.timing, self._clock.monotonic() - self._moved_at
        is_open = not all(each.orders.is_settled for each in self._members.values())
        # The others learn of the last decision by a further look.
        return quiet_s < (timing.replication_linger_s if is_open else 2 * timing.store_rest_s) or self._has_news()

    def close(self) -> None:
        """Ends the threads, unless one of them waits for another node."""
        self._is_closing = True
        self._bell.set()
        for thread in (self._thread, self._pulling):
            if thread is not None:
                self._clock.join(thread, self._clock.timing.store_rest_s)
        for store in self._peers.values():
            store.close()
        self._kept.close()

    # ---------------------------------------------------------------------------------- the rounds
    def _run(self) -> None:
        while not self._is_closing:
            try:
                before = self._seen()
                self._round()
                if self._seen() != before:
                    self._moved_at = self._clock.monotonic()
            except OSError as error:
                self._log.debug("a round of replication failed, the next one follows: %s", error)
            self._rest()

    def _seen(self) -> list[object]:
        members = (self._members or {}).values()
        return [self._saves, *((each.orders.name, each.orders.pulls, each.orders.replicated) for each in members)]

    def _has_news(self) -> bool:
        with contextlib.suppress(OSError):
            return frozenset(os.listdir(self._root / SAVES)) != self._saves
        return False

    def _rest(self) -> None:
        """Waits for the next round: a moment while something changes, else longer, or until this node saves."""
        clock, timing = self._clock, self._clock.timing
        count = max((len(each.group.nodes) for each in (self._members or {}).values()), default=0)
        least_s = max(timing.replica_poll_s, _REPORT_S * count)
        until = clock.monotonic() + timing.pause_s(least_s, clock.monotonic() - self._moved_at)
        while not self._is_closing and clock.monotonic() < until and not self._bell.is_set():
            clock.wait(self._bell, least_s)
            if self._has_news():
                break
        self._bell.clear()

    def _round(self) -> None:
        with contextlib.suppress(OSError):
            self._saves = frozenset(os.listdir(self._root / SAVES))
        for member in list((self._members or {}).values()):
            if member.agreement is not None:
                self._lead(member, member.agreement)
            else:
                answer = self._ask(member.group.nodes[0], f"replicas/{member.group.id}/{member.number}")
                if answer is not None:
                    with contextlib.suppress(ValueError):
                        member.orders = Orders.from_json(answer)
        self._carry_out()
        if self._pulling is None or not self._pulling.is_alive():
            self._start_pull()

    def _lead(self, member: _Membership, agreement: Agreement) -> None:
        reports = {}
        for number, node in enumerate(member.group.nodes):
            if number == member.number:
                reports[number] = self._report(member)
            elif (answer := self._ask(node, f"replicas/{member.group.id}")) is not None:
                with contextlib.suppress(ValueError):
                    reports[number] = Report.from_json(answer)
        agreement.take(reports, self._clock.monotonic())
        member.orders = agreement.orders(member.number)

    def _report(self, member: _Membership) -> Report:
        # Before the look: what was carried out then is seen.
        done, held = member.done, list[Held]()
        for stored in of_series([*self._tier.parts(), *self._kept.parts()], member.group.series):
            part, is_kept = stored.part, stored.is_replica or stored.awaited or stored.replicated
            held.append(Held(part.save_id, part.rank, part.content.parts, form_key(part), is_kept, stored.replicated))
        failed = {save_id: why for save_id, (why, _) in list(self._failed.items())}
        return Report(done, tuple(held), failed)

    def _ask(self, node: Node, key: str) -> bytes | None:
        """Returns a node's answer; None if there is none. A node that does not answer is left alone for a while."""
        now = self._clock.monotonic()
        if not node.address or self._away.get(node, now) > now:
            return None
        store = self._peers.get(node)
        if store is None:
            endpoint = Endpoint(node.address, node.port, node.token)
            store = self._peers[node] = PeerStore(endpoint, connections=1, clock=self._clock, is_patient=False)
        try:
            return store.get(key)
        except (TieredCheckpointError, OSError) as error:
            self._log.debug("no answer of %s: %s", store.url, error)
            self._away[node] = self._clock.monotonic() + self._clock.timing.replica_retry_s
            self._peers.pop(node).close()
            return None

    def _carry_out(self) -> None:
        """Marks parts by the orders of all groups."""
        members = [(each, each.orders) for each in list((self._members or {}).values())]
        awaited = {save_id for _, orders in members for save_id in orders.awaited}
        replicated = {save_id for _, orders in members for save_id in orders.replicated}
        own = self._tier.parts()
        for stored in (*own, *self._kept.parts()):
            if stored.save_id in replicated and not stored.replicated:
                self._tier.mark_replicated(stored)
        for stored in own:
            if stored.awaited != (stored.save_id in awaited):
                self._tier.mark_awaited(stored, is_awaited=not stored.awaited)
        for member, orders in members:
            member.done = orders.name
        reasons = {save_id: why for _, orders in members for save_id, why in orders.given_up.items()}
        if reasons != self._said:
            with contextlib.suppress(OSError):
                write_atomic(self._root / _GIVEN_UP, json.dumps(reasons).encode())
                self._said = reasons

    # ------------------------------------------------------------------------------------ reading
    def _start_pull(self) -> None:
        now = self._clock.monotonic()
        for member in list((self._members or {}).values()):
            for pull in member.orders.pulls:
                if self._failed.get(pull.save_id, ("", now))[1] <= now:
                    self._pulling = self._clock.start(partial(self._pull, member, pull), "tiered-pull")
                    return

    def _pull(self, member: _Membership, pull: Pull) -> None:
        """Reads one part, and commits it as a replica; notes the reason of a failure."""
        nodes = [member.group.nodes[number] for number in pull.sources]
        try:
            with contextlib.ExitStack() as opened:
                stores = [PeerStore(Endpoint(node.address, node.port, node.token), clock=self._clock) for node in nodes]
                for store in stores:
                    opened.callback(store.close)
                part = describe(stores[0], pull.save_id, pull.rank)
                if not any(tier.is_taken(part.save_id, part.rank) for tier in (self._tier, self._kept)):
                    self._keep(member, part, stores)
            self._failed.pop(pull.save_id, None)
            self._bell.set()
            for entry in part.content.files:
                # The next save's part is read into pages that are there, at twice the rate.
                self._kept.pool.prepare(entry.size, partial(self._has_work, pull))
        except Exception as error:
            why = str(error) if isinstance(error, TieredCheckpointError) else repr(error)
            self._log.warning("a replica of part %d of save %s did not come: %s", pull.rank, pull.save_id, why)
            self._failed[pull.save_id] = why, self._clock.monotonic() + self._clock.timing.replica_retry_s
        self._bell.set()

    def _has_work(self, done: Pull) -> bool:
        pulls = [pull for member in list((self._members or {}).values()) for pull in member.orders.pulls]
        return self._is_closing or any(pull != done for pull in pulls)

    def _keep(self, member: _Membership, part: Part, stores: list[PeerStore]) -> None:
        began = self._clock.monotonic()

        def progress(_: int) -> None:
            self._moved_at = self._clock.monotonic()

        destination = SlotDestination(self._kept, part, acquire=lambda size: self._slot(size, member, part))
        read_part([copies_at(part, n, stores) for n in range(len(part.content.files))], destination, progress=progress)
        amount = rate(part.content.size, self._clock.monotonic() - began)
        self._log.info("%skept a replica of rank %d's %s: %s", of_step(part.content.step), part.rank, part.name, amount)
        self._prune(member, part, spared=0)

    def _slot(self, size: int, member: _Membership, part: Part) -> Slot:
        try:
            return self._kept.acquire(size)
        except MemoryFullError:
            # Keep one replica fewer, unless that is the only one of a complete save.
            self._prune(member, part, spared=1)
            return self._kept.acquire(size)

    def _prune(self, member: _Membership, part: Part, *, spared: int) -> None:
        """Removes outdated replicas, now that there is, or is to be, a part of a newer save."""
        if part.save_id <= member.newest_before.get(form_key(part), ""):
            # An earlier run saved the part: until this run saves, ranks may be loading an older save.
            return
        ordered = {each for every in (self._members or {}).values() for each in every.orders.awaited}
        held = [stored for stored in self._kept.parts() if stored.part.place == part.place]
        for stored in outdated_replicas(held, keep=max(1, self.keep_last - spared)):
            if stored.save_id not in ordered:
                self._kept.remove(stored)
