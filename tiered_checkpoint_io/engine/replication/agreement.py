"""Agreement on replicas, of the nodes whose ranks save together; pure.

One node, the *leader*, knows the parts that each node holds, and gives each node its orders. The leader has one save of
each form replicated at a time, the newest of which all parts are there: its parts are *awaited*, and no node removes
them. Each part goes to other machines until ``factor`` machines hold it. A save is *replicated* once that is so for all
of its parts: only then is it safe from the loss of a node, and only then may the replicated one before it go.

*Placement.* Machines form cliques, as NVRx has them: with a factor of 2, machines 0 and 1 keep each other's parts, then
2 and 3. If the number of machines does not allow cliques of equal size, the machines form a ring: each keeps copies for
as many others as any other does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

from tiered_checkpoint_io.errors import ConfigError

_T = TypeVar("_T")


class Node(NamedTuple):
    """A node's memory, the machine that it is lost with, and where its drain serves it: nowhere without an address.

    Containers on one machine may each have a memory.
    """

    machine: str
    memory: str
    address: str
    port: int
    token: str


class _Document:
    """A document that a node notes, or sends to another one."""

    def to_json(self: Any) -> bytes:
        """Returns the document that :meth:`from_json` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls: type[_T], data: bytes) -> _T:  # noqa: PYI019 - Self is newer than Python 3.10
        """Raises ValueError if the document is none."""
        rows: dict[str, Any] = {"nodes": Node, "held": Held, "pulls": Pull}
        try:
            values = json.loads(data)
            for name in [name for name, value in values.items() if isinstance(value, list)]:
                values[name] = tuple(rows[name](*each) if name in rows else each for each in values[name])
            return cls(**values)
        except (AttributeError, TypeError) as error:
            raise ValueError("not a document of nodes that replicate") from error


@dataclass(frozen=True)
class Group(_Document):
    """Nodes whose ranks save together, in the order of their first ranks; the first leads.

    ``id`` is a random name of this meeting of the ranks. ``factor`` machines hold each part. ``series`` is the folder,
    or series, of the saves of these ranks; None if that is all saves.
    """

    id: str
    factor: int
    series: str | None
    nodes: tuple[Node, ...]


class Held(NamedTuple):
    """A part, or a replica, in a node's memory: number ``rank`` of the save's parts.

    ``form`` is equal for saves of which a later one replaces an earlier one. ``is_kept`` is true if the node does not
    remove the part before the next orders, ``replicated`` if the node knows that the save is replicated.
    """

    save_id: str
    rank: int
    of: int
    form: str
    is_kept: bool
    replicated: bool


