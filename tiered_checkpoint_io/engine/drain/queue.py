"""The files by which a trainer and the drain of its node talk.

A committed part that is marked durable is itself the request to upload it. Aliases, deletes and
cancels are small files in ``requests/``. Operations are numbered by one counter a run, and as text
their ids sort in the order in which they were made. What became of each lies in ``status/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tiered_checkpoint_io.engine.drain.operations import Outcome, Request, unreplaced
from tiered_checkpoint_io.errors import InvalidNameError, MemoryFullError
from tiered_checkpoint_io.memory.private import write_atomic, write_over
from tiered_checkpoint_io.memory.spares import Spares
from tiered_checkpoint_io.model import ids

_ACTIONS = ("alias", "delete", "cancel")
_KEEP_OUTCOMES = 256
#: More than may be on their way at once, mostly; who waits has looked at older ones by then.
_KEEP_WHEN_FULL = 16
#: Characters of an error for which a spare file has room.
_SHORT = 400
#: Writing one takes milliseconds.
_HALF_WRITTEN_S = 60.0
_T = TypeVar("_T")


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
        untold: Operations that have ended, and for whose outcome there was no space.
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
    untold: list[str] = field(default_factory=list)


class Queue:
    """Requests, outcomes and progress below the memory tier's root."""

    def __init__(self, root: Path) -> None:
        self._requests = root / "requests"
        self._status = root / "status"
        self._known: dict[str, tuple[int, Outcome]] = {}
        #: For what must be written although the file system is full.
        self.spares = Spares(root)

    def submit(self, request: Request) -> None:
        """Queues an alias, delete or cancel.

        Raises:
            MemoryFullError: There is no space for it, not even in a spare file.
        """
        ids.validate_save_id(request.op_id)
        self.spares.write(self._requests / f"{request.op_id}.json", json.dumps(asdict(request)).encode())

    def requests(self) -> list[Request]:
        """What is queued, in order."""
        return [request for path in self._request_files() if (request := _request(path)) is not None]

    def unreadable(self) -> list[str]:
        """Ids of requests that this release can't understand: torn, or of another release."""
        return [path.stem for path in self._request_files() if _request(path) is None and path.exists()]

    def _request_files(self) -> list[Path]:
        return [path for path in sorted(self._requests.glob("[0-9]*.json")) if _is_id(path.stem)]

    def finish(self, outcome: Outcome, *, final: bool = True) -> None:
        """Notes an outcome; a final one takes its request off the queue.

        Raises:
            MemoryFullError: There is no space for it, although older outcomes were given up.
        """
        path, request = self._status / f"{outcome.op_id}.json", self._requests / f"{outcome.op_id}.json"
        try:
            self.spares.write(path, json.dumps(asdict(outcome)).encode())
        except MemoryFullError:
            self._give_room()
            if final:
                # Done is done: what the request took is room for what became of it.
                request.unlink(missing_ok=True)
            self.spares.fill()
            short = replace(outcome, error=outcome.error[:_SHORT])
            self.spares.write(path, json.dumps(asdict(short)).encode())
        if final:
            request.unlink(missing_ok=True)

    def note_past(self, save_id: str, name: str, step: int, size: int, dirpath: str) -> None:
        """Notes, where deletes may wait for one, that a save got to the durable tier past the queue.

        Raises:
            MemoryFullError: There is no space for the note.
        """
        if not unreplaced(self.outcomes()):
            # Memory is short of space, and this would take some for nobody.
            return
        now = time.time()
        self.finish(Outcome(save_id, "save", name, step, "committed", bytes=size, finished=now, dirpath=dirpath))
        self.prune()

    def outcome(self, op_id: str) -> Outcome | None:
        """What became of an operation; None where it is still to be done."""
        return _read(self._status / f"{ids.validate_op_id(op_id)}.json", Outcome)

    def outcomes(self) -> list[Outcome]:
        """All outcomes that are still kept, in order. Reads what changed since the last call."""
        known: dict[str, tuple[int, Outcome]] = {}
        with os.scandir(self._status) as entries:
            for entry in entries:
                if not entry.name[0].isdigit() or not entry.name.endswith(".json"):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    # Every write is a new file: its number tells what its time may not.
                    facts = entry.stat(follow_symlinks=False)
                    stamp = hash((facts.st_ino, facts.st_mtime_ns))
                    last = self._known.get(entry.name)
                    outcome = last[1] if last and last[0] == stamp else _read(Path(entry.path), Outcome)
                    if outcome is not None:
                        known[entry.name] = (stamp, outcome)
        self._known = known
        return [known[name][1] for name in sorted(known)]

    def _give_room(self) -> None:
        """Drops the outcomes that tell least: what is committed is there to be seen."""
        for outcome in self.outcomes()[:-_KEEP_WHEN_FULL]:
            if outcome.state == "committed":
                (self._status / f"{outcome.op_id}.json").unlink(missing_ok=True)

    def prune(self) -> None:
        """Drops all but the newest outcomes, those of one save together, and files left half written by the dead."""
        outcomes = sorted(self._status.glob("[0-9]*.json"))
        kept = set(sorted({ids.save_id_of_op(path.stem) for path in outcomes})[-_KEEP_OUTCOMES:])
        for path in outcomes:
            if ids.save_id_of_op(path.stem) not in kept:
                path.unlink(missing_ok=True)
        for path in (*self._status.glob(".*"), *self._requests.glob(".*")):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _HALF_WRITTEN_S:
                    path.unlink()

    def write_progress(self, progress: DrainProgress) -> None:
        """Says what the drain is doing; where there is no space, over what it said before."""
        path, data = self._status / "drain.json", json.dumps(asdict(progress)).encode()
        try:
            write_atomic(path, data)
        except MemoryFullError:
            # Not from a spare file: several times a second, that would leave none.
            write_over(path, data)

    def begin_progress(self) -> None:
        """Makes the file in which a drain says what it does; what it has to say later has space there.

        Raises:
            MemoryFullError: There is none for it now.
        """
        path = self._status / "drain.json"
        if not path.exists():
            self.spares.write(path, json.dumps(asdict(DrainProgress())).encode())

    def progress(self) -> DrainProgress:
        """What the drain last said of itself."""
        return _read(self._status / "drain.json", DrainProgress) or DrainProgress()

    def journal(self, op_id: str) -> FileJournal:
        """Where a delete notes what is still to be removed."""
        return FileJournal(self._requests / f"{op_id}.journal", self.spares)


