"""The one collector: the metrics of a node's namespace, from what lies in its memory tier. Asks no server.

It reads parts, the operation log and the record of events, so it works beside a trainer and without one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.events import RunningTotals
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import last_config
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.memory.budget import noted_budget, space_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.spill import AUTO
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.metrics import catalog
from tiered_checkpoint_io.metrics.catalog import Metric, Sample
from tiered_checkpoint_io.model.events import Totals

#: Exporters that ask one after the other for each metric get the same look.
_FRESH_S = 0.1


class Collector:
    """Collects the metrics of one memory tier; one thread at a time."""

    def __init__(self, root: Path, clock: Clock = SYSTEM) -> None:
        """Takes the root of the memory tier, ``<memory_dir>/tiered-<uid>/<namespace>``."""
        self.root = root
        self._clock = clock
        self._queue = Queue(root, clock=clock)
        self._totals = RunningTotals(root)

    def collect(self) -> list[Sample]:
        """The metrics as of now; those of which nothing is known are left out.

        Raises:
            OSError: The memory tier can't be read: it was deleted, or no descriptor is left.
        """
        # No limit of this process: it may be in another container than the trainer.
        config, tier = last_config(self.root), MemoryTier(self.root, budget_bytes=noted_budget(self.root))
        tier.use_spill(config.spill_dir if config is not None else AUTO)
        parts, totals, progress = tier.parts(), self._totals.look(), self._queue.progress()
        found: list[tuple[Metric, float | None, dict[str, str]]] = []

        def add(metric: Metric, value: float | None, **labels: str) -> None:
            found.append((metric, value, labels))

        add(catalog.PENDING, len(self._queue.look(tier)))
        add(catalog.PENDING_BYTES, sum(each.part.content.size for each in parts if each.pending))
        add(catalog.QUARANTINED, len(tier.quarantined()))
        for name, each in (("memory", tier), ("spill", tier.spill)):
            if each is not None:
                space = space_of(each)
                add(catalog.USED, space.used, tier=name)
                add(catalog.FREE, space.free, tier=name)
        now = self._clock.wall()
        found += _of_drain(progress, now) + _of_events(totals, now) + _of_steps(parts, totals)
        found.sort(key=lambda each: catalog.CATALOG.index(each[0]))
        mine = {"namespace": self.root.name}
        return [
            Sample(metric, float(value), {**mine, **labels}) for metric, value, labels in found if value is not None
        ]


_Samples = list[tuple[Metric, float | None, dict[str, str]]]


def _of_drain(progress: DrainProgress, now: float) -> _Samples:
    if not progress.pid:
        return []
    return [
        (catalog.DRAIN_RATE, progress.rate, {}),
        (catalog.DRAIN_AGE, max(0.0, now - progress.heartbeat), {}),
        (catalog.RETRIES, progress.counters.get("retries", 0), {}),
    ]


def _of_events(totals: Totals, now: float) -> _Samples:
    return [
        (catalog.RUNNING, totals.running, {}),
        (catalog.ACTIVITY, totals.active_at or None, {}),
        (catalog.STEP, _known(totals.step), {}),
        (catalog.DURABLE_STEP, _known(totals.durable_step), {}),
        (catalog.DURABLE_AGE, totals.durable_age_s if totals.active_at else None, {}),
        (catalog.SAVES, totals.memory_saves, {"tier": "memory"}),
        (catalog.SAVES, totals.durable_saves, {"tier": "durable"}),
        (catalog.STALL, totals.stall_s, {}),
        (catalog.LAST_STALL, totals.last_stall_s, {}),
        (catalog.CAPTURE, totals.capture_s, {}),
        (catalog.SKIPPED, totals.skipped, {}),
        (catalog.FAILURES, totals.failed, {}),
        (catalog.OTHER_FAILURES, totals.failed_other, {}),
        (catalog.UPLOADS, totals.uploads, {}),
        (catalog.UPLOADED, totals.uploaded_bytes, {}),
        (catalog.UPLOAD_TIME, totals.upload_s, {}),
        (catalog.RESTORES, totals.restores, {}),
        (catalog.REPEATED, totals.repeated_steps, {}),
        (catalog.LOST, totals.stall_s, {"cause": "stall"}),
        (catalog.LOST, totals.restore_s, {"cause": "restore"}),
        (catalog.LOST, totals.repeated_s, {"cause": "repeated_steps"}),
        (catalog.ELAPSED, max(0.0, now - totals.began) if totals.began else None, {}),
    ]


def _of_steps(parts: list[StoredPart], totals: Totals) -> _Samples:
    """Which steps are where; of what was saved last, because a run may go back to an earlier step."""
    newest = max(parts, key=lambda each: each.save_id, default=None)
    copied = max((each for each in parts if each.replicated), key=lambda each: each.save_id, default=None)
    memory = newest.part.content.step if newest is not None else -1
    replicated = copied.part.content.step if copied is not None else -1
    found: _Samples = [(catalog.MEMORY_STEP, _known(memory), {}), (catalog.REPLICATED_STEP, _known(replicated), {})]
    if replicated >= 0:
        found.append((catalog.REPLICATION_LAG, max(0, memory - replicated), {}))
    # After training has gone back to an earlier step, a checkpoint of a later one does not count.
    safe = max((step for step in (totals.durable_step, replicated) if step <= totals.step), default=-1)
    if totals.step >= 0:
        found.append((catalog.STEPS_AT_RISK, totals.step - max(0, safe), {}))
    return found


def _known(step: int) -> float | None:
    return step if step >= 0 else None


class Source:
    """The metrics of several memory tiers, for exporters: callable from any thread, and cheap to call often."""

    def __init__(self, roots: Callable[[], Iterable[Path]], clock: Clock = SYSTEM) -> None:
        """Takes what gives the roots of the memory tiers, which may come and go."""
        self._roots = roots
        self._clock = clock
        self._lock = threading.Lock()
        self._collectors: dict[Path, Collector] = {}
        self._last: tuple[float, list[Sample]] = (-_FRESH_S, [])

    def __call__(self) -> list[Sample]:
        """The metrics as of now, at most a moment old; none of a memory tier that can't be read just now."""
        with self._lock:
            now = self._clock.monotonic()
            if now - self._last[0] >= _FRESH_S:
                self._last = (now, self._collect())
            return self._last[1]

    def _collect(self) -> list[Sample]:
        samples: list[Sample] = []
        roots = list(self._roots())
        self._collectors = {each: self._collectors.get(each) or Collector(each, self._clock) for each in roots}
        for collector in self._collectors.values():
            # Deleted meanwhile, or out of descriptors: the next look tells. A missing series is what alerts see.
            with contextlib.suppress(OSError, TieredCheckpointError):
                samples += collector.collect()
        return samples
