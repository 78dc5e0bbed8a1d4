"""The events of a run, and their totals (pure).

An event is a dictionary: ``t`` (seconds since the epoch), ``event`` (its kind), and facts.

=========  =========================================================================================================
start      training began: ``step``
end        training ended at ``step``: ``error``, the class of what ended it, or ""
step       training reached ``step``
save       a save returned: ``name``, ``step``, ``size_bytes``, ``stall_s``, ``capture_s``, ``durable``, ``queued``
failed     something failed: ``name``, ``step``, ``error``, ``action``
skipped    a save was left out, or stays in memory: ``name``, ``step``, ``error``
upload     the drain ended an operation: ``action``, ``name``, ``step``, ``state``, ``size_bytes``, ``seconds``,
           ``created`` (when the checkpoint was captured), ``error``; of a part, bytes and seconds are its own,
           without the wait for others
restore    a checkpoint was loaded: ``name``, ``step``, ``tier``, ``seconds``, ``created``
totals     what earlier events, which were removed, add up to
=========  =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Event = Mapping[str, Any]
#: The actions that are saves and uploads.
_SAVES = ("save", "part")


@dataclass(slots=True)
class Totals:
    """Sums of events. Steps are -1 and times 0 if none is known; times are seconds since the epoch.

    Attributes:
        running: True if a training began that has not ended by itself; one that was killed counts as running.
        has_start: True if starts and ends of trainings are noted; a loop of one's own notes saves only.
        active_at: The last sign of training: its start or end, a step, or a save.
        trained_to: Up to when training is counted in ``durable_age_s``; 0 while nothing trains.
        failed: Failed attempts of saves and uploads, of each rank.
        skipped: Saves that were left out, or stay in memory, of each rank.
        durable_at: When the last checkpoint that became durable was captured; not later than the last event.
        durable_age_s: Seconds of training since then; since the first event if there is none.
        resumed_step: The step of the last loaded checkpoint; ``resumed_durable``: whether the durable tier gave it,
            until training continues.
        repeated_steps: Steps that were trained again after restarts; ``repeated_s``: seconds spent on them before.
    """

    began: float = 0.0
    running: bool = False
    has_start: bool = False
    active_at: float = 0.0
    trained_to: float = 0.0
    step: int = -1
    step_at: float = 0.0
    memory_saves: int = 0
    durable_saves: int = 0
    stall_s: float = 0.0
    capture_s: float = 0.0
    failed: int = 0
    skipped: int = 0
    durable_step: int = -1
    durable_at: float = 0.0
    durable_age_s: float = 0.0
    restores: int = 0
    restore_s: float = 0.0
    resumed_step: int = -1
    resumed_created: float = 0.0
    resumed_durable: bool = False
    repeated_steps: int = 0
    repeated_s: float = 0.0

    def add(self, event: Event) -> None:
        """Adds an event."""
        kind, t = event["event"], float(event["t"])
        self.began = min(self.began, t) if self.began else t
        # No capture is later than now: a clock that was ahead must not make later checkpoints look older.
        self.durable_at = min(self.durable_at, t)
        if kind == "totals":
            for name, value in event["totals"].items():
                setattr(self, name, value)
        elif kind in ("start", "step"):
            self.running = self.has_start = True
            if kind == "start":
                # No training ran since the kill.
                self.trained_to = 0.0
            self._reach(int(event["step"]), t)
        elif kind == "end":
            self._reach(int(event["step"]), t)
            self.trained_to = 0.0
            # A run that an exception ended needs a look, as one that was killed.
            self.running = bool(event.get("error"))
        elif kind == "save":
            # A trainer's may come after its end.
            self.running |= not self.has_start
            self._reach(int(event["step"]), t)
            self.memory_saves += not event["durable"]
            self.durable_saves += bool(event["durable"])
            self.stall_s += event["stall_s"]
            self.capture_s += event["capture_s"]
            if event["durable"] and not event["queued"]:
                self._is_durable(int(event["step"]), t, t)
        elif kind == "failed":
            self.failed += event["action"] in _SAVES
        elif kind == "skipped":
            self.skipped += 1
        elif kind == "upload":
            self._add_upload(event, t)
        elif kind == "restore":
            self.restores += 1
            self.restore_s += event["seconds"]
            self.resumed_step, self.resumed_created = int(event["step"]), float(event["created"])
            self.resumed_durable = event["tier"] == "durable"
            if not self.has_start:
                # A loop of one's own begins so.
                self.trained_to = 0.0
            if self.resumed_durable:
                self._is_durable(int(event["step"]), float(event["created"]), t)

    def _add_upload(self, event: Event, t: float) -> None:
        if event["action"] not in _SAVES:
            return
        self.failed += event["state"] == "failed"
        if event["state"] == "committed" and event["action"] == "save":
            self._is_durable(int(event["step"]), float(event["created"]), t)

    def _is_durable(self, step: int, created: float, t: float) -> None:
        if created >= self.durable_at:
            self.durable_step, self.durable_at = step, min(created, t)
            self.durable_age_s = min(self.durable_age_s, max(0.0, self.active_at - self.durable_at))

    def _reach(self, step: int, t: float) -> None:
        """Notes that training is at a step. If it went back, the steps since the resumed checkpoint are repeated."""
        self.durable_age_s += max(0.0, t - self.trained_to) if self.trained_to else 0.0
        self.active_at, self.trained_to = t, t if self.running else 0.0
        # Only a training that begins right after a load resumes from it.
        from_durable, self.resumed_durable = self.resumed_durable, False
        if step < 0:
            return
        if step < self.step:
            resumed = self.resumed_step if 0 <= self.resumed_step <= step else step
            self.repeated_steps += self.step - resumed
            since = self.resumed_created if resumed == self.resumed_step else self.step_at
            self.repeated_s += max(0.0, self.step_at - max(since, self.began))
            if from_durable and resumed == self.resumed_step:
                # Also if a later one was committed: training has left that behind.
                self.durable_step, self.durable_at = resumed, min(self.resumed_created, t)
                self.durable_age_s = 0.0
        self.step, self.step_at = step, t

    def event(self, t: float) -> dict[str, Any]:
        """Returns one event with the totals of all added events."""
        return {"t": t, "event": "totals", "totals": asdict(self)}


def totals_of(events: Iterable[Event]) -> Totals:
    """Adds up events, in their order."""
    totals = Totals()
    for event in events:
        totals.add(event)
    return totals
