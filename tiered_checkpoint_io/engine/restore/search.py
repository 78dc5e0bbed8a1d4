"""The search for a checkpoint to load: one loop for every payload, and one place for its errors.

Only rank 0 lists the durable tier, and chooses; one rank of each node lists the node's memory for it. All ranks then
try the same candidate, and the next one if no node has it intact. Of a load's four exchanges, the search makes three:
the ranks report to rank 0, rank 0 sends the candidate, and all say if they have it. A damaged candidate repeats the
last two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tiered_checkpoint_io.engine.drain.status import drain_command, tier_label
from tiered_checkpoint_io.engine.durable.damage import edit_of
from tiered_checkpoint_io.engine.durable.manifests import contents_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, node_of, raise_first
from tiered_checkpoint_io.engine.ranks.run import current_rank
from tiered_checkpoint_io.engine.restore.catalog import (
    DurableCatalog,
    NodeCatalog,
    Tiers,
    discover,
    look,
    queued_aliases,
)
from tiered_checkpoint_io.engine.restore.choice import (
    Candidate,
    Catalog,
    Selector,
    choose,
    refuse_other_kind,
)
from tiered_checkpoint_io.engine.restore.peers import Peers
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RestoreError,
    StoreError,
    StoreNotFoundError,
    TieredCheckpointError,
    is_other_format,
)
from tiered_checkpoint_io.logs import names_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Kind, Manifest
from tiered_checkpoint_io.stores.peer import Endpoint
from tiered_checkpoint_io.stores.retry import Question, answer_within

_T = TypeVar("_T")
#: Opens a rank's tiers, and returns them and its request.
Ready = Callable[[], tuple[Tiers, Selector]]
#: Changes of a checkpoint while it is read, before others are taken: a live run may overwrite one faster than that.
_MOST_CHANGES = 8
_DELETED = "%s is only in node memory, as it was deleted from %s: it is skipped; upload it again by: %s %s"

#: Errors that show that a copy is bad, rather than that reading is.
DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError, StoreNotFoundError)


@dataclass(slots=True)
class Attempt(Generic[_T]):
    """Verified result of one rank with a candidate, None if no copy was intact; and the copies that were not taken."""

    value: _T | None = None
    rejected: list[str] = field(default_factory=list)


class _Report(NamedTuple):
    """Report of one rank to rank 0; one rank of each node lists its memory, and has it served."""

    node: str
    asked: Selector
    rejected: Mapping[str, str]
    memory: NodeCatalog | None
    endpoint: Endpoint | None


class _Turn(NamedTuple):
    """Next candidate, as rank 0 sends it to the other ranks, with rank 0's own work; without one, the reason."""

    nodes: list[str]
    endpoints: dict[str, Endpoint]
    candidate: Candidate | None = None
    prepared: Any = None
    rejected: Sequence[str] = ()
    newest: str | None = None
    nothing: TieredCheckpointError | None = None
    elsewhere: ids.Split | None = None


