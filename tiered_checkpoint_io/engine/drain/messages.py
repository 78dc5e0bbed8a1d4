"""What is said of the drain's outcomes in the trainer's log, and where a job's checkpoints are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tiered_checkpoint_io.engine.drain.operations import DAMAGED_IN_MEMORY, NAMING, SAVES, Outcome, Request
from tiered_checkpoint_io.engine.drain.progress import SaveReport, tier_label
from tiered_checkpoint_io.errors import DrainError, SaveError, TieredCheckpointError
from tiered_checkpoint_io.logs import CheckpointLogger, rate
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.place import Place

#: Where the memory tier lies by default, for the command line as well.
_SHM = "/dev/shm"  # noqa: S108
#: Names that a message lists.
_NAMED = 3


def say_outcome(
    log: CheckpointLogger,
    outcome: Outcome,
    config: TieredCheckpointConfig,
    *,
    leads: bool = True,
    inherited: bool = False,
) -> SaveError | None:
    """Logs what became of a queued operation, where that concerns the user.

    Args:
        log: The trainer's log.
        outcome: What the drain noted.
        config: Of the job.
        leads: Whether this process speaks for its node; all others log failures at DEBUG.
        inherited: Whether an earlier start queued it: then a failure is a warning.

    Returns:
        The failure, if it is one.
    """
    log = log.at_step(outcome.step)
    if outcome.state == "committed" and outcome.action == "save":
        where, amount = tier_label(outcome.dirpath), rate(outcome.bytes, outcome.seconds)
        log.info("%s is durable on %s: %s", outcome.name, where, amount)
    elif outcome.state == "committed" and outcome.action == "retain" and outcome.error:
        (log.warning if leads else log.debug)("retention: %s", outcome.error)
    elif outcome.state == "skipped" and outcome.action in (*NAMING, *SAVES):
        (log.warning if leads else log.debug)("%s will not be durable: %s", outcome.name, outcome.error)
    elif outcome.state == "skipped" and outcome.action in ("delete", "retain"):
        what = f"{outcome.name} was not deleted" if outcome.action == "delete" else "retention skipped"
        (log.warning if leads else log.debug)("%s: %s", what, outcome.error)
    elif outcome.state == "failed" and outcome.action != "cancel":
        failure = failure_of(outcome, config)
        say = log.debug if not leads else log.warning if inherited else log.error
        say("%s%s — %s", "of an earlier start: " if inherited else "", failure.message, failure.hint)
        return failure
    return None


def not_done(action: str, name: str, dirpath: str, reason: Exception) -> SaveError:
    """The error that something was not done with a name in node memory, for a reason."""
    known = reason if isinstance(reason, TieredCheckpointError) else TieredCheckpointError(str(reason))
    key, hint = ids.join_url(dirpath, name), "; ".join(filter(None, ["it is not done", known.hint]))
    error = SaveError(
        f"{action} of {name} failed: {known.message}", operation=action, tier="memory", key=key, hint=hint
    )
    error.__cause__ = reason
    return error


class Saved(NamedTuple):
    """A checkpoint, by its name and step; the step is -1 where it is not known."""

    name: str
    step: int

    def __str__(self) -> str:
        return (
            self.name
            if self.step < 0 or ids.step_in_name(self.name) == self.step
            else f"{self.name} (step {self.step})"
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """What a node knows of a job's checkpoints.

    Attributes:
        memory: The newest in its memory, if any.
        durable: The newest that was uploaded, and not deleted since, as far as the operation log reaches back.
        pending: Those whose upload is still queued, or has failed and is tried again; in order.
        resumable: Whether training can resume from some of them, as far as this is known: not where all in memory, and
            the newest that was uploaded, are weights alone.
    """

    memory: Saved | None = None
    durable: Saved | None = None
    pending: tuple[Saved, ...] = ()
    resumable: bool = True


def standing_of(
    parts: Iterable[StoredPart],
    outcomes: Iterable[Outcome],
    operations: Iterable[Request],
    place: Place,
    last_save: SaveReport | None = None,
) -> Standing:
    """What is where, by what lies in memory, by the operation log, and by the newest save of this process."""
    own = [each for each in parts if each.part.place == place]
    held = max(own, key=lambda each: each.save_id, default=None)
    there: dict[str, tuple[str, Saved]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.op_id):
        if outcome.state == "committed" and outcome.place == place:
            if outcome.action == "save":
                there[outcome.name] = (outcome.op_id, Saved(outcome.name, outcome.step))
            elif outcome.action == "delete":
                there.pop(outcome.name, None)
    pending = {each.name: each.stored for each in operations if each.action in SAVES and each.place == place}
    weights = {each.part.name for each in own if not each.part.content.resumable}
    if last_save is not None and not last_save.resumable:
        weights.add(last_save.name)
    durable = max(there.values())[1] if there else None
    return Standing(
        Saved(held.part.name, held.part.content.step) if held is not None else None,
        durable,
        tuple(Saved(name, stored.part.content.step if stored else -1) for name, stored in pending.items()),
        any(each.part.content.resumable for each in own) or (durable is not None and durable.name not in weights),
    )


def failure_of(outcome: Outcome, config: TieredCheckpointConfig) -> SaveError:
    """What to say of an operation that failed in the background: why, what becomes of it, and what can be done."""
    what = outcome.name if outcome.action == "save" else f"{outcome.action} of {outcome.name}"
    if outcome.action == "retain":
        what = "retention"
    again = f"is tried again; by hand: {drain_command(config)}"
    # Of all else it is the durable tier that has something damaged, and nothing in memory was touched.
    if outcome.error_type == DAMAGED_IN_MEMORY and outcome.action in SAVES:
        hint = "its copy in node memory was moved to quarantine/, and it is not tried again"
    elif outcome.action in SAVES:
        hint = f"it stays in node memory and {again}"
    else:
        hint = f"it stays queued and {again}"
    return SaveError(
        f"{what} did not reach the durable tier: {outcome.error}",
        operation=outcome.action,
        tier="durable",
        key=outcome.url,
        step=outcome.step if outcome.step >= 0 else None,
        hint=hint,
    )


def not_uploaded(pending: Sequence[Saved], config: TieredCheckpointConfig, error: DrainError) -> tuple[str, SaveError]:
    """What to say at the end of what is queued still: in the log, which has its failures already, and as an error."""
    names = ", ".join(each.name for each in pending[:_NAMED]) + (" ..." if len(pending) > _NAMED else "")
    what = (
        f"{len(pending)} queued checkpoint{'s were' if len(pending) > 1 else ' was'} not uploaded ({names})"
        if pending
        else "queued aliases and deletes were not done"
    )
    # What has not failed is slow, and then the hint has the last words of the drain.
    has_failed = error.hint is None or "stays in node memory" in error.hint
    full = f"{what}: {error.message}" if has_failed else f"{what}: {error.message}; {error.hint}"
    return what if has_failed else full, SaveError(
        full,
        operation="drain",
        tier="durable",
        key=config.dirpath,
        hint=f"{'they stay' if len(pending) != 1 else 'it stays'} in node memory; retry with: {drain_command(config)}",
    )


def drain_command(config: TieredCheckpointConfig) -> str:
    """What to type to have the queue of a job worked on."""
    place = "" if config.memory_dir == _SHM else f" --memory-dir {config.memory_dir}"
    return f"tiered-ckpt flush --namespace {config.namespace}{place}"
