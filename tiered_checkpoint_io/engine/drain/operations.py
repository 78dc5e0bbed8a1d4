"""Operations on the durable tier: their kinds, their outcomes, and their order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import AtPlace, Place, Server

if TYPE_CHECKING:
    from tiered_checkpoint_io.memory.parts import StoredPart

Action = Literal["save", "part", "alias", "copy", "delete", "retain", "cancel"]
#: ``save``: the part that commits a save, which mostly is all of it; ``part``: one of another rank.
SAVES: tuple[Action, ...] = ("save", "part")
#: Actions that give the content of one name to another name: the same object, or a copy.
NAMING: tuple[Action, ...] = ("alias", "copy")
#: Actions that only remove.
TIDYING: tuple[Action, ...] = ("delete", "retain")
#: Begins the name of a request to apply retention; the rest of it is the owner of the launch that asks.
RETENTION = "retention/"
OutcomeState = Literal["committed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Request(AtPlace):
    """One operation on the durable tier; of a save, ``stored`` is the part in node memory.

    ``target`` is the target's name of an alias or a copy; the save id that a cancel ends, or that a ``retain`` or a
    delete follows (empty if a delete follows none).
    """

    op_id: str
    action: Action
    name: str
    dirpath: str
    target: str = ""
    stored: StoredPart | None = field(default=None, repr=False, compare=False)
    server: Server | None = None


#: The error type of a save whose copy in node memory is damaged.
DAMAGED_IN_MEMORY = "damaged_in_memory"


@dataclass(frozen=True, slots=True)
class Outcome(AtPlace):
    """Outcome of an operation: times in seconds, ``finished`` since the epoch.

    Attributes:
        step: The training step of a save; -1 otherwise.
        state: ``committed`` (done; of a ``part``: it is on the durable tier, its save may not be),
            ``failed`` (an error; it may be tried again) or ``skipped`` (given up on purpose).
        error_type: The reason of that error, or else its class; or ``DAMAGED_IN_MEMORY``.
        bytes: Bytes of the checkpoint; of a ``part``, its own bytes.
        seconds: From its start to its end, with the wait for parts of other nodes.
    """

    op_id: str
    action: Action
    name: str
    step: int
    state: OutcomeState
    error: str = ""
    error_type: str = ""
    bytes: int = 0
    seconds: float = 0.0
    finished: float = 0.0
    attempts: int = 1
    dirpath: str = ""
    server: Server | None = None

    @property
    def url(self) -> str:
        """URL of the checkpoint, present or planned: maybe not below the dirpath of this start."""
        return ids.join_url(self.dirpath, self.name)


def next_operation(operations: Sequence[Request], waiting: Collection[str]) -> Request | None:
    """Returns the operation that the drain does next.

    Operations go in the order in which they were made, with these exceptions. A cancel goes first.
    A save that waits for its next attempt does not hold up later saves. A delete waits for the save that it follows:
    the old checkpoint stays until its replacement is committed. An alias, or a copy, waits for the saves of its target
    and of its own name. A delete waits for the aliases and copies before it: an alias goes with its target, so "last"
    has to point elsewhere by then. Operations on one name stay in order. Retention waits only for its own save: it
    removes only checkpoints that newer ones on the tier replace.

    ``waiting`` has the ids of operations that were begun and whose next attempt is not due.
    """
    for operation in operations:
        if operation.action == "cancel" and operation.op_id not in waiting:
            return operation
    for operation, is_blocked in _in_turn(operations, waiting):
        if not is_blocked and operation.op_id not in waiting:
            return operation
    return None


def _in_turn(operations: Iterable[Request], undone: Collection[str]) -> Iterator[tuple[Request, bool]]:
    """Yields each operation, and whether an earlier operation that is ``undone``, or blocked itself, blocks it."""
    busy: set[tuple[Place, str]] = set()
    saving: set[tuple[Place, str]] = set()
    undone_saves: set[str] = set()
    naming: set[Place] = set()
    for operation in operations:
        names = {(operation.place, name) for name in (operation.name, operation.target) if name}
        is_blocked = operation.action in TIDYING and operation.target in undone_saves
        if operation.action == "delete" or operation.action in NAMING:
            # Also after a save under the alias' own name: the save would come later, and replace the newer alias.
            is_blocked |= bool(names & (busy | saving))
        is_blocked |= operation.action == "delete" and operation.place in naming
        yield operation, is_blocked
        if operation.action in SAVES and operation.op_id in undone:
            saving |= names
            undone_saves.add(ids.save_id_of_op(operation.op_id))
        elif operation.action not in (*SAVES, "retain") and (is_blocked or operation.op_id in undone):
            busy |= names
            naming |= {operation.place} if operation.action in NAMING else set()


def in_order(operations: Iterable[Request]) -> list[Request]:
    """Returns operations in the order in which they were made; of one save, the part that commits it last."""
    return sorted(operations, key=lambda each: (ids.save_id_of_op(each.op_id), each.action == "save", each.op_id))


def blocked_by_failures(operations: Iterable[Request], failed: Collection[str]) -> set[str]:
    """Returns the ids of deletes and aliases that wait for failed operations: see :func:`next_operation`."""
    return {operation.op_id for operation, is_blocked in _in_turn(operations, failed) if is_blocked}


def needed(operations: Sequence[Request]) -> set[str]:
    """Returns the ids of saves that a queued delete follows, and that are not to be deleted in turn.

    Without saves of several parts: other nodes, which do not see the delete, may have given up theirs.
    """
    deletes = [each for each in operations if each.action == "delete" and each.target]
    targets, replaced = {each.target for each in deletes}, {(each.place, each.name) for each in deletes}
    saves = ((ids.save_id_of_op(each.op_id), each) for each in operations if each.action in SAVES)
    return {
        save_id
        for save_id, each in saves
        if save_id in targets
        and (each.place, each.name) not in replaced
        and (each.stored is None or each.stored.part.content.parts == 1)
    }


def superseded(operations: Sequence[Request], failed: Collection[str], committed: Request) -> list[Request]:
    """Returns failed saves to give up, because a later one of their series is committed; none that is needed.

    A later part that has arrived does the same for parts, but not for saves.
    """
    wanted, new = needed(operations), committed.stored
    return [
        operation
        for operation in operations
        if operation.action in (SAVES if committed.action == "save" else ("part",))
        and operation.op_id in failed
        and ids.save_id_of_op(operation.op_id) not in wanted
        and ids.save_id_of_op(operation.op_id) < ids.save_id_of_op(committed.op_id)
        and operation.place == committed.place
        and (new is None or operation.stored is None or new.part.series_key == operation.stored.part.series_key)
    ]
