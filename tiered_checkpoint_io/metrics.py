"""Metrics of a node's memory as Prometheus' text, for node_exporter and other collectors.

They are read from parts, the operation log and the record of events, with and without a trainer; no server is asked. A
training adds to the record by :class:`Recording`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.log import note, read_events
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import last_config
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.memory.tier import AUTO, MemoryTier, noted_budget, space_of
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.events import totals_of

if TYPE_CHECKING:
    from tiered_checkpoint_io.engine.session import Session

PREFIX = "tiered_checkpoint_"
#: Interval at which the step that training has reached is noted, seconds: as often as metrics are asked for.
STEP_EVERY_S = 15.0


class _Look:
    """The memory of a namespace at one moment."""

    def __init__(self, root: Path) -> None:
        config, queue = last_config(root), Queue(root)
        # No limit of this process: it may be in another container than the trainer.
        tier = MemoryTier(root, budget_bytes=noted_budget(root))
        tier.use_spill(config.spill_dir if config is not None else AUTO)
        self.now = SYSTEM.wall()
        self.totals, self.drain = totals_of(read_events(root)), queue.progress()
        self.waiting, self.quarantined, self.parts = len(queue.look(tier)), len(tier.quarantined()), tier.parts()
        tiers = {"memory": tier, "spill": tier.spill}
        self.space = {name: space_of(each) for name, each in tiers.items() if each is not None}
        # The last save counts: a run may go back to an earlier step.
        last = sorted(self.parts, key=lambda each: each.save_id)
        self.memory_step = next((each.part.content.step for each in reversed(last)), -1)
        self.replicated_step = next((each.part.content.step for each in reversed(last) if each.replicated), -1)

    @property
    def at_risk(self) -> int | None:
        """Steps that the loss of this node costs; None before the first step."""
        # After training has gone back to an earlier step, a checkpoint of a later one does not count.
        totals = self.totals
        safe = max((each for each in (totals.durable_step, self.replicated_step) if each <= totals.step), default=-1)
        return totals.step - max(0, safe) if totals.step >= 0 else None


#: A value, or one for each value of the label; None if it is not known.
Values = float | None | Mapping[str, float | None]


@dataclass(frozen=True)
class Metric:
    """One metric, read from a look."""

    name: str
    #: A ``counter`` only grows, until the record of the run is deleted; a ``gauge`` is a value of now.
    kind: Literal["counter", "gauge"]
    meaning: str
    read: Callable[[_Look], Values]
    #: The label of its values, besides ``namespace``, which all have; empty for a single value.
    label: str = ""


def _gauge(name: str, meaning: str, read: Callable[[_Look], Values], label: str = "") -> Metric:
    return Metric(PREFIX + name, "gauge", meaning, read, label)


def _counter(name: str, meaning: str, read: Callable[[_Look], Values], label: str = "") -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", meaning, read, label)


CATALOG: tuple[Metric, ...] = (
    _gauge(
        "running",
        "1 from the start of training to its regular end, also if it was killed meanwhile; else 0.",
        lambda look: look.totals.running,
    ),
    _gauge(
        "last_activity_timestamp_seconds",
        "When this node last trained, validated or saved, since the epoch; noted every 15 s.",
        lambda look: look.totals.active_at or None,
    ),
    _gauge("step", "The last training step that is known of.", lambda look: ids.known(look.totals.step)),
    _gauge(
        "memory_step",
        "The step of the newest checkpoint in this node's memory.",
        lambda look: ids.known(look.memory_step),
    ),
    _gauge(
        "durable_step",
        "The step of the last checkpoint that was committed on the durable tier.",
        lambda look: ids.known(look.totals.durable_step),
    ),
    _gauge(
        "durable_age_seconds",
        "Training time since that checkpoint was captured, or since the run began where there is none; without pauses.",
        lambda look: look.totals.durable_age_s if look.totals.active_at else None,
    ),
    _gauge(
        "steps_at_risk",
        "Steps that the loss of this node costs: those since the last safe checkpoint.",
        lambda look: look.at_risk,
    ),
    _gauge(
        "replicated_step",
        "The step of the newest checkpoint that is also in the memory of other nodes.",
        lambda look: ids.known(look.replicated_step),
    ),
    _counter(
        "saves",
        "Saves of this node's first rank, by where they go.",
        lambda look: {"memory": look.totals.memory_saves, "durable": look.totals.durable_saves},
        "tier",
    ),
    _counter("stall_seconds", "Time for which training waited for saves.", lambda look: look.totals.stall_s),
    _counter("capture_seconds", "Of that time, how long states were copied.", lambda look: look.totals.capture_s),
    _counter(
        "skipped",
        "Saves of each rank that were left out for want of room, or stay in memory alone.",
        lambda look: look.totals.skipped,
    ),
    _counter(
        "failures",
        "Saves and uploads that failed; each attempt of each rank counts.",
        lambda look: look.totals.failed,
    ),
    _counter(
        "request_retries",
        "Requests to the durable tier that the drain repeated since it started.",
        lambda look: look.drain.counters.get("retries", 0) if look.drain.pid else None,
    ),
    _gauge(
        "drain_bytes_per_second",
        "The rate of the upload in work, or else of the last one.",
        lambda look: look.drain.rate if look.drain.pid else None,
    ),
    _gauge("pending", "Saves, copies and deletes that wait for the durable tier.", lambda look: look.waiting),
    _gauge(
        "pending_bytes",
        "Bytes of the parts among them.",
        lambda look: sum(each.part.content.size for each in look.parts if each.pending),
    ),
    _gauge("quarantined", "Damaged parts in this node's quarantine.", lambda look: look.quarantined),
    _gauge(
        "used_bytes",
        "Bytes of node memory, and of the spill, in use; idle slots are not.",
        lambda look: {name: each.used for name, each in look.space.items()},
        "tier",
    ),
    _gauge(
        "free_bytes",
        "Bytes that checkpoints may still take there, with idle slots.",
        lambda look: {name: each.free for name, each in look.space.items()},
        "tier",
    ),
    _counter("restores", "Checkpoints that this node loaded.", lambda look: look.totals.restores),
    _counter(
        "repeated_steps", "Steps that were trained again after restarts.", lambda look: look.totals.repeated_steps
    ),
    _counter(
        "lost_seconds",
        "Time that training lost: to stalls, to restores, and to steps that were trained again.",
        lambda look: {
            "stall": look.totals.stall_s,
            "restore": look.totals.restore_s,
            "repeated_steps": look.totals.repeated_s,
        },
        "cause",
    ),
    _gauge(
        "run_seconds",
        "Time since the first event of the run.",
        lambda look: max(0.0, look.now - look.totals.began) if look.totals.began else None,
    ),
)


def prometheus_text(roots: Iterable[Path]) -> str:
    """Returns the metrics of memory tiers as of now in Prometheus' text format, without those that are not known."""
    looks: dict[str, _Look] = {}
    for root in roots:
        # Deleted meanwhile, or no descriptor is left: the next look tries again. Alerts see a missing series.
        with contextlib.suppress(OSError, TieredCheckpointError):
            looks[root.name] = _Look(root)
    lines: list[str] = []
    for metric in CATALOG:
        found: list[str] = []
        for namespace, look in looks.items():
            read = metric.read(look)
            for label, value in (read if isinstance(read, Mapping) else {"": read}).items():
                if value is not None:
                    more = f',{metric.label}="{label}"' if metric.label else ""
                    found.append(f'{metric.name}{{namespace="{namespace}"{more}}} {float(value)!r}')
        if found:
            lines += [f"# HELP {metric.name} {metric.meaning}", f"# TYPE {metric.name} {metric.kind}", *found]
    return "".join(f"{line}\n" for line in lines)


# --------------------------------------------------------------------------------------- recording
class Recording:
    """The record of one training, by the first rank of each node; on the others it does nothing."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._noted = 0.0

    def begin(self, local_rank: int, step: int, session: Session) -> None:
        """Notes that training starts from a step."""
        if local_rank != 0:
            return
        try:
            root = self._root = session.open().tier.root
        except TieredCheckpointError as error:
            # The first save meets this error as well, and handles it.
            session.log.error("no metrics of this node: %s", error)
            return
        note(root, "start", clock=session.clock, step=step)

    def reach(self, step: int, session: Session) -> None:
        """Notes the step that training has reached, every few seconds; the same one while it is validated."""
        now = session.clock.monotonic()
        if self._root is not None and now - self._noted >= STEP_EVERY_S:
            self._noted = now
            note(self._root, "step", clock=session.clock, step=step)

    def end(self, step: int, session: Session, error: BaseException | None = None) -> None:
        """Notes that training has ended, and the error that ended it."""
        if self._root is not None:
            why = type(error).__name__ if error is not None else ""
            note(self._root, "end", clock=session.clock, step=step, error=why)
        self._root = None
