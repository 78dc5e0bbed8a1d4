"""A line on saves and drains in Lightning's progress bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.progress import Progress
from tiered_checkpoint_io.model import ids

_METRICS = "get_metrics"


class ProgressLine:
    """Adds ``ckpt=...`` to the metrics that a progress bar (tqdm or rich) shows."""

    def __init__(self) -> None:
        self.text = ""
        self._bar: Any = None
        self._durable_step = -1

    def attach(self, trainer: Trainer) -> None:
        """Shows the line in the trainer's progress bar, if it has one that shows none yet."""
        bar: Any = trainer.progress_bar_callback
        if bar is None or _METRICS in vars(bar):
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
            vars(self._bar).pop(_METRICS, None)
            self._bar = None

    def update(self, progress: Progress, outcomes: Sequence[Outcome] = ()) -> None:
        """Takes over what is going on now."""
        committed = [outcome.step for outcome in outcomes if outcome.action == "save" and outcome.state == "committed"]
        self._durable_step = max([self._durable_step, *committed])
        self.text = line_of(progress, self._durable_step)


def line_of(progress: Progress, durable_step: int = -1) -> str:
    """``mem 90 0.06s | durable 50 62% | 1 waiting | 2 failed``.

    Args:
        progress: Where background work stands.
        durable_step: The newest step that is durable; shown where none is on its way; -1 for none.
    """
    words = []
    if progress.last_save is not None:
        words.append(f"mem {progress.last_save.step} {progress.last_save.stall_s:.2f}s")
    drain = progress.drain
    if drain.name and drain.bytes_total:
        step = ids.step_in_name(drain.name)
        what = drain.name if step is None else str(step)
        words.append(f"durable {what} {100 * drain.bytes_done // drain.bytes_total}%")
    elif durable_step >= 0:
        words.append(f"durable {durable_step}")
    if progress.pending:
        words.append(f"{progress.pending} waiting")
    if progress.counters.get("failed"):
        words.append(f"{progress.counters['failed']} failed")
    return " | ".join(words)
