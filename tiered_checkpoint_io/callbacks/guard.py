"""What is checked before the first batch of any training: the strategy, ModelCheckpoint's place, the durable tier."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from tiered_checkpoint_io.adapters.io_of import tiered_io_of
from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.callbacks.ending import count_epoch_as_it_ended
from tiered_checkpoint_io.callbacks.held_weights import HeldWeights
from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.on_exception import count_as_last
from tiered_checkpoint_io.callbacks.overlapping import OverlappedCapture
from tiered_checkpoint_io.callbacks.places import folder_of
from tiered_checkpoint_io.callbacks.preparing import FirstSave
from tiered_checkpoint_io.callbacks.requeue import take_over_requeue
from tiered_checkpoint_io.callbacks.summary import say_summary, say_summary_last
from tiered_checkpoint_io.callbacks.trainer import check_strategy, of_classes, on_rank_0
from tiered_checkpoint_io.engine.preflight import Need, newest, preflight
from tiered_checkpoint_io.engine.ranks.coordination import train_here
from tiered_checkpoint_io.engine.restore.loaders import report_left_out
from tiered_checkpoint_io.engine.restore.restore import Restored
from tiered_checkpoint_io.errors import CheckpointNotFoundError, UsageError
from tiered_checkpoint_io.metrics.recording import Recording
from tiered_checkpoint_io.model import ids


class StrategyGuard(Callback):
    """Looks after any trainer that has our checkpoint IO, whatever its callbacks are.

    A stock sharded strategy never asks its checkpoint IO, and would write to a local folder ``./s3:/``
    without a word: it is refused. Lightning's default ModelCheckpoint would save outside dirpath, which the IO can't:
    it is given its place. Lightning adds this callback by the entry point of this package: see ``entry_points``.
    What saves will need is tried before the first batch: see :func:`preflight`.
    Where parts have copies in the memory of peers, it also is where the ranks meet. Under Slurm's automatic requeue,
    the last checkpoint goes to the tiers, and the next start resumes from there: see :mod:`requeue`.
    """

    #: See :func:`say_summary_last`.
    says_summary = True

    def __init__(self) -> None:
        self._recording = Recording()
        self._first_save = FirstSave()
        self._overlapping: OverlappedCapture | None = None
        #: Whether a callback was Lightning's own when ckpt_path was resolved.
        self._adopted = False
        self._held = HeldWeights()
        #: What was restored last before an evaluation.
        self._restored: Restored | None = None
        #: Lightning's own callbacks that have no dirpath, where nothing is trained.
        self._without_dirpath: list[ModelCheckpoint] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses what would go past our checkpoint IO; has ranks meet that keep each other's copies.

        Raises:
            UsageError: A strategy does, or a ModelCheckpoint; or there are fewer machines than ``replication_factor``.
            StoreError, ConfigError, MemoryTierError: As :func:`preflight`, on all ranks.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return
        check_strategy(trainer.strategy)
        train_here()
        count_as_last(trainer, io)
        if stage == "fit":
            for callback in trainer.checkpoint_callbacks:
                # Classes derived from it are their authors' business.
                if type(callback) is ModelCheckpoint:
                    _place(callback, trainer, io)
                    self._adopted = True
            on_rank_0(trainer, lambda: preflight(io.checkpointer.session, _need(trainer, pl_module)))
            take_over_requeue(trainer, pl_module, io)
            if io.config.staging != "eager":
                self._overlapping = OverlappedCapture.join(trainer, io)
        else:
            self._restored = io.checkpointer.restored
            stock = [each for each in trainer.checkpoint_callbacks if type(each) is ModelCheckpoint]
            self._without_dirpath = [each for each in stock if each.dirpath is None]
        if stage == "fit" and io.config.replication_factor > 1:
            # All ranks are here, on the threads that train; of a full checkpoint, rank 0 alone saves later.
            io.checkpointer.session.meet_peers()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Notes, where a module is to be trained, that it has got the checkpoint's weights; all else of it follows."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._held.train(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Counts the epoch as it was left, and tells the IO whether training can resume from what comes next.

        Warns once where the weights of an evaluation, or of the best checkpoint, are why not.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is not None:
            count_epoch_as_it_ended(trainer, checkpoint)
            io.mixes_steps = self._held.are_others(pl_module)
            if io.mixes_steps and trainer.is_global_zero:
                self._held.warn(io.checkpointer.session.log)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns on rank 0: of what a resume leaves out, and of checkpoints that ``fit`` did not resume from."""
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return
        # Lightning has restored it by now, or never will; on all ranks alike.
        left = getattr(trainer.fit_loop, "_combined_loader_states_to_load", None) or ()
        why = "Lightning restores it only where an epoch was not finished"
        report_left_out(io.checkpointer.session, "the checkpoint", len(left), why, says=trainer.is_global_zero)
        self._held.train(pl_module)
        self._recording.begin(trainer.local_rank, trainer.global_step, io.checkpointer.session)
        self._first_save.begin(trainer)
        if not trainer.is_global_zero:
            return
        _warn_of_others(trainer, io)
        _warn_of_undone(trainer, io)
        # In setup, Lightning does not show ckpt_path yet. Where tiered:latest finds nothing, there is nothing to name.
        looked_for_last = trainer.ckpt_path in (ids.LAST, ids.LAST_URL) and io.found_nothing
        if trainer.ckpt_path is not None and not looked_for_last:
            return
        engine, session = io.checkpointer, io.checkpointer.session
        is_first = session.last_save is None and engine.restored is None and "ckpt_path" not in session.warned
        if io.config.preflight == "off" or not is_first:
            return
        session.warned.add("ckpt_path")
        found = newest(session, io.companion)
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
        """Notes the step, every few seconds (:class:`Recording`). After the first step, the first save is prepared."""
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is not None:
            self._recording.reach(trainer.global_step, io.checkpointer.session)
            self._first_save.reach(trainer, io)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the averages of callbacks which have such take the place of the weights, from here on."""
        if of_classes(trainer, "WeightAveraging") or any(
            each._average_model is not None and (each._max_epochs == -1 or trainer.current_epoch > each.swa_end)
            for each in of_classes(trainer, "StochasticWeightAveraging")
        ):
            self._held.load(pl_module)

    def on_validation_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Notes the step: a long validation is no silence."""
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is not None:
            self._recording.reach(trainer.global_step, io.checkpointer.session)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training starts from scratch where there is no checkpoint; an evaluation has no use for that.

        Raises:
            CheckpointNotFoundError: There is none.
        """
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        # Whatever form of "the newest" it has: that of "best" is another for each callback.
        if io is None or trainer.state.fn == TrainerFn.FITTING:
            return
        if trainer.ckpt_path is not None and io.found_nothing:
            said = f"there is no checkpoint to resume from at {io.config.dirpath}"
            if trainer.ckpt_path in (ids.LAST, ids.LAST_URL):
                said = f"there is no checkpoint that is named last to resume from at {io.config.dirpath}"
            raise CheckpointNotFoundError(
                said,
                operation="load",
                key=str(trainer.ckpt_path),
                hint="weights alone are loaded by their names: see `tiered-ckpt ls`",
            )
        self._note_load(trainer, pl_module, io)

    on_test_start = on_predict_start = on_validation_start

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Says where the newest checkpoints are: Lightning calls no teardown after an exception, Ctrl-C included."""
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is not None and trainer.state.fn != TrainerFn.FITTING and io.checkpointer.restored is not self._restored:
            # Perhaps between the load and the evaluation's first hook.
            self._held.load(pl_module)
        say_summary_last(trainer, self, exception)
        self._end(trainer, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Says where the newest checkpoints are, once the IO has waited for uploads."""
        if stage == "fit":
            say_summary(trainer)
            self._end(trainer)
        else:
            # An evaluation of no batches calls no other hook after the load.
            self._note_load(trainer, pl_module, tiered_io_of(trainer.strategy.checkpoint_io))
        self._forget_dirpaths()

    def _note_load(self, trainer: Trainer, pl_module: LightningModule, io: TieredCheckpointIO | None) -> None:
        """Notes whether an evaluation, whose load is over, has loaded a checkpoint into its module."""
        if io is not None and trainer.ckpt_path is not None and not io.found_nothing:
            self._held.load(pl_module)

    def _forget_dirpaths(self) -> None:
        """Where nothing is trained, Lightning gives its own callback a folder; a fit that follows would keep to it."""
        for each in self._without_dirpath:
            each.dirpath = None
        self._without_dirpath = []

    def _end(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        self._forget_dirpaths()
        if self._overlapping is not None:
            self._overlapping.leave(trainer)
            self._overlapping = None
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is not None:
            self._recording.end(trainer.global_step, io.checkpointer.session, exception)


def note_other_weights(trainer: Trainer) -> None:
    """Notes that the trained module gets the weights of a checkpoint, and nothing else of it, outside an evaluation."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, StrategyGuard):
            each._held.load(trainer.lightning_module)


def ensure_guard(trainer: Trainer) -> None:
    """Adds the guard to a trainer that was made before anything of ours was imported."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(each, StrategyGuard) for each in callbacks):
        callbacks.insert(0, StrategyGuard())


def _place(callback: ModelCheckpoint, trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Has Lightning's own ModelCheckpoint save below the IO's dirpath: to its own dirpath there, if it has one.

    It becomes one of ours, in place, because the user may hold it and ask it for its ``best_model_path``. Lightning's
    class could not do it: it looks into a remote folder by a file system of its own.

    Raises:
        UsageError: Its dirpath is elsewhere.
    """
    root, folder = io.config.dirpath, folder_of(callback.dirpath, io.config.dirpath)
    if folder is None:
        raise UsageError(
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


def _warn_of_others(trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Warns of classes derived from Lightning's ModelCheckpoint that save elsewhere: a restart would not find it."""
    for each in trainer.checkpoint_callbacks:
        if not isinstance(each, ModelCheckpoint) or isinstance(each, TieredModelCheckpoint):
            continue
        if (each.save_top_k or each.save_last) and folder_of(each.dirpath, io.config.dirpath) is None:
            io.checkpointer.session.log.warning(
                "%s saves to %s, which is not below %s: its checkpoints are in neither tier, and %s passes them by;"
                " derive the class from tiered_checkpoint_io.callbacks.TieredModelCheckpoint",
                type(each).__name__,
                each.dirpath,
                io.config.dirpath,
                ids.LATEST,
            )


def _warn_of_undone(trainer: Trainer, io: TieredCheckpointIO) -> None:
    """Warns where training begins before the step of the checkpoint that it was told to resume from.

    Lightning restores the weights, calls ``on_fit_start``, and restores the rest. In between, its tuner comes back to a
    state of its own, by which Lightning forgets what it had still to restore.
    """
    restored = io.checkpointer.restored
    if trainer.ckpt_path is None or io.found_nothing or restored is None or trainer.global_step >= restored.step:
        return
    io.checkpointer.session.log.warning(
        "training begins at step %d, though %s is of step %d: its weights are loaded, its optimizers' states and its"
        " progress are not. LearningRateFinder and BatchSizeFinder have Lightning forget them: leave these out where a"
        " training resumes",
        trainer.global_step,
        restored.name,
        restored.step,
    )


def _need(trainer: Trainer, module: LightningModule) -> Need:
    """What a training will save, by the module as it is before its strategy sets it up."""
    tensors = [each for each in (*module.parameters(), *module.buffers()) if not torch.nn.parameter.is_lazy(each)]
    weights = sum(each.numel() * each.element_size() for each in tensors)
    is_sharded = any(kind.__name__ == "TieredSharding" for kind in type(trainer.strategy).__mro__)
    callbacks = trainer.checkpoint_callbacks
    return Need(
        node_bytes=weights // trainer.num_nodes if is_sharded else weights,
        # Adam keeps two values for each parameter.
        file_bytes=3 * weights // (trainer.world_size if is_sharded else 1),
        memory_steps=any(getattr(each, "memory_every_n_train_steps", None) for each in callbacks),
        # What the classes of others do is their authors' business.
        durable_steps=any(
            not isinstance(each, ModelCheckpoint) or each.save_top_k != 0 or bool(each.save_last) for each in callbacks
        ),
    )
