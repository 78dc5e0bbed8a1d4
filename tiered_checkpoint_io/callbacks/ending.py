"""Saves the end of training, so that the newest step to resume from is not left in memory only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from tiered_checkpoint_io.callbacks.deletes import SafeDeletes
from tiered_checkpoint_io.callbacks.overlapping import OverlappedCapture
from tiered_checkpoint_io.callbacks.trainer import all_failed, trained_weights
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.save.facts import last_saves
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.model import ids

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
        """Has the strategy's teardown save the restored state, if nothing is left to train.

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
            each._is_amid_validation = False

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


def _durable_ends(trainer: Trainer) -> list[DurableEnd]:
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, DurableEnd)]


def _others(trainer: Trainer) -> list[Callback]:
    return [each for each in trainer.callbacks if not isinstance(each, EndOfTraining)]  # type: ignore[attr-defined]


def count_epoch_as_it_ended(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Has a checkpoint not count an epoch that training leaves halfway, as at ``max_time``.

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


class DurableEnd(SafeDeletes):
    """A ModelCheckpoint after whose training the newest step to resume from is durable.

    The state is saved once more when training ends, under a name of its own, outside the top-k and ``last``. (An upload
    of a memory step would never be deleted.)
    """

    save_on_train_end: bool
    #: On rank 0, the saved steps of this training.
    _resumable: Resumable
    #: The step that this training began with.
    _began_at: int
    #: True if training validates just now, perhaps with averaged weights.
    _is_amid_validation: bool
    #: Methods of :class:`TieredModelCheckpoint`.
    _siblings: Any
    _save: Any

    def _begin(self) -> None:
        super()._begin()
        self._resumable = Resumable()
        self._began_at = 0
        self._is_amid_validation = False
        #: All ranks, to meet after an exception: a group that is made then may wait for ever for a dead one.
        self._group: Any = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._is_amid_validation = trainer.state.fn == TrainerFn.FITTING

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves as upstream does, with the trained weights."""
        saves = getattr(self, "save_on_exception", False) and self._should_save_on_exception(trainer)
        amid_validation, self._is_amid_validation = self._is_amid_validation, False
        with trained_weights(trainer) if saves and amid_validation else contextlib.nullcontext():
            if not saves or self._group is None or all_failed(self._engine.session, self._group, exception):
                super().on_exception(trainer, pl_module, exception)
            elif trainer.is_global_zero and not hasattr(trainer.strategy, "_saves_shards"):
                # A full checkpoint needs no other rank, and Trainer.save_checkpoint would wait for them.
                name = f"{self.dirpath}/epoch={trainer.current_epoch}-step={trainer.global_step}{self.FILE_EXTENSION}"
                state = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
                trainer.strategy.save_checkpoint(state, name)

    def _should_save_on_exception(self, trainer: Trainer) -> bool:
        # Lightning asks since 2.6. An evaluation may have loaded weights of another step.
        return trainer.state.fn == TrainerFn.FITTING and super()._should_save_on_exception(trainer)

    def _begin_training(self, trainer: Trainer) -> None:
        restored, step = self._engine.restored, trainer.global_step
        self._resumable, self._began_at = Resumable(), step
        if restored is None or restored.step != step:
            return
        if restored.name in self._engine.also_last:
            # Lightning has it removed when this fit ends.
            self._resumable = Resumable(step, -1)
        elif not restored.is_durable:
            parts = [each.part for each in self._engine.session.open().tier.parts() if each.part.name == restored.name]
            self._resumable = Resumable(step, step if any(part.durable for part in parts) else -1)

    def _has_stepped(self, trainer: Trainer) -> bool:
        """Returns True if the ending batch made a step: a save after any other lacks accumulated gradients."""
        return trainer.global_step > self._began_at and not trainer.fit_loop._should_accumulate()

    def _save_state(self, trainer: Trainer, name: str, *tiers: str) -> SaveReport | None:
        """Saves the whole training state below the IO's dirpath; ModelCheckpoint does not count this checkpoint."""
        report: SaveReport | None = self._save(
            trainer, ids.join_url(self._engine.dirpath, name), {"tiers": tiers}, weights_only=False
        )
        self._resumable = self._resumable.after(trainer.global_step, report)
        return report

    def _save_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves the last state to the durable tier, if the newest is only in memory; all ranks call this."""
        # If nothing else was saved, upstream saves "last" now.
        super().on_train_end(trainer, module)
        self._save_what_is_in_memory_alone(trainer)

    def _save_where_it_left(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves a training that has left a batch; all ranks call this."""
        if self._has_stepped(trainer) and not self._is_amid_validation:
            self._save_end(trainer, module)
        elif trainer.is_global_zero and is_in_memory_alone(each._resumable for each in self._siblings(trainer)):
            self._engine.session.log.warning(
                "training was ended during accumulated gradients or a validation, and its newest checkpoint is in node"
                " memory alone; upload it before the node goes: tiered-ckpt flush"
            )

    def _save_what_is_in_memory_alone(self, trainer: Trainer) -> None:
        wanted = self.save_on_train_end and self._io is not None and self._io.config.save_on_train_end
        if wanted and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            missing = is_in_memory_alone(each._resumable for each in self._siblings(trainer))
            # Rank 0 knows the outcomes of the saves, and each rank its later losses.
            lost = trainer.strategy.reduce_boolean_decision(self._has_lost(), all=False)
            if trainer.strategy.broadcast(missing or lost):
                with last_saves(self._engine.session):
                    made = self._save_state(trainer, NAME + self.FILE_EXTENSION, "memory", "durable")
                    # A sharded save after one that failed in the background is not made, and the next one is.
                    if trainer.strategy.broadcast(lost and made is None):
                        self._save_state(trainer, NAME + self.FILE_EXTENSION, "memory", "durable")

    def _has_lost(self) -> bool:
        """Returns True if the last durable save has failed since, in the background."""
        background = self._engine.session.background
        with contextlib.suppress(DrainError):
            background.wait()
        return bool(background.lost)