class Search:
    """One search; its public state except the selector is the same on all ranks."""

    #: This node's tiers, this rank's request, and the time when it was ready.
    tiers: Tiers
    selector: Selector
    began: float

    def __init__(
        self, accepts: Kind, group: Group, prepare: Callable[[Candidate], Attempt[Any]] = lambda _: Attempt(True)
    ) -> None:
        """Takes the payload that is wanted, see :func:`choose`, and the ranks.

        ``prepare`` is called on rank 0 with each candidate; its result goes to all ranks, if it is intact.
        """
        self._accepts: Kind = accepts
        self.group = group
        self._prepare = prepare
        #: Rank of this process, for its messages.
        self._rank = group.rank
        self.node = ""
        #: The node of each rank, and the endpoints that serve the nodes' memory.
        self.nodes: list[str] = []
        self.endpoints: dict[str, Endpoint] = {}
        #: Result of ``prepare`` for the present candidate.
        self.prepared: Any = None
        #: Copies that were tried, or could not be read, and why they were not taken.
        self.rejected: list[str] = []
        #: The newest save that was seen in any tier; later runs count on from there.
        self.newest: str | None = None
        #: Error at the end: there is no checkpoint, or none is intact.
        self.nothing: TieredCheckpointError = RestoreError("the search is not over", operation="restore")
        #: On rank 0: contents of each node's memory, saves that were seen, and damage that the others are to note.
        self._memory: dict[str, NodeCatalog] = {}
        self._aliases: dict[str, str] = {}
        self._seen: set[str] = set()
        self._tried: set[str] = set()
        self._why: dict[str, str] = {}
        #: Saves that were tried while no manifest of theirs was known: the durable tier may have them intact.
        self._tried_in_memory: set[str] = set()
        #: Manifests that were read last, by name; and True if one of them has changed since.
        self._read: dict[str, Manifest] = {}
        self._has_changed, self._changes_left = False, _MOST_CHANGES
        self._elsewhere: ids.Split | None = None
        self._notes: list[str] = []

    # ------------------------------------------------------------------------------------ trying
    def run(
        self,
        ready: Ready,
        attempt: Callable[[Candidate], _T | None],
        rejected: Mapping[str, str] | None = None,
    ) -> _T | None:
        """Tries one candidate after the other, at another dirpath if a run there owns it; every rank calls this.

        Returns the result of ``attempt``; None at the end, see :attr:`nothing`. All ranks call it with the same
        candidate; it returns None on all if some node has no intact copy. ``rejected`` has the ids of saves that this
        rank can't take, and the reasons.

        Raises:
            ConfigError: Some rank did not come.
            RestoreError: The wanted checkpoint has another payload; or the ranks want different local checkpoints.
            StoreError: The durable tier could not be read, and memory does not suffice.
            CorruptCheckpointError: A newer release wrote a checkpoint that may be the right one.
            TieredCheckpointError: Any other error of some rank.
        """
        failed: Exception | None = None
        try:
            self.tiers, self.selector = ready()
            self.node, self.began = node_of(self.tiers.memory.root), self.tiers.clock.monotonic()
        except Exception as error:
            # The other ranks wait for this one: it reports the error.
            failed = error
        self.group.arrive(self.node)
        with contextlib.closing(self._candidates()) as candidates:
            turn = self.group.decide(lambda: self._report(failed, rejected or {}), partial(self._first, candidates))
            while True:
                self.nodes, self.endpoints, self.newest = turn.nodes, turn.endpoints, turn.newest
                self.reject(turn.rejected)
                if turn.elsewhere is not None:
                    dirpath, name = turn.elsewhere
                    there = self.tiers.at(dirpath), replace(self.selector, name=name)
                    return self.run(lambda: there, attempt, rejected)  # noqa: B023 - it is called at once
                if turn.candidate is None:
                    self.nothing = turn.nothing or self.nothing
                    return None
                self.prepared = turn.prepared
                found = attempt(turn.candidate)
                if found is not None:
                    return found
                turn = self.group.broadcast(lambda: self._next(candidates))

    def _report(self, failed: Exception | None, rejected: Mapping[str, str]) -> _Report:
        raise_first([failed])
        memory = look(self.tiers, self._rank, self.selector.name) if self.group.is_first_here else None
        # A node that reads a full checkpoint passes it on. A failure is logged there: the others do without that node.
        serves = self.group.has_other_nodes and memory is not None and (memory.held or self._accepts == "full")
        return _Report(self.node, self.selector, rejected, memory, self.tiers.serve() if serves else None)

    @property
    def leads(self) -> bool:
        """True for the lowest rank of its node, which verifies and fetches for all other ranks there."""
        return self.leader_of(self.node) == self.group.rank

    def leader_of(self, node: str) -> int:
        """Returns the lowest rank of a node."""
        return self.nodes.index(node)

    def attempt(self, candidate: Candidate, tier: str, read: Callable[[], _T | None]) -> Attempt[_T]:
        """Reads a copy; raises any error except damage."""
        try:
            return Attempt(read())
        except DAMAGE as error:
            if is_other_format(error):
                raise
            note = f"rank {self._rank}: {tier} {candidate.name} (step {candidate.content.step}): {error}"
            self.tiers.skipped(note)
            return Attempt(rejected=[note])

    def share(self, work: Callable[[], Attempt[_T]]) -> list[_T | None]:
        """Returns each rank's result of an attempt, by rank; see :meth:`Group.all_gather`."""
        attempts = self.group.all_gather(work)
        self.reject(note for each in attempts for note in each.rejected)
        return [each.value for each in attempts]

    def peers(self, candidate: Candidate) -> Peers:
        """Returns the other nodes that hold parts of a candidate, as this rank reads them."""
        return Peers(self.tiers, candidate, self.endpoints, self.node, self.nodes)

    def reject(self, notes: Iterable[str]) -> None:
        """Notes the reasons against copies, each once."""
        self.rejected += [note for note in dict.fromkeys(notes) if note not in self.rejected]

    # ------------------------------------------------------------------------------------ on rank 0
    def _first(self, candidates: Iterator[Candidate], reports: list[_Report]) -> _Turn:
        """Returns the first turn, from the reports of all ranks."""
        if self._accepts == "local" and len(asked := {each.asked for each in reports}) > 1:
            raise RestoreError(
                f"the ranks ask for different checkpoints: {sorted(each.name + each.terms for each in asked)}",
                operation="load",
                key=self.tiers.dirpath,
                hint="ranks that load different ones need a process_group each",
            )
        self.nodes = [each.node for each in reports]
        self.endpoints = {each.node: each.endpoint for each in reports if each.endpoint is not None}
        # If one rank can't read a save, the others know no more.
        for each in reports:
            self._why |= {save_id: self._why.get(save_id) or why for save_id, why in each.rejected.items()}
        self._tried = set(self._why)
        self.reject(f"save {save_id}: {why or 'a rank can not read it'}" for save_id, why in sorted(self._why.items()))
        self._memory = {each.node: each.memory for each in reports if each.memory is not None}
        self._aliases = queued_aliases(self._memory.values())
        self._seen = {held.content.save_id for each in self._memory.values() for held in each.held}
        if self.selector.kind != "name":
            self._notes = [note for each in self._memory.values() for note in each.damaged]
        return self._next(candidates)

    def _next(self, candidates: Iterator[Candidate]) -> _Turn:
        """Returns the next turn."""
        turn = _Turn(self.nodes, self.endpoints)
        for candidate in candidates:
            mine = self._prepare(candidate)
            self.reject([*self._notes, *mine.rejected])
            if mine.value is not None:
                turn = turn._replace(candidate=candidate, prepared=mine.value)
                break
        else:
            self.reject(self._notes)
            elsewhere = self._elsewhere
            turn = turn._replace(elsewhere=elsewhere) if elsewhere else turn._replace(nothing=self._nothing())
        self._notes = []
        return turn._replace(rejected=self.rejected, newest=max(self._seen, default=None))

    def _candidates(self) -> Generator[Candidate, None, None]:
        """Yields candidates in the order to try; asks the durable tier for more only if the earlier candidates fail."""
        nodes, self._elsewhere = self._memory.values(), None
        if self.selector.kind != "name":
            # A newer release's part may be the newest of all; this release can't read it.
            raise_first(each.newer for each in nodes)
        if not self._untried(self._catalog()):
            self._elsewhere = next((each.elsewhere for each in nodes if each.elsewhere is not None), None)
            if self._elsewhere is not None:
                return
        known, is_there, listed = DurableCatalog(), self.selector.kind == "name", None
        for known in self._durable():
            if known.listed is not None:
                listed = known.listed
                self.tiers.on_listed(listed)
            for note in known.rejected:
                self.tiers.skipped(note)
            self._notes += known.rejected
            self._seen |= {manifest.content.save_id for manifest in known.manifests}
            self._read |= {manifest.name: manifest for manifest in known.manifests}
            catalog = self._catalog(known.manifests)
            self.selector = catalog.in_one_folder(self.selector, self._accepts, self.tiers.dirpath)
            options = self._untried(catalog)
            if known.error is not None:
                # If S3 does not answer, training must resume from memory, if all nodes can; it must not start from
                # scratch. Bad credentials count as no answer.
                is_silent = known.error.retryable or known.error.reason == "credentials"
                if not options or not is_silent:
                    raise known.error
                self._notes.append(f"durable {self.tiers.dirpath}: {known.error}")
                said = "the durable tier takes no credentials of this job; restoring from node memory: %s"
                if known.error.retryable:
                    said = "the durable tier does not answer; restoring from node memory: %s"
                self.tiers.log.warning(said, known.error)
            for candidate in options:
                is_there |= candidate.durable is not None
                if not is_there and listed is not None and self._is_deleted(candidate, listed, known.gone):
                    continue
                refuse_other_kind(candidate, self._accepts, self.tiers.dirpath, self._why)
                if candidate.durable is not None and candidate.held:
                    self._refuse_edited(known.manifests)
                already = len(self.rejected)
                (self._tried if candidate.durable is not None else self._tried_in_memory).add(candidate.save_id)
                yield candidate
                self._why[candidate.save_id] = "; ".join(self.rejected[already:]) or f"{candidate.name} is not intact"
                if candidate.durable is not None and self._looks_changed(candidate.name):
                    break
        self.reject(self._notes)
        if not self.rejected and known.elsewhere is not None:
            self._elsewhere = known.elsewhere
            return
        self._refuse_edited(known.manifests if self.rejected else ())
        if known.foreign is not None and not self.rejected:
            self.tiers.log.warning("%s has no manifest: it is loaded, but nothing verified it", self.selector.name)
            yield Candidate(self.selector.name, known.foreign, durable=known.foreign)

    def _refuse_edited(self, manifests: Sequence[Manifest]) -> None:
        """Raises RestoreError if the owner edited the file that is asked for by its name: memory has the one before."""
        bound, clock = float(self.tiers.config.support.durable_timeout_s), self.tiers.clock
        for each in manifests if self.selector.kind == "name" else ():
            ask = partial(edit_of, self.tiers.store(), each)
            if (found := answer_within(bound, ask, clock=clock)) is not None:
                text, url = f"{each.name} was changed after it was saved", ids.join_url(self.tiers.dirpath, each.name)
                hint = (
                    "to load it as it is, copy it to another name, and load that; without it, memory's copy is loaded"
                )
                raise RestoreError(f"{text}: {found}", operation="restore", key=url, step=each.content.step, hint=hint)

    def _looks_changed(self, name: str) -> bool:
        """Returns True if the durable tier now has other saves under a name that could not be read.

        The content may have been overwritten or removed: the drain of the run before may still be at work, and have
        committed its next checkpoint.
        """
        if not self._changes_left:
            return False
        ask = partial(discover, self.tiers, Selector("name", name), {})
        try:
            there = answer_within(float(self.tiers.config.support.durable_timeout_s), ask, clock=self.tiers.clock)
        except StoreError as error:
            if error.reason != "unavailable":
                raise
            return False
        before, now = self._read.get(name), {each.save_id for each in contents_of(there.manifests)}
        is_same = before is None or now == {each.save_id for each in contents_of([before])}
        if there.error is not None or there.rejected or is_same:
            return False
        del self._read[name]
        # A save may have been tried before its bytes were there.
        self._tried -= now
        self._has_changed, self._changes_left = True, self._changes_left - 1
        self.tiers.log.warning("%s was removed or overwritten while it was read: asking the durable tier again", name)
        return True

    def _is_deleted(self, candidate: Candidate, listed: Collection[str], gone: Collection[str]) -> bool:
        """Returns True if the owner deleted this candidate, which is newer than all on the durable tier."""
        name, ends_with_process = candidate.name, ids.url_scheme(self.tiers.dirpath) == "memory"
        if not candidate.committed or ends_with_process or (name in listed and name not in gone):
            return False
        self._tried_in_memory.add(candidate.save_id)
        self.tiers.log.warning(_DELETED, name, self.tiers.dirpath, drain_command(self.tiers.config), name)
        return True

    def _catalog(self, manifests: Sequence[Manifest] = ()) -> Catalog:
        """Returns the catalog of memory and these manifests."""
        return Catalog({node: each.held for node, each in self._memory.items()}, manifests, self._aliases)

    def _untried(self, catalog: Catalog) -> list[Candidate]:
        """Returns the wanted candidates that were not tried yet, in the order to try."""
        options = choose(catalog, self.selector, self._accepts)
        in_vain = self._tried | self._tried_in_memory
        return [each for each in options if each.save_id not in (self._tried if each.durable is not None else in_vain)]

    def _durable(self) -> Iterator[DurableCatalog]:
        """Yields the durable tier's contents, and older checkpoints while the search continues.

        If memory has a candidate, a tier that is silent for ``durable_timeout_s`` first yields an error. Its answer
        follows after memory's candidates. If the tier has changed since, it is asked again.
        """
        tiers, timing = self.tiers, self.tiers.clock.timing
        where, bound = tier_label(tiers.dirpath), float(tiers.config.support.durable_timeout_s)
        known: DurableCatalog | None = None
        while known is None or known.rest:
            # The newest may all be damaged: older ones are better than none.
            ask = partial(discover, tiers, self.selector, self._aliases, self._accepts, known)
            with contextlib.closing(Question(ask, clock=tiers.clock)) as question:
                here = self._untried(self._catalog())
                if here and not question.within(bound, self._said("resuming from node memory")):
                    yield DurableCatalog(error=question.silence(where, bound))
                # A store's own error says more; a missing folder of a file server never gives one.
                has_moved = any(each.is_of_other_server for each in self._memory.values())
                longer = bound if has_moved else timing.retry_deadline_s + 2 * timing.s3_read_s
                ends = question.within(longer, self._said("node memory has no checkpoint that serves; giving up"))
                known = question.result() if ends else DurableCatalog(error=question.silence(where, longer))
            yield known
            if self._has_changed:
                known, self._has_changed = None, False

    def _said(self, what: str) -> Callable[[float, float], None]:
        """Logs on rank 0 that the durable tier does not answer, and the consequence."""

        def say(silent_s: float, left_s: float) -> None:
            if current_rank() == 0:
                where, log = tier_label(self.tiers.dirpath), self.tiers.log
                log.warning("%s has not answered for %.0f s; %s in %.0f s at most", where, silent_s, what, left_s)

        return say

    def _nothing(self) -> RestoreError | CheckpointNotFoundError:
        """Returns the error of a search without a result: there is no checkpoint, or none is intact."""
        tiers, selector = self.tiers, self.selector
        what = "checkpoint" if self._accepts == "full" else f"{self._accepts} checkpoint"
        key, by_name = tiers.dirpath, selector.kind == "name"
        if by_name:
            what, key = f"{what} {selector.name!r}", ids.join_url(key, selector.name)
        what += selector.terms
        where: dict[str, Any] = {"operation": "restore", "key": key, "rank": self._rank, "step": selector.step}
        # Damage that an earlier start found must not become a start from scratch on the next one.
        suspects = [note for each in self._memory.values() for note in (*each.damaged, *each.quarantined)]
        damage = list(dict.fromkeys([*self.rejected, *suspects]))
        if self.rejected or (damage and not by_name):
            again = f"a node that has it in memory uploads it again by `tiered-ckpt flush {selector.name}`; "
            hint = f"corrupt parts of memory lie in {tiers.memory.root}/quarantine; to start from scratch, remove what"
            hint = f"{again if by_name else ''}{hint} is damaged"
            return RestoreError(f"no {what} is intact: " + "; ".join(damage), hint=hint, **where)
        # The caller may expect to resume from weights alone.
        weights = {each.name for each in self._read.values() if not each.content.resumable}
        weights |= {each.name for node in self._memory.values() for each in node.held if not each.content.resumable}
        if weights and selector.kind == "latest":
            text = "%s has weights alone, which training can't resume from: %s"
            tiers.log.warning(text, tiers.dirpath, names_text(sorted(weights)))
        hint = "see `tiered-ckpt ls` for those that exist"
        if by_name and (selector.name in ("latest", "last") or selector.name.startswith(f"{ids.SENTINELS}:")):
            hint = f"allowed: {ids.LOADABLE}"
        maybe = f" (it may have been: {'; '.join(damage)})" if damage else ""
        return CheckpointNotFoundError(f"no {what} in memory or at {tiers.dirpath}{maybe}", hint=hint, **where)
