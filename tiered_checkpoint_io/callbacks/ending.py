"""Saves the end of training, so that the newest step to resume from is not left in memory only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from tiered_checkpoint_io.callbacks.overlapping import OverlappedCapture
from tiered_checkpoint_io.engine.drain.status import SaveReport

#: The checkpoint's name below dirpath, without its ending; the next one replaces it. NeMo takes names that end in "end"
#: for the mark of a training that must not continue.
NAME = "end_of_training"


class Resumable(NamedTuple):
    """The newest steps that a callback has saved and that training can resume from; -1 for none."""

    #: In any tier; and on the durable tier, or queued for it.
    saved: int = -1
    durable: int = -1

    def after(self, step: int, report: SaveReport | None) -> Resumable:
        """Counts a save of a whole training state; without a report, one that failed."""
        if report is None:
            return self
        return Resumable(step, step if "durable" in report.tiers else self.durable)


def is_in_memory_alone(callbacks: Iterable[Resumable]) -> bool:
    """Returns True if the newest step to resume from is not, and will not be, on the durable tier."""
    known = [*callbacks]
    return max(each.saved for each in known) > max(each.durable for each in known)


class EndOfTraining(Callback):
    """Saves the state at the end of training, before other callbacks replace it by averaged weights."""

    def __init__(self) -> None:
        self._has_trained = self._has_ended = False

    @classmethod
    def join(cls, trainer: Trainer) -> None:
        """Makes one the trainer's first callback, except for the one that waits for overlapped captures."""
        others = _others(trainer)
        waits = [each for each in others if isinstance(each, OverlappedCapture)]
        # Not in place: Lightning goes through this list just now.
        trainer.callbacks = [*waits, cls(), *(each for each in others if each not in waits)]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Makes the strategy's teardown save the restored state, if nothing is left to train.

        Lightning calls no hook between the restore and that teardown, which may move a sharded module.
        """
        strategy: Any = trainer.strategy

        def teardown() -> None:
            vars(trainer.strategy).pop("teardown", None)
            has_restored = trainer.ckpt_path is not None and trainer.state.status == TrainerStatus.RUNNING
            ends = _durable_ends(trainer) if has_restored and not self._has_trained else []
            for each in ends:
                each._begin_training(trainer)
            for each in ends:
                each._save_what_is_in_memory_alone(trainer)
            strategy.teardown()

        strategy.teardown = teardown

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._has_trained = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_ended = True
        for each in _durable_ends(trainer):
            each._save_end(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        for each in _durable_ends(trainer):
            each._is_validating = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's tuner ends its trials by this hook; NeMo's time limit a training, without on_train_end.
        vars(trainer.strategy).pop("teardown", None)
        # No teardown follows an exception; the teardown of a later evaluation is no end of the training.
        is_running = stage == "fit" and trainer.state.status == TrainerStatus.RUNNING
        if self._has_trained and not self._has_ended and is_running:
            self._has_ended = True
            for each in _durable_ends(trainer):
                each._save_where_it_left(trainer, pl_module)
        trainer.callbacks = _others(trainer)  # type: ignore[attr-defined]


def _durable_ends(trainer: Trainer) -> list[Any]:
    """Returns the callbacks of the class :class:`TieredModelCheckpoint`."""
    return [each for each in trainer.checkpoint_callbacks if hasattr(each, "_save_end")]


def _others(trainer: Trainer) -> list[Callback]:
    return [each for each in trainer.callbacks if not isinstance(each, EndOfTraining)]  # type: ignore[attr-defined]


def count_epoch_as_it_ended(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint not count an epoch that training leaves halfway, as at ``max_time``.

    Lightning counts it before ``on_train_epoch_end``; a run that resumed from that would never train the rest of it.
    """
    progress: Any = trainer.fit_loop.epoch_progress
    epoch_loop = trainer.fit_loop.epoch_loop
    is_counted = progress.current.processed == progress.current.ready > 0
    # A loop that is not done has run out of batches before the length that its loader has named.
    if not is_counted or epoch_loop.batch_progress.is_last_batch or not epoch_loop.done:
        return
    saved = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for counts in (saved["current"], saved["total"]):
        counts["processed"] -= 1
        counts["completed"] = min(counts["completed"], counts["processed"])
    checkpoint["epoch"] = saved["current"]["completed"]


def progress_of(trainer: Trainer) -> tuple[int, int]:
    """Returns the step, and the batches that are completed: NeMo counts the one that ends before it saves "last"."""
    return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.current.completed
