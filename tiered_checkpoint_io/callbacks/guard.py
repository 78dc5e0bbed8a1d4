"""Looks after each trainer that has our checkpoint IO, with any callbacks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.adapters.optimizers import size_here
from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint, of_ours
from tiered_checkpoint_io.callbacks.overlapping import OverlappedCapture
from tiered_checkpoint_io.callbacks.reporting import say_summary, say_summary_last
from tiered_checkpoint_io.callbacks.trainer import (
    check_strategy,
    folder_of,
    of_classes,
    on_rank_0,
    refuse_nemo_averages,
)
from tiered_checkpoint_io.engine.preflight import Need, newest, preflight
from tiered_checkpoint_io.engine.ranks.coordination import train_here
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.metrics import Recording
from tiered_checkpoint_io.model import ids


class StrategyGuard(Callback):
    """Looks after any trainer that has our checkpoint IO; Lightning adds it by an entry point.

    A stock sharded strategy never asks its checkpoint IO, and would write to a local folder ``./s3:/``: it is refused.
    Lightning's default ModelCheckpoint is given a place below dirpath. Preflight runs before the first batch. The end
    of training is saved before other callbacks replace the weights by averages.
    """

    #: See :func:`say_summary_last`.
    says_summary = True

    def __init__(self) -> None:
        self._recording = Recording()
        self._overlapping: OverlappedCapture | None = None
        #: True if a callback was Lightning's own when ckpt_path was resolved.
        self._adopted = False
        #: True if room for a first save is still to be made, and the step that training began with.
        self._prepares, self._began_at = False, 0
        self._has_trained = self._has_ended = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses saves that would bypass our checkpoint IO; claims the dirpath; starts the drain, and replication."""
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return
        check_strategy(trainer.strategy)
        refuse_nemo_averages(trainer)
        train_here()
        io.is_for_trainer = lambda path: path == trainer.ckpt_path
        _count_as_last(trainer, io)
        for callback in trainer.checkpoint_callbacks:
            # Classes derived from it are their authors' business. In an evaluation, Lightning would give one without a
            # dirpath a folder, which a later fit would keep.
            if type(callback) is ModelCheckpoint and (stage == "fit" or not callback.dirpath):
                _place(callback, trainer, io)
                self._adopted = True
        if stage != "fit":
            return
        self._has_trained = self._has_ended = False
        # Before other callbacks in each hook. Not in place: Lightning goes through this list just now.
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]  # type: ignore[attr-defined]
        session, need = io.checkpointer.session, _need(trainer, pl_module)
        on_rank_0(trainer, lambda: preflight(session, need))
        if need.memory_steps or need.durable_steps:
            on_rank_0(trainer, lambda: session.claims.claim(saves=False))
            session.take_up(saves=need.durable_steps)
        if io.config.staging != "eager":
            self._overlapping = OverlappedCapture.join(trainer, io)
        if io.config.replication_factor > 1:
            # All ranks are here, on the threads that train; of a full checkpoint, only rank 0 saves later.
            session.meet_peers()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Makes the strategy's teardown save the restored state, if nothing is left to train.

        Lightning calls no hook between the restore and that teardown, which may move a sharded module.
        """
        strategy: Any = trainer.strategy

        def teardown() -> None:
            vars(trainer.strategy).pop("teardown", None)
            has_restored = trainer.ckpt_path is not None and trainer.state.status == TrainerStatus.RUNNING
            ends = of_ours(trainer) if has_restored and not self._has_trained else []
            for each in ends:
                each._save_what_is_in_memory_alone(trainer)
            strategy.teardown()

        if of_ours(trainer):
            strategy.teardown = teardown

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Counts the epoch as it was left; notes in the IO if training can't resume from the next save.

        After an evaluation the module may hold weights of another step than the optimizers' states.
        """
        if (io := tiered_io_of(trainer.strategy.checkpoint_io)) is None:
            return
        count_epoch_as_it_ended(trainer, checkpoint)
        io.mixes_steps = io.holds_other_weights or trainer.state.fn != TrainerFn.FITTING
        if io.mixes_steps and trainer.is_global_zero:
            held = "averaged or best weights" if io.holds_other_weights else "evaluated weights"
            text = f"this checkpoint has {held}, and can't be resumed: {ids.LATEST} skips it. Load it by name."
            io.checkpointer.session.warn("mixed steps", text)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Warns on rank 0 of checkpoints that ``fit`` did not resume from."""
        self._has_trained = True
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return
        session = io.checkpointer.session
        io.holds_other_weights = False
        self._recording.begin(trainer.local_rank, trainer.global_step, session)
        # A strategy that trains shards and saves one file does not show how large that is.
        shards: bool | None = getattr(trainer.strategy, "_saves_shards", None)
        self._began_at = trainer.global_step
        self._prepares = any(_saves(trainer)) and (trainer.is_global_zero if shards is None else shards)
        if trainer.is_global_zero:
            self._warn_of_fresh_start(trainer, io)

    def _warn_of_fresh_start(self, trainer: Trainer, io: TieredCheckpointIO) -> None:
        # In setup, Lightning does not show ckpt_path yet. If tiered:latest finds no checkpoint, there is no name.
        looked_for_last = trainer.ckpt_path in (ids.LAST, ids.LAST_URL) and io.found_nothing
        engine, session = io.checkpointer, io.checkpointer.session
        is_first = session.last_save is None and engine.restored is None and "ckpt_path" not in session.warned
        if (trainer.ckpt_path is not None and not looked_for_last) or io.config.preflight == "off" or not is_first:
            return
        session.warned.add("ckpt_path")
        found = newest(session)
        if found is not None:
            why = "fit was called without ckpt_path"
            if looked_for_last:
                why = "there is no last checkpoint (save_last is off, or it was not yet saved)"
            elif self._adopted:
                why += ", or with 'last', which Lightning's own ModelCheckpoint can't find there"
            session.log.warning(
                "%s, so training does not resume; ckpt_path=%r would resume from %s (step %d, %s tier)",
                why,
                ids.LATEST,
                found.name,
                found.content.step,
                "memory" if found.held else "durable",
            )

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Notes the step, every few seconds; after the first step, makes room for the first save.

        By then the optimizers have their states, and training has its memory.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return
        self._recording.reach(trainer.global_step, io.checkpointer.session)
        if self._prepares and trainer.global_step > self._began_at:
            self._prepares = False
            io.checkpointer.prepare(size_here(trainer.lightning_module, trainer.optimizers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the end; notes that averaging callbacks replace the weights by their averages from here on."""
        self._has_ended = True
        for each in of_ours(trainer):
            each._save_end(trainer, pl_module)
        if (io := tiered_io_of(trainer.strategy.checkpoint_io)) is not None:
            io.holds_other_weights = bool(of_classes(trainer, "WeightAveraging")) or any(
                each._average_model is not None and (each._max_epochs == -1 or trainer.current_epoch > each.swa_end)
                for each in of_classes(trainer, "StochasticWeightAveraging")
            )

    # A long validation is no silence.
    on_validation_batch_end = on_train_batch_end  # type: ignore[assignment]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        for each in of_ours(trainer):
            each._is_validating = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Refuses an evaluation without a checkpoint, if training would start from scratch."""
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None or trainer.state.fn == TrainerFn.FITTING:
            return
        if trainer.ckpt_path is not None and io.found_nothing:
            named = "that is named last " if trainer.ckpt_path in (ids.LAST, ids.LAST_URL) else ""
            raise CheckpointNotFoundError(
                f"there is no checkpoint {named}to resume from at {io.config.dirpath}",
                operation="load",
                key=str(trainer.ckpt_path),
                hint="weights alone are loaded by their names: see `tiered-ckpt ls`",
            )

    on_test_start = on_predict_start = on_validation_start

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        """Logs the tiers of the newest checkpoints: Lightning calls no teardown after an exception, or Ctrl-C."""
        say_summary_last(trainer, self, exception)
        self._end(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves a training that has left a batch; logs the tiers of the newest checkpoints.

        By this hook Lightning's tuner ends its trials, and NeMo's time limit a training, without ``on_train_end``.
        """
        vars(trainer.strategy).pop("teardown", None)
        if stage == "fit":
            # No teardown follows an exception.
            if self._has_trained and not self._has_ended and trainer.state.status == TrainerStatus.RUNNING:
                self._has_ended = True
                for each in of_ours(trainer):
                    each._save_where_it_left(trainer, pl_module)
            say_summary(trainer)
            self._end(trainer)

    def _end(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        if self._overlapping is not None:
            self._overlapping.leave(trainer)
            self._overlapping = None
        if (io := tiered_io_of(trainer.strategy.checkpoint_io)) is not None:
            self._recording.end(trainer.global_step, io.checkpointer.session, exception)


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


def ensure_guard(trainer: Trainer) -> None:
    """Adds the guard to a trainer that was made before anything of ours was imported."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(each, StrategyGuard) for each in callbacks):
        callbacks.insert(0, StrategyGuard())


def _count_as_last(trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Makes ``ckpt_path="last"`` also mean checkpoints of OnExceptionCheckpoint, except for ordinary files."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    paths = [each.ckpt_path for each in callbacks if isinstance(each, OnExceptionCheckpoint)]
    names = [ids.name_in(io.config.dirpath, path) for path in paths if not io._is_elsewhere(path)]
    io.checkpointer.also_last = frozenset(names)


def _place(callback: ModelCheckpoint, trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Turns Lightning's own ModelCheckpoint into ours, the same object: the user may ask it for its best path."""
    root, folder = io.config.dirpath, folder_of(callback.dirpath, io.config.dirpath)
    if folder is None:
        raise ConfigError(
            f"ModelCheckpoint(dirpath={str(callback.dirpath)!r}) does not save below TieredCheckpointIO's dirpath"
            f" {root!r}",
            operation="setup",
            hint="leave the callback's dirpath out, or name a folder below the IO's",
        )
    TieredModelCheckpoint.adopt(callback, folder)
    if trainer.is_global_zero:
        io.checkpointer.session.log.info(
            "ModelCheckpoint saves below %s; tiered_checkpoint_io.callbacks.TieredModelCheckpoint in its place"
            " also saves to node memory, every memory_every_n_train_steps",
            folder,
        )


def _saves(trainer: Trainer) -> tuple[bool, bool]:
    """Returns whether callbacks save only to memory, and whether to both tiers; foreign classes count as durable."""
    callbacks = trainer.checkpoint_callbacks
    memory = any(getattr(each, "memory_every_n_train_steps", None) for each in callbacks)
    return memory, any(
        not isinstance(each, ModelCheckpoint) or each.save_top_k != 0 or bool(each.save_last) for each in callbacks
    )


def _need(trainer: Trainer, module: LightningModule) -> Need:
    """Returns the needs of a training's saves, by the module as it is before its strategy sets it up."""
    tensors = [each for each in (*module.parameters(), *module.buffers()) if not torch.nn.parameter.is_lazy(each)]
    weights = sum(each.numel() * each.element_size() for each in tensors)
    is_sharded = any(kind.__name__ == "TieredSharding" for kind in type(trainer.strategy).__mro__)
    memory_steps, durable_steps = _saves(trainer)
    return Need(
        node_bytes=weights // trainer.num_nodes if is_sharded else weights,
        # Adam keeps two values for each parameter.
        file_bytes=3 * weights // (trainer.world_size if is_sharded else 1),
        memory_steps=memory_steps,
        durable_steps=durable_steps,
    )
