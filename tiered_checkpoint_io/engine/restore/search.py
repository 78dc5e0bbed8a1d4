"""The search for a checkpoint to load: one loop for every payload, and one place for its errors.

Only rank 0 lists the durable tier, and chooses; the lowest rank of each node lists the node's memory for it. All ranks
then try the same candidate, and the next one if no node has it intact. An error of one rank is carried to the next
exchange and raised there on each rank, so that no rank waits for a failed one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tiered_checkpoint_io.engine.drain.status import drain_command, tier_label
from tiered_checkpoint_io.engine.durable.damage import edit_of
from tiered_checkpoint_io.engine.ranks.coordination import Group, agree, portable, raise_first
from tiered_checkpoint_io.engine.ranks.run import current_rank
from tiered_checkpoint_io.engine.restore.catalog import (
    DurableCatalog,
    NodeCatalog,
    Tiers,
    Versions,
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
from tiered_checkpoint_io.engine.restore.elsewhere import Elsewhere
from tiered_checkpoint_io.engine.restore.ending import why_nothing
from tiered_checkpoint_io.engine.restore.peers import Peers, fan_out
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RestoreError,
    StoreNotFoundError,
    TieredCheckpointError,
    is_other_format,
)
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Kind, Manifest
from tiered_checkpoint_io.stores.peer import Endpoint
from tiered_checkpoint_io.stores.retry import Question, answer_within

_S = TypeVar("_S")
_T = TypeVar("_T")
_DELETED = "%s is only in node memory, as it was deleted from %s: it is skipped; upload it again by: %s %s"

#: Errors that show that a copy is bad, rather than that reading is.
DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError, StoreNotFoundError)


@dataclass(slots=True)
class Attempt(Generic[_T]):
    """Result of one rank with a candidate.

    Attributes:
        value: Its result, verified; None if no copy was intact.
        rejected: Copies that were not taken, and why.
        error: Error that ended the attempts, other than a bad copy.
    """

    value: _T | None = None
    rejected: list[str] = field(default_factory=list)
    error: TieredCheckpointError | None = None

    @property
    def is_open(self) -> bool:
        """True if the next tier is to be tried."""
        return self.value is None and self.error is None

    def then(self, later: Attempt[_T]) -> Attempt[_T]:
        """Returns a later attempt, with the notes of this one."""
        return Attempt(later.value, self.rejected + later.rejected, later.error)


class _Turn(NamedTuple):
    """Next candidate, as rank 0 sends it to the other ranks; without one, the reason."""

    candidate: Candidate | None = None
    rejected: Sequence[str] = ()
    newest: str | None = None
    nothing: TieredCheckpointError | None = None
    error: Exception | None = None


class Search:
    """One search; its public state except the selector is the same on all ranks."""

    def __init__(self, tiers: Tiers, selector: Selector, accepts: Kind, group: Group) -> None:
        """Takes the request; for ``accepts`` see :func:`choose`."""
        self._tiers = tiers
        self.selector = selector
        self._accepts: Kind = accepts
        self.group = group
        #: Rank of this process, for its messages.
        self._rank = group.rank
        #: The node of each rank, and its request.
        self.nodes: list[str] = []
        self.asked: list[Selector] = []
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
        #: Saves under each name on the durable tier, and True if that has changed since.
        self._versions, self._has_changed = Versions(), False
        self._notes: list[str] = []

    # ------------------------------------------------------------------------------------ looking
    def look(self, rejected: Mapping[str, str] | None = None) -> None:
        """Has the lowest rank of each node list its memory; every rank calls this.

        ``rejected`` has the ids of saves that this rank can't take, and why.
        """
        request = self.group.node, self.selector, dict(rejected or {})
        gathered: list[tuple[str, Selector, dict[str, str]]] = self.group.all_gather(request)
        self.nodes, self.asked = [node for node, _, _ in gathered], [selector for _, selector, _ in gathered]
        # If one rank can't read a save, the others know no more.
        self._why = {}
        for _, _, theirs in gathered:
            self._why |= {save_id: self._why.get(save_id) or why for save_id, why in theirs.items()}
        self._tried = set(self._why)
        self.reject(f"save {save_id}: {why or 'a rank can not read it'}" for save_id, why in sorted(self._why.items()))
        mine: NodeCatalog | None = None
        try:
            mine = look(self._tiers, self._rank, self.selector.name) if self.leads else None
        except Exception as error:
            mine = NodeCatalog(error=portable(error, self._rank))
        catalogs: list[NodeCatalog | None] = self.group.gather(mine) or []
        self._memory = {node: each for node, each in zip(self.nodes, catalogs, strict=False) if each is not None}
        self._aliases = queued_aliases(self._memory.values())
        self._seen = {held.content.save_id for each in self._memory.values() for held in each.held}
        if self.selector.kind != "name":
            self._notes = [note for each in self._memory.values() for note in each.damaged]

    @property
    def leads(self) -> bool:
        """True for the lowest rank of its node, which verifies and fetches for all other ranks there."""
        return self.leader_of(self.group.node) == self.group.rank

    def leader_of(self, node: str) -> int:
        """Returns the lowest rank of a node."""
        return self.nodes.index(node)

    # ------------------------------------------------------------------------------------ trying
    def run(self, attempt: Callable[[Candidate], _T | None]) -> _T | None:
        """Tries one candidate after the other; every rank calls this, after :meth:`look`.

        Returns the result of ``attempt``, or None at the end: see :attr:`nothing`. All ranks call it with the same
        candidate; it returns None if some node has no intact copy.

        Raises:
            RestoreError: The wanted checkpoint has another payload.
            Elsewhere: The checkpoint is another dirpath's: see :func:`at_its_place`.
            StoreError: The durable tier could not be read, and memory does not suffice.
            CorruptCheckpointError: A newer release wrote a checkpoint that may be the right one.
        """
        with contextlib.closing(self._candidates()) as candidates:
            while True:
                turn: _Turn = self.group.broadcast(self._next(candidates) if self.group.rank == 0 else None)
                raise_first([turn.error])
                self.reject(turn.rejected)
                self.newest = turn.newest
                if turn.nothing is not None:
                    self.nothing = turn.nothing
                if turn.candidate is None:
                    return None
                found = attempt(turn.candidate)
                if found is not None:
                    return found

    def attempt(self, candidate: Candidate, tier: str, read: Callable[[], _T | None]) -> Attempt[_T]:
        """Reads a copy. Raises only if ranks lost each other: the others wait for any other outcome."""
        try:
            return Attempt(read())
        except DAMAGE as error:
            if is_other_format(error):
                return Attempt(error=portable(error, self._rank))
            note = f"rank {self._rank}: {tier} {candidate.name} (step {candidate.content.step}): {error}"
            self._tiers.skipped(note)
            return Attempt(rejected=[note])
        except Exception as error:
            if isinstance(error, RestoreError) and error.reason == "lost_rank":
                raise
            return Attempt(error=portable(error, self._rank))

    def share(self, mine: Attempt[_T], brief: Callable[[_T], _S]) -> list[_S | None]:
        """Returns each rank's result, by rank.

        Args:
            mine: Result of this rank.
            brief: Returns the part of its value for all others: that has to be small, as for :meth:`Group.all_gather`.

        Raises:
            TieredCheckpointError: On all ranks, the error that ended the attempts of the first rank that has one.
        """
        told = None if mine.value is None else brief(mine.value)
        attempts: list[Attempt[_S]] = self.group.all_gather(Attempt(told, mine.rejected, mine.error))
        self.reject(note for each in attempts for note in each.rejected)
        raise_first((each.error for each in attempts), mine.error)
        return [each.value for each in attempts]

    def together(self, work: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
        """Runs one step on all ranks; if one of them fails, all raise its error, and undo the step."""
        done, failed = list[_T](), None
        try:
            done.append(work())
        except Exception as error:
            failed = error
        try:
            agree(self.group, failed)
        except BaseException:
            for each in done:
                undo(each)
            raise
        return done[0]

    def peers(self, candidate: Candidate) -> Peers:
        """Has the nodes that hold parts of a candidate serve them; every rank calls this."""
        # A failure there is logged there: the others do without that node.
        node = self.group.node
        serves = node in candidate.held or node in fan_out(candidate, self.nodes).values()
        mine = self._tiers.serve() if self.leads and serves else None
        told: list[Endpoint | None] = self.group.all_gather(mine)
        endpoints = {node: each for node, each in zip(self.nodes, told, strict=True) if each is not None}
        return Peers(self._tiers, candidate, endpoints, node, self.nodes)

    def reject(self, notes: Iterable[str]) -> None:
        """Notes the reasons against copies, each once."""
        self.rejected += [note for note in dict.fromkeys(notes) if note not in self.rejected]

    # ------------------------------------------------------------------------------------ on rank 0
    def _next(self, candidates: Iterator[Candidate]) -> _Turn:
        """Returns the next turn. Never raises: the other ranks wait for the turn."""
        try:
            candidate = next(candidates, None)
            self.reject(self._notes)
            nothing = self._nothing() if candidate is None else None
        except Elsewhere as other:
            return _Turn(error=other)
        except Exception as error:
            return _Turn(error=portable(error, self._rank))
        notes, self._notes = self._notes, []
        return _Turn(candidate, notes, max(self._seen, default=None), nothing)

    def _candidates(self) -> Generator[Candidate, None, None]:
        """Yields candidates in the order to try; asks the durable tier for more only if the earlier candidates fail.

        Raises:
            TieredCheckpointError: As :meth:`run`.
        """
        nodes = self._memory.values()
        raise_first(each.error for each in nodes)
        if self.selector.kind != "name":
            # A newer release's part may be the newest of all; this release can't read it.
            raise_first(each.newer for each in nodes)
        if not self._untried(self._catalog()):
            raise_first(Elsewhere(each.elsewhere) for each in nodes if each.elsewhere is not None)
        known, is_there, listed = DurableCatalog(), self.selector.kind not in ("latest", "last"), None
        for known in self._durable():
            if known.listed is not None:
                listed = known.listed
                self._tiers.on_listed(listed)
            for note in known.rejected:
                self._tiers.skipped(note)
            self._notes += known.rejected
            self._seen |= {manifest.content.save_id for manifest in known.manifests}
            self._versions.note(known.manifests)
            catalog = self._catalog(known.manifests)
            self.selector = catalog.in_one_folder(self.selector, self._accepts, self._tiers.dirpath)
            options = self._untried(catalog)
            if known.error is not None:
                # If S3 does not answer, training must resume from memory, if all nodes can; it must not start from
                # scratch. Bad credentials count as no answer.
                is_silent = known.error.retryable or known.error.reason == "credentials"
                if not options or not is_silent:
                    raise known.error
                self._notes.append(f"durable {self._tiers.dirpath}: {known.error}")
                said = "the durable tier takes no credentials of this job; restoring from node memory: %s"
                if known.error.retryable:
                    said = "the durable tier does not answer; restoring from node memory: %s"
                self._tiers.log.warning(said, known.error)
            for candidate in options:
                is_there |= candidate.durable is not None
                if not is_there and listed is not None and self._is_deleted(candidate, listed, known.gone):
                    continue
                refuse_other_kind(candidate, self._accepts, self._tiers.dirpath, self._why)
                if candidate.durable is not None and candidate.held:
                    self._refuse_edited(known.manifests)
                told = len(self.rejected)
                (self._tried if candidate.durable is not None else self._tried_in_memory).add(candidate.save_id)
                yield candidate
                self._why[candidate.save_id] = "; ".join(self.rejected[told:]) or f"{candidate.name} is not intact"
                now = self._versions.changed(self._tiers, candidate.name) if candidate.durable is not None else None
                if now is not None:
                    self._tried -= now  # A save may have been tried before its bytes were there.
                    self._has_changed = True
                    break
        self.reject(self._notes)
        if not self.rejected and known.elsewhere is not None:
            raise Elsewhere(known.elsewhere)
        self._refuse_edited(known.manifests if self.rejected else ())
        if known.foreign is not None and not self.rejected:
            self._tiers.log.warning("%s has no manifest: it is loaded, but nothing verified it", self.selector.name)
            yield Candidate(self.selector.name, known.foreign, durable=known.foreign)

    def _refuse_edited(self, manifests: Sequence[Manifest]) -> None:
        """Raises RestoreError if the owner edited the file that is asked for by its name: memory has the one before."""
        bound, clock = float(self._tiers.config.support.durable_timeout_s), self._tiers.clock
        for each in manifests if self.selector.kind == "name" else ():
            ask = functools.partial(edit_of, self._tiers.store(), each)
            if (found := answer_within(bound, ask, clock=clock)) is not None:
                text, url = f"{each.name} was changed after it was saved", ids.join_url(self._tiers.dirpath, each.name)
                hint = (
                    "to load it as it is, copy it to another name, and load that; without it, memory's copy is loaded"
                )
                raise RestoreError(f"{text}: {found}", operation="restore", key=url, step=each.content.step, hint=hint)

    def _is_deleted(self, candidate: Candidate, listed: Collection[str], gone: Collection[str]) -> bool:
        """Returns True if the owner deleted this candidate, which is newer than all on the durable tier."""
        name, ends_with_process = candidate.name, ids.url_scheme(self._tiers.dirpath) == "memory"
        if not candidate.committed or ends_with_process or (name in listed and name not in gone):
            return False
        self._tried_in_memory.add(candidate.save_id)
        self._tiers.log.warning(_DELETED, name, self._tiers.dirpath, drain_command(self._tiers.config), name)
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
        tiers, timing = self._tiers, self._tiers.clock.timing
        where, bound = tier_label(tiers.dirpath), float(tiers.config.support.durable_timeout_s)
        known: DurableCatalog | None = None
        while known is None or known.rest:
            # The newest may all be damaged: older ones are better than none.
            ask = functools.partial(discover, tiers, self.selector, self._aliases, self._accepts, known)
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
                where, log = tier_label(self._tiers.dirpath), self._tiers.log
                log.warning("%s has not answered for %.0f s; %s in %.0f s at most", where, silent_s, what, left_s)

        return say

    def _nothing(self) -> RestoreError | CheckpointNotFoundError:
        """Returns the error of a search without a result: there is no checkpoint, or none is intact."""
        # Damage that an earlier start found must not become a start from scratch on the next one.
        suspects = [note for each in self._memory.values() for note in (*each.damaged, *each.quarantined)]
        error = why_nothing(self._tiers, self.selector, self._accepts, self.rejected, suspects, self._rank)
        if isinstance(error, CheckpointNotFoundError):
            self._versions.say_weights(self._tiers, self.selector, self._memory.values())
        return error