class FileJournal:
    """A store's note of work in progress, as a small file; in memory alone where there is no space for it.

    Without a file, what a later process does not find is done again, or left for it to clear up; the work goes on.
    """

    def __init__(self, path: Path, spares: Spares) -> None:
        self._path = path
        self._spares = spares
        self._unwritten: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        if self._unwritten is not None:
            return dict(self._unwritten)
        try:
            state = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return state if isinstance(state, dict) else None

    def write(self, state: dict[str, object]) -> None:
        try:
            self._spares.write(self._path, json.dumps(state).encode())
            self._unwritten = None
        except MemoryFullError:
            self._unwritten = dict(state)

    def clear(self) -> None:
        self._unwritten = None
        self._path.unlink(missing_ok=True)


def _request(path: Path) -> Request | None:
    request = _read(path, Request)
    return request if request is not None and request.op_id == path.stem and request.action in _ACTIONS else None


def _is_id(text: str) -> bool:
    try:
        ids.validate_save_id(text)
    except InvalidNameError:
        return False
    return True


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        raw: Any = json.loads(path.read_bytes())
        made = kind(**raw)
        if isinstance(made, Request | Outcome):
            ids.validate_op_id(made.op_id)
            ids.validate_name(made.name)
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        # Not there, torn by a crash of the machine, or of another release: nobody waits for it.
        return None
    return made
