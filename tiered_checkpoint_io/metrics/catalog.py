"""All metrics: their names, types, units and meanings (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PREFIX = "tiered_checkpoint_"

Kind = Literal["counter", "gauge"]
#: As Prometheus spells base units; "" for a plain number.
Unit = Literal["seconds", "bytes", "bytes_per_second", "steps", ""]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Its full name. Names of counters end in ``_total``.
        kind: A ``counter`` only grows, until the record of the run is deleted; a ``gauge`` is a value of now.
        unit: Of its values.
        meaning: What it says, in one or two sentences.
        labels: What tells its values apart, beside ``namespace``, which all have.
    """

    name: str
    kind: Kind
    unit: Unit
    meaning: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric."""

    metric: Metric
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def _metric(name: str, kind: Kind, unit: Unit, meaning: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, kind, unit, meaning, labels)


RUNNING = _metric(
    "running", "gauge", "", "1 from the start of training to its regular end, also if it was killed meanwhile; else 0."
)
ACTIVITY = _metric(
    "last_activity_timestamp_seconds",
    "gauge",
    "seconds",
    "When this node last trained, validated or saved, since the epoch; noted every 15 s.",
)
STEP = _metric("step", "gauge", "steps", "The last training step that is known of.")
MEMORY_STEP = _metric("memory_step", "gauge", "steps", "The step of the newest checkpoint in this node's memory.")
DURABLE_STEP = _metric(
    "durable_step", "gauge", "steps", "The step of the last checkpoint that was committed on the durable tier."
)
DURABLE_AGE = _metric(
    "durable_age_seconds",
    "gauge",
    "seconds",
    "Training time since that checkpoint was captured, or since the run began where there is none; without pauses.",
)
STEPS_AT_RISK = _metric(
    "steps_at_risk", "gauge", "steps", "Steps that the loss of this node costs: those since the last safe checkpoint."
)
REPLICATED_STEP = _metric(
    "replicated_step", "gauge", "steps", "The step of the newest checkpoint that is also in the memory of other nodes."
)
REPLICATION_LAG = _metric(
    "replication_lag_steps", "gauge", "steps", "By how many steps that is behind the newest checkpoint in memory."
)
SAVES = _metric("saves_total", "counter", "", "Saves of this node's first rank, by where they go.", "tier")
STALL = _metric("stall_seconds_total", "counter", "seconds", "Time for which training waited for saves.")
LAST_STALL = _metric("last_stall_seconds", "gauge", "seconds", "The same for the last save.")
CAPTURE = _metric("capture_seconds_total", "counter", "seconds", "Of that time, how long states were copied.")
SKIPPED = _metric(
    "skipped_total",
    "counter",
    "",
    "Saves of each rank that were left out for want of room, or stay in memory alone.",
)
FAILURES = _metric("failures_total", "counter", "", "Saves and uploads that failed; each attempt of each rank counts.")
OTHER_FAILURES = _metric(
    "other_failures_total", "counter", "", "Aliases, copies, deletes and retention that failed; each attempt counts."
)
UPLOADS = _metric("uploads_total", "counter", "", "Checkpoints, or this node's parts of them, that were uploaded.")
UPLOADED = _metric("uploaded_bytes_total", "counter", "bytes", "Bytes of these.")
UPLOAD_TIME = _metric("upload_seconds_total", "counter", "seconds", "Time that their uploads took.")
RETRIES = _metric(
    "request_retries_total", "counter", "", "Requests to the durable tier that the drain repeated since it started."
)
DRAIN_RATE = _metric(
    "drain_bytes_per_second", "gauge", "bytes_per_second", "The rate of the upload in work, or else of the last one."
)
DRAIN_AGE = _metric("drain_heartbeat_age_seconds", "gauge", "seconds", "Time since the drain last wrote its progress.")
PENDING = _metric("pending", "gauge", "", "Saves, copies and deletes that wait for the durable tier.")
PENDING_BYTES = _metric("pending_bytes", "gauge", "bytes", "Bytes of the parts among them.")
QUARANTINED = _metric("quarantined", "gauge", "", "Damaged parts in this node's quarantine.")
USED = _metric(
    "used_bytes", "gauge", "bytes", "Bytes of node memory, and of the spill, in use; idle slots are not.", "tier"
)
FREE = _metric("free_bytes", "gauge", "bytes", "Bytes that checkpoints may still take there, with idle slots.", "tier")
RESTORES = _metric("restores_total", "counter", "", "Checkpoints that this node loaded.")
REPEATED = _metric("repeated_steps_total", "counter", "steps", "Steps that were trained again after restarts.")
LOST = _metric(
    "lost_seconds_total",
    "counter",
    "seconds",
    "Time that training lost: to stalls, to restores, and to steps that were trained again.",
    "cause",
)
ELAPSED = _metric("run_seconds", "gauge", "seconds", "Time since the first event of the run.")

CATALOG: tuple[Metric, ...] = tuple(each for each in globals().values() if isinstance(each, Metric))
