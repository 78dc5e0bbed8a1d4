"""Exchange between trainers and the drain of a node, over the operation log.

A committed part that is marked durable is itself the request to upload it. Aliases, deletes and cancels are entries
of the log. Operations are numbered by one counter a run, and as text their ids sort in the order in which they were
made. Outcomes are entries, too, and so are the notes of work in progress.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.log import OperationLog
from tiered_checkpoint_io.engine.drain.operations import Action, Outcome, Request, in_order
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import server_in

LOG_FILE = "operations.log"
_REQUEST, _OUTCOME, _NOTE = "request/", "outcome/", "note/"
_DRAIN, _LEAVE = "drain", "leave"
#: Number of outcomes kept, of the newest saves: a third of the log at most. And the number if the log is full.
_KEEP, _LEAST = 512, 32
#: Characters of an error that are kept.
_SHORT = 1000
#: Most bytes of a note that is kept in the log.
_NOTE_SIZE = 1 << 18
_T = TypeVar("_T", Request, Outcome)


@dataclass(slots=True)
class DrainProgress:
    """Present work of the drain with process ``pid``; 0 if none has run.

    Attributes:
        heartbeat: Time of its last report, seconds since the epoch.
        pending: Operations that wait, the current one included.
        name: The checkpoint in work, or "": ``bytes_done`` of ``bytes_total`` are on the durable tier.
        rate: Bytes a second of the current, or else of the last, upload.
        counters: Store counters (requests, bytes, retries) and ``committed``, ``failed``, ``skipped``.
        last_error: The newest failure, as text; empty once no failed operation is left to be tried again.
        trouble: Reason why it has not been able to look at its queue for a while; mostly "".
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
    trouble: str = ""

    def upload(self) -> str:
        """Returns the progress of the upload in work, as text."""
        done = f"{self.bytes_done} of {self.bytes_total} bytes of {self.name}"
        return done if self.name else "no upload in progress"


