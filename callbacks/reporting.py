"""What loggers and progress bars are told of saves, and of what the drain made durable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from weakref import proxy

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.callbacks.progress import ProgressLine
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.progress import Progress, SaveReport
from tiered_checkpoint_io.logs import GIB


class Reporter:
    """Speaks for one callback, on rank 0."""

    def __init__(self, callback: ModelCheckpoint) -> None:
        self._callback = callback
        #: Names that are on their way to the durable tier.
        self._expected: set[str] = set()
        #: Whether something became durable of which the loggers do not know.
        self._news = False
        self._line = ProgressLine()

    def start(self, trainer: Trainer) -> None:
        """Shows the line in the trainer's progress bar."""
        self._line.attach(trainer)

    def stop(self) -> None:
        """Leaves the progress bar as it was."""
        self._line.detach()

    def expect(self, name: str, *, pending: bool) -> None:
        """Takes note of a name that the callback gave out, and of whether it is durable yet."""
        if pending:
            self._expected.add(name)
        else:
            self._news = True

    def saved(self, trainer: Trainer, progress: Progress, report: SaveReport | None) -> None:
        """Logs a save that has just returned; without a report, one that failed."""
        self._line.update(progress)
        log(trainer, metrics_of(progress, report))

    def hear(
        self,
        trainer: Trainer,
        outcomes: Sequence[Outcome],
        progress: Progress,
        *,
        shown: Collection[str],
        is_pending: Callable[[str], bool],
    ) -> None:
        """Takes what became of queued saves and aliases, and tells the loggers.

        Args:
            trainer: Whose loggers to tell.
            outcomes: What ended since the last call.
            progress: Where background work stands.
            shown: Names to which the callback's paths lead. Loggers look at those, so they are told
                when all of these are durable, not while a newer one is still on its way.
            is_pending: Whether work on a name is queued.
        """
        for outcome in outcomes:
            if outcome.name in self._expected and outcome.state != "failed" and not is_pending(outcome.name):
                self._expected.discard(outcome.name)
                self._news |= outcome.state == "committed"
        self._line.update(progress, outcomes)
        if self._news and not self._expected.intersection(shown):
            self._news = False
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self._callback))


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Gives metrics to all loggers of the trainer."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


def metrics_of_drain(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    """How long each save took from the drain's start on it until it was durable, seconds."""
    saves = [outcome for outcome in outcomes if outcome.action == "save" and outcome.state == "committed"]
    return [{"checkpoint/drain_s": outcome.seconds} for outcome in saves]


def metrics_of(progress: Progress, report: SaveReport | None) -> dict[str, float]:
    """The metrics of a save that has returned; without a report, of one that failed."""
    metrics = {
        "checkpoint/pending": float(progress.pending),
        "checkpoint/saved_total": float(progress.counters.get("saved", 0)),
        "checkpoint/failed_total": float(progress.counters.get("failed", 0)),
    }
    if report is not None:
        metrics["checkpoint/stall_s"] = report.stall_s
        metrics["checkpoint/size_GiB"] = report.size / GIB
        metrics["checkpoint/staged_GiB_per_s"] = report.size / GIB / max(report.stall_s, 1e-9)
    return metrics
