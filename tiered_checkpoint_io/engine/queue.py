"""The files by which a trainer and the drain of its node talk, and the order of the work.

A committed part that is marked durable is itself the request to upload it. Aliases, deletes and
cancels are small files in ``requests/``. Operations are numbered by one counter a run, and as text
their ids sort in the order in which they were made. What became of each lies in ``status/``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.errors import InvalidNameError
from tiered_checkpoint_io.storage.memory import write_atomic

Action = Literal["save", "alias", "delete", "cancel"]
State = Literal["committed", "failed", "skipped"]
_KEEP_OUTCOMES = 256
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """One operation on the durable tier.

    Attributes:
        op_id: Its id; a save's id for a save.
        action: What to do.
        name: The checkpoint (or alias) that it is about.
        dirpath: The durable tier.
        target: An alias' target's name; the op id that a cancel is about.
    """

    op_id: str
    action: Action
    name: str
    dirpath: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an operation.

    Attributes:
        op_id: Its id.
        action: What it was.
        name: The checkpoint that it was about.
        step: The training step of a save; -1 otherwise.
        state: ``committed`` (done), ``failed`` (will be tried again) or ``skipped`` (given up).
        error: What went wrong, as text.
        error_type: The class of that error.
        bytes: Bytes of the checkpoint.
        seconds: From its start to its end.
        finished: Seconds since the epoch.
    """

    op_id: str
    action: Action
    name: str
    step: int
    state: State
    error: str = ""
    error_type: str = ""
    bytes: int = 0
    seconds: float = 0.0
    finished: float = 0.0


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """What the drain is doing.

    Attributes:
        pid: Its process; 0 where none has run.
        heartbeat: When it last said so, seconds since the epoch.
        pending: Operations that wait, the current one included.
        name: The checkpoint in work, or "".
        bytes_done: Bytes of it that are on the durable tier.
        bytes_total: Bytes of it.
        rate: Bytes a second of the current, or else of the last, upload.
        counters: Store counters (requests, bytes, retries) and ``committed``, ``failed``, ``skipped``.
        last_error: The newest failure, as text.
    """

    pid: int = 0
    heartbeat: float = 0.0
    pending: int = 0
    name: str = ""
    bytes_done: int = 0
    bytes_total: int = 0
    rate: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    last_error: str = ""


class Queue:
    """Requests, outcomes and progress below the memory tier's root."""

    def __init__(self, root: Path) -> None:
        self._requests = root / "requests"
        self._status = root / "status"

    def submit(self, request: Request) -> None:
        """Queues an alias, delete or cancel."""
        ids.validate_save_id(request.op_id)
        write_atomic(self._requests / f"{request.op_id}.json", json.dumps(asdict(request)).encode())

    def requests(self) -> list[Request]:
        """What is queued, in order. A file that is not a request is left alone."""
        found = []
        for path in sorted(self._requests.glob("[0-9]*.json")):
            request = _read(path, Request)
            if request is not None and request.op_id == path.stem:
                found.append(request)
        return found

    def finish(self, outcome: Outcome, *, final: bool = True) -> None:
        """Notes an outcome; a final one takes its request off the queue."""
        write_atomic(self._status / f"{outcome.op_id}.json", json.dumps(asdict(outcome)).encode())
        if final:
            with contextlib.suppress(FileNotFoundError):
                (self._requests / f"{outcome.op_id}.json").unlink()

    def outcome(self, op_id: str) -> Outcome | None:
        """What became of an operation; None where it is still to be done."""
        return _read(self._status / f"{ids.validate_save_id(op_id)}.json", Outcome)

    def outcomes(self) -> list[Outcome]:
        """All outcomes that are still kept, in order."""
        found = (_read(path, Outcome) for path in sorted(self._status.glob("[0-9]*.json")))
        return [outcome for outcome in found if outcome is not None]

    def prune(self) -> None:
        """Drops all but the newest outcomes."""
        for path in sorted(self._status.glob("[0-9]*.json"))[:-_KEEP_OUTCOMES]:
            path.unlink(missing_ok=True)

    def write_progress(self, progress: DrainProgress) -> None:
        write_atomic(self._status / "drain.json", json.dumps(asdict(progress)).encode())

    def progress(self) -> DrainProgress:
        """What the drain last said of itself."""
        return _read(self._status / "drain.json", DrainProgress) or DrainProgress()

    def journal(self, op_id: str) -> FileJournal:
        """Where a delete notes what is still to be removed."""
        return FileJournal(self._requests / f"{op_id}.journal")


class FileJournal:
    """A store's note of work in progress, as a small file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, object] | None:
        try:
            state = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def write(self, state: dict[str, object]) -> None:
        write_atomic(self._path, json.dumps(state).encode())

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def next_operation(operations: Sequence[Request], waiting: Collection[str]) -> Request | None:
    """What the drain does next.

    Operations go in the order in which they were made, with two exceptions: a save that waits for
    its next attempt does not hold up later saves, and a cancel goes first. A delete waits for all
    saves before it: what was good stays until what replaces it is good. An alias waits for its
    target's save.

    Args:
        operations: All that is queued, in order.
        waiting: Ids of operations that failed and whose next attempt is not due.
    """
    for operation in operations:
        if operation.action == "cancel":
            return operation
    undone: list[Request] = []
    for operation in operations:
        ready = operation.op_id not in waiting
        if operation.action == "delete":
            ready = ready and not undone
        elif operation.action == "alias":
            ready = ready and not any(save.name == operation.target for save in undone)
        if ready:
            return operation
        if operation.action == "save":
            undone.append(operation)
    return None


def superseded(operations: Sequence[Request], failed: Collection[str], committed: Request) -> list[Request]:
    """Failed saves that need not be tried again, because a later save is committed."""
    return [
        operation
        for operation in operations
        if operation.action == "save"
        and operation.op_id in failed
        and operation.op_id < committed.op_id
        and operation.dirpath == committed.dirpath
    ]


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        raw: Any = json.loads(path.read_bytes())
        made = kind(**raw)
        if isinstance(made, Request | Outcome):
            ids.validate_save_id(made.op_id)
            ids.validate_name(made.name)
    except (FileNotFoundError, ValueError, TypeError, InvalidNameError):
        # Not there, torn by a crash of the machine, or of another release: nobody waits for it.
        return None
    return made