@dataclass(frozen=True)
class Report(_Document):
    """A node's answer to the leader: the orders that it has last carried out, by name, and the parts that it holds.

    ``failed`` has the reasons why parts of some saves did not come, by save.
    """

    orders: str = ""
    held: tuple[Held, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


class Pull(NamedTuple):
    """A part that a node is to read, and the nodes that hold it, by their number."""

    save_id: str
    rank: int
    sources: list[int]


@dataclass(frozen=True)
class Orders(_Document):
    """Orders of the leader to one node; their name changes whenever other saves are awaited.

    ``replicated`` has the newest replicated save of each form, ``given_up`` the reasons why saves were not replicated
    in time, by save. ``is_settled`` is true if there is nothing to do on any node.
    """

    name: str = ""
    awaited: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    pulls: tuple[Pull, ...] = ()
    given_up: Mapping[str, str] = field(default_factory=dict)
    is_settled: bool = False


#: Number of saves whose failures the nodes learn of.
_MAX_GIVEN_UP = 16


class Agreement:
    """The leader's decisions, from one round of reports to the next."""

    def __init__(self, group: Group, name: str, *, patience_s: float) -> None:
        """Decides nothing yet; ``name`` is random, a save is replicated within ``patience_s`` or given up."""
        self._group, self._name, self._patience_s = group, name, patience_s
        self._number = 0
        #: The save that is awaited of each form, the number of the orders that first named it, and their time.
        self._awaited: dict[str, tuple[str, int, float]] = {}
        self._replicated: dict[str, str] = {}
        self._given_up: dict[str, str] = {}
        self._pulls: dict[int, list[Pull]] = {}
        self._is_settled = False

    def orders(self, node: int) -> Orders:
        """Returns the orders to a node, by its number."""
        awaited = tuple(save_id for save_id, *_ in self._awaited.values())
        replicated, pulls = tuple(self._replicated.values()), tuple(self._pulls.get(node, ()))
        name = f"{self._name}-{self._number}"
        return Orders(name, awaited, replicated, pulls, dict(self._given_up), self._is_settled)

    def take(self, reports: Mapping[int, Report], now: float) -> None:
        """Decides by the reports of the nodes that have answered, by their numbers."""
        for form in sorted({held.form for report in reports.values() for held in report.held}):
            self._decide(form, reports, now)
        if len(reports) == len(self._group.nodes):
            # A node that does not answer may hold what others seem to lack.
            wanted = [*(save_id for save_id, *_ in self._awaited.values()), *self._replicated.values()]
            self._pulls = pulls(self._group, reports, wanted)
            self._is_settled = not self._awaited and not self._pulls

    def _decide(self, form: str, reports: Mapping[int, Report], now: float) -> None:
        of_form = {node: [each for each in report.held if each.form == form] for node, report in reports.items()}
        every = [held for theirs in of_form.values() for held in theirs]
        known = [held.save_id for held in every if held.replicated]
        safe = max([*known, self._replicated.get(form, "")])
        awaited, number, since = self._awaited.get(form, ("", 0, now))
        if awaited > safe and self._is_safe(awaited, number, of_form, reports):
            safe = awaited
        if safe:
            self._replicated[form] = safe
        whole = whole_saves(every)
        newest = max(whole, default="")
        if awaited <= safe:
            awaited = ""
        elif failure := self._failure(awaited, awaited in whole, now - since, reports):
            self._given_up = dict([*{awaited: failure, **self._given_up}.items()][:_MAX_GIVEN_UP])
            awaited = awaited if newest == awaited else ""
        if not awaited and newest > safe:
            awaited, number, since = newest, self._number + 1, now
        self._await(form, awaited, number, since)

    def _await(self, form: str, awaited: str, number: int, since: float) -> None:
        before = self._awaited.pop(form, ("", 0, 0.0))[0]
        if awaited:
            self._awaited[form] = awaited, number, since
        if awaited != before:
            self._number += 1

    def _is_safe(
        self, save_id: str, number: int, of_form: Mapping[int, Sequence[Held]], reports: Mapping[int, Report]
    ) -> bool:
        """Returns True if enough machines hold each part of a save, and will not remove it."""
        copies: dict[int, set[str]] = {}
        of = 0
        for node, theirs in of_form.items():
            name, _, done = reports[node].orders.rpartition("-")
            if name != self._name or int(done) < number:
                # The node may not know yet that it is to keep the part.
                continue
            for held in theirs:
                if held.save_id == save_id and held.is_kept:
                    of = held.of
                    copies.setdefault(held.rank, set()).add(self._group.nodes[node].machine)
        return bool(of) and sum(len(there) >= self._group.factor for there in copies.values()) == of

    def _failure(self, awaited: str, is_whole: bool, waited_s: float, reports: Mapping[int, Report]) -> str:
        """Returns the reason why a save is given up; empty if it is not."""
        said = [report.failed[awaited] for report in reports.values() if awaited in report.failed]
        if said:
            return said[0]
        missing = [node.machine for number, node in enumerate(self._group.nodes) if number not in reports]
        if not is_whole and not missing:
            return "a part of it is gone"
        if waited_s <= self._patience_s:
            return ""
        where = f": {', '.join(missing)} did not answer" if missing else ""
        return f"it did not get to its peers within {waited_s:.0f} s{where}"


def whole_saves(held: Iterable[Held]) -> set[str]:
    """Returns the saves of which all parts are there."""
    ranks: dict[tuple[str, int], set[int]] = {}
    for each in held:
        ranks.setdefault((each.save_id, each.of), set()).add(each.rank)
    return {save_id for (save_id, of), found in ranks.items() if len(found) == of}


def pulls(group: Group, reports: Mapping[int, Report], wanted: Sequence[str]) -> dict[int, list[Pull]]:
    """Returns the parts that each node is to read, so that ``factor`` machines hold each part of the wanted saves."""
    holders: dict[tuple[str, int], list[int]] = {}
    for number, report in sorted(reports.items()):
        for held in report.held:
            if held.save_id in wanted:
                holders.setdefault((held.save_id, held.rank), []).append(number)
    machines = list(dict.fromkeys(node.machine for node in group.nodes))
    # With fewer machines than copies, all hold all.
    peers = node_peers(len(machines), factor=min(group.factor, len(machines)))
    planned: dict[int, list[Pull]] = {}
    for (save_id, rank), sources in sorted(holders.items(), key=lambda each: (wanted.index(each[0][0]), each[0][1])):
        there = {group.nodes[number].machine for number in sources}
        # Copies of a part whose own node is lost are made from the first that has one.
        home = machines.index(group.nodes[sources[0]].machine)
        lacking = [machines[peer] for peer in peers[home] if machines[peer] not in there]
        for machine in lacking[: max(0, group.factor - len(there))]:
            able = [number for number, node in enumerate(group.nodes) if node.machine == machine]
            target = able[rank % len(able)]
            planned.setdefault(target, []).append(Pull(save_id, rank, sources))
    return planned


def check_machines(nodes: Sequence[Node], factor: int) -> None:
    """Raises ConfigError if there are fewer machines than copies, so that two copies would be on the same one."""
    count = len({node.machine for node in nodes})
    if count < factor:
        raise ConfigError(
            f"replication_factor is {factor}, but the ranks are on {count} machine(s): copies on the same machine would"
            " be lost with it",
            operation="replicate",
            hint=f"use {factor} machines or more (containers on one count as one), or lower replication_factor",
        )


def node_peers(count: int, *, factor: int) -> list[tuple[int, ...]]:
    """Returns the machines that keep copies for each of ``count`` machines; each keeps ``factor - 1``."""
    if count % factor == 0:
        # Each begins with the next of its clique, so that no member is the first choice of all others.
        return [tuple(node - node % factor + (node + k) % factor for k in range(1, factor)) for node in range(count)]
    # The same distances from every node make the load even.
    return [tuple((node + k) % count for k in range(1, factor)) for node in range(count)]