class Queue:
    """Requests, outcomes, notes and progress, in the operation log below the memory tier's root."""

    def __init__(self, root: Path, *, clock: Clock = SYSTEM) -> None:
        """Takes the root; its log is made by :meth:`open`, or by the first that writes."""
        self._root = root
        self._clock = clock
        self._log = OperationLog(root / LOG_FILE, clock=clock)
        #: Makes the log if it is missing, or raises MemoryFullError.
        self.open = self._log.open
        #: Lets go of the log, which takes node memory until then, even if its namespace is deleted.
        self.close = self._log.close
        #: Bytes that differ from the last call's if there is anything new: a cheap look, for processes that wait.
        self.version = self._log.poll
        #: The same, for callers to whom the drain's reports are new, too.
        self.poll_with_heartbeat = self._log.poll_with_heartbeat
        self._outcomes: tuple[bytes, list[Outcome]] = b"", []
        self._understood: dict[str, tuple[Any, Outcome]] = {}
        self._requests: dict[str, tuple[Any, Request]] = {}
        self._notes: dict[str, Note] = {}
        self._said, self._last = b"", DrainProgress()

    def ring(self) -> None:
        """Wakes waiting processes: something has changed that is not in the log.

        Waiting processes look by themselves every few seconds, so a bell that can't be rung is no error.
        """
        with contextlib.suppress(OSError):
            self._log.ring()

    # ---------------------------------------------------------------------------------- requests
    def submit(self, request: Request) -> None:
        """Queues an alias, copy, delete or cancel; MemoryFullError if the log has no space."""
        # An outcome takes its request out of the log, but is the larger of the two. Cancels empty it as well.
        self._log.write({_REQUEST + request.op_id: _facts(request)}, leaves_room=request.action != "cancel")

    def requests(self) -> list[Request]:
        """Returns the queued requests, in order."""
        # While the durable tier is away, some thousand may be queued; each save and each look at progress reads them.
        self._requests = _understood(Request, self._log.entries(_REQUEST), self._requests)
        return [each for _, each in self._requests.values()]

    def look(self, tier: MemoryTier) -> list[Request]:
        """Returns all operations that wait for the drain, in order."""
        # A trainer may add to both while we look. A request that follows a save must not be carried out
        # without that save: an alias would find no target, and be given up.
        seen = {request.op_id for request in self.requests()}
        parts = [stored for stored in tier.parts() if stored.pending]
        newest = max((stored.op_id for stored in parts), default="")
        requests = [each for each in self.requests() if each.op_id in seen or each.op_id < newest]
        for stored in parts:
            part = stored.part
            action: Action = "save" if part.commits else "part"
            requests.append(Request(stored.op_id, action, part.name, part.dirpath, stored=stored, server=part.server))
        return in_order(requests)

    # ------------------------------------------------------------------------------------ drains
    def announced(self) -> str:
        """Returns the token of the drain that began last; empty for one that no trainer started."""
        return str(self._log.get(_DRAIN) or "")

    def announce(self, token: str) -> None:
        """Notes the token of a drain that begins."""
        if token != self.announced():
            self._log.write({_DRAIN: token or None})

    def ask_to_leave(self, token: str) -> None:
        """Asks the drain with this token to leave."""
        if not self.is_asked_to_leave(token):
            self._log.write({_LEAVE: token})

    def is_asked_to_leave(self, token: str) -> bool:
        """Returns whether the drain with this token was asked to leave."""
        return bool(token) and self._log.get(_LEAVE) == token

    # ---------------------------------------------------------------------------------- outcomes
    def finish(self, outcome: Outcome, *, final: bool = True) -> None:
        """Notes an outcome; with a final one, the request and the note of its work go, in the same write.

        If the log has no room, this raises MemoryFullError; the request and the note are gone all the same.
        """
        done: dict[str, Any] = {}
        if final:
            self._notes.pop(outcome.op_id, None)
            done = {_REQUEST + outcome.op_id: None, _NOTE + outcome.op_id: None}
        said = {_OUTCOME + outcome.op_id: _facts(replace(outcome, error=outcome.error[:_SHORT]))}
        try:
            try:
                self._log.write({**self._forgotten(_KEEP), **said, **done}, leaves_room=True)
            except MemoryFullError:
                self._log.write({**self._forgotten(_LEAST), **said, **done})
        except MemoryFullError:
            # Else it would be done again and again.
            self._log.write(done)
            raise

    def _forgotten(self, count: int) -> dict[str, None]:
        """Returns the change of the log after which about ``count`` outcomes, of the newest saves, are left."""
        kept = sorted(self._log.entries(_OUTCOME))
        if len(kept) <= count:
            return {}
        # Outcomes of one save stay or go together. Outcomes of a save that a queued delete follows stay.
        first = ids.save_id_of_op(kept[-count])
        needed = {each.target for each in self.requests() if each.action == "delete"}
        return {_OUTCOME + each: None for each in kept if (of := ids.save_id_of_op(each)) < first and of not in needed}

    def outcome(self, op_id: str) -> Outcome | None:
        """Returns the outcome of an operation; None if it is still to be done, or too long ago."""
        raw = self._log.get(_OUTCOME + op_id)
        return _parsed(Outcome, raw) if raw is not None else None

    def outcomes(self) -> list[Outcome]:
        """Returns all outcomes that are still kept, in order."""
        version = self._log.poll()
        if self._outcomes[0] != version:
            # Hundreds are kept, and few are new at each look: each outcome is parsed once.
            self._understood = _understood(Outcome, self._log.entries(_OUTCOME), self._understood)
            self._outcomes = version, [each for _, each in self._understood.values()]
        return self._outcomes[1]

    # ------------------------------------------------------------------------------------- notes
    def journal(self, op_id: str) -> Note:
        """Returns the journal in which the drain notes its progress with an operation."""
        return self._notes.setdefault(op_id, Note(self._log, _NOTE + op_id))

    # ---------------------------------------------------------------------------------- progress
    def write_progress(self, progress: DrainProgress) -> None:
        """Writes the drain's progress."""
        short = replace(progress, last_error=progress.last_error[:_SHORT], trouble=progress.trouble[: _SHORT // 2])
        self._log.beat(json.dumps(asdict(short), ensure_ascii=False).encode())

    def progress(self) -> DrainProgress:
        """Returns the drain's last report about itself."""
        said = self._log.heartbeat()
        if said and said != self._said:
            self._said = said
            with contextlib.suppress(ValueError, TypeError):
                # The drain may be writing its report just now.
                self._last = DrainProgress(**json.loads(said))
        return self._last


class Note:
    """A note of work in progress: see :class:`UploadJournal`. Without room in the log, only this object keeps it.

    A later process that finds no note does the work again, or clears up its remains.
    """

    def __init__(self, log: OperationLog, key: str) -> None:
        self._log = log
        self._key = key
        self._large: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        state = self._large or self._log.get(self._key)
        return dict(state) if isinstance(state, dict) else None

    def write(self, state: dict[str, object]) -> None:
        self._large = dict(state)
        if len(json.dumps(state)) <= _NOTE_SIZE:
            with contextlib.suppress(MemoryFullError):
                self._log.write({self._key: state}, leaves_room=True)
                self._large = None

    def clear(self) -> None:
        self._large = None
        if self._log.get(self._key) is not None:
            self._log.write({self._key: None})


def _facts(about: Request | Outcome) -> dict[str, Any]:
    facts = {each.name: getattr(about, each.name) for each in fields(about) if each.name != "stored"}
    return {**facts, "server": asdict(about.server) if about.server is not None else None}


def _parsed(kind: type[_T], raw: Mapping[str, Any]) -> _T:
    return kind(**{**raw, "server": server_in(raw)})


def _understood(kind: type[_T], entries: Mapping[str, Any], known: Mapping[str, tuple[Any, _T]]) -> dict[str, Any]:
    """Returns each entry with its parsed content, in order; parses only entries that are not known."""
    return {
        op_id: last if (last := known.get(op_id)) and last[0] == raw else (raw, _parsed(kind, raw))
        for op_id, raw in sorted(entries.items())
    }
