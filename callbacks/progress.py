"""What users see of saves and drains: a line in Lightning's progress bar, and metrics."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from tiered_checkpoint_io.engine.checkpointer import Progress
from tiered_checkpoint_io.logs import GIB


class ProgressLine:
    """Adds ``ckpt=...`` to the metrics that a progress bar (tqdm or rich) shows."""

    def __init__(self) -> None:
        self.text = ""
        self._bar: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Starts to show the line in the trainer's progress bar, if it has one."""
        bar: Any = trainer.progress_bar_callback
        if bar is None or self._bar is not None:
            return
        metrics = bar.get_metrics

        def with_line(*args: Any, **kwargs: Any) -> dict[str, Any]:
            shown: dict[str, Any] = metrics(*args, **kwargs)
            return {**shown, "ckpt": self.text} if self.text else shown

        # On the instance: the bar's class, whichever it is, stays as it was.
        bar.get_metrics = with_line
        self._bar = bar

    def detach(self) -> None:
        """Leaves the progress bar as it was."""
        if self._bar is not None:
            del self._bar.get_metrics
            self._bar = None

    def update(self, progress: Progress) -> None:
        """Takes over what is going on now."""
        self.text = line_of(progress)


def line_of(progress: Progress) -> str:
    """``step 90 in 0.06s, to s3 62%, 1 waiting``."""
    words = []
    if progress.last_save is not None:
        words.append(f"step {progress.last_save.step} in {progress.last_save.stall_s:.2f}s")
    if progress.drain.name and progress.drain.bytes_total:
        words.append(f"to s3 {100 * progress.drain.bytes_done // progress.drain.bytes_total}%")
    if progress.pending:
        words.append(f"{progress.pending} waiting")
    if progress.counters.get("failed"):
        words.append(f"{progress.counters['failed']} failed")
    return ", ".join(words)


def metrics_of(progress: Progress) -> dict[str, float]:
    """The metrics of the newest save, as they go to the trainer's loggers."""
    save = progress.last_save
    assert save is not None
    return {
        "checkpoint/stall_s": save.stall_s,
        "checkpoint/size_GiB": save.size / GIB,
        "checkpoint/staged_GiB_per_s": save.size / GIB / max(save.stall_s, 1e-9),
        "checkpoint/pending": float(progress.pending),
        "checkpoint/saved_total": float(progress.counters.get("saved", 0)),
        "checkpoint/failed_total": float(progress.counters.get("failed", 0)),
    }
