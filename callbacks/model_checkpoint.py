"""TieredModelCheckpoint: Lightning's ModelCheckpoint, with memory steps between durable ones."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from tiered_checkpoint_io.adapters.lightning import require_tiered_io
from tiered_checkpoint_io.callbacks.deletes import SafeDeletes
from tiered_checkpoint_io.callbacks.reporting import Reporter, log_drain
from tiered_checkpoint_io.callbacks.sentinel import NOWHERE
from tiered_checkpoint_io.callbacks.trainer import (
    check_every,
    check_strategy,
    fail_together,
    is_below,
    on_rank_0,
    tiers_for_step,
)
from tiered_checkpoint_io.engine.drain.progress import SaveReport
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    DrainError,
    StoreError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: ModelCheckpoint's arguments that say when it saves, of which it takes one.
_TRIGGERS = ("every_n_train_steps", "every_n_epochs", "train_time_interval")


class TieredModelCheckpoint(SafeDeletes):
    """A ModelCheckpoint whose own checkpoints are durable, with cheap memory steps in between.

    All that ModelCheckpoint does (monitor, top-k, save_last, triggers, on_exception) holds for the
    durable tier. Memory steps are never in the top-k, have names of their own, and hold the whole
    training state even where ``save_weights_only`` is set, because they are there to resume from.

    Until a run begins, ``best_model_path`` is a URL that loads the best checkpoint there is.
    """

    def __init__(
        self,
        dirpath: Any = None,
        *,
        memory_every_n_train_steps: int | None = None,
        s3_every_n_train_steps: int | None = None,
        **model_checkpoint_args: Any,
    ) -> None:
        """Takes ModelCheckpoint's arguments, and two more.

        Args:
            dirpath: The IO's by default; otherwise a folder below it.
            memory_every_n_train_steps: A checkpoint to memory alone every so many steps.
            s3_every_n_train_steps: A durable one every so many steps; None leaves that to
                ModelCheckpoint's other triggers.
            model_checkpoint_args: Anything that ModelCheckpoint takes.

        Raises:
            ConfigError: A value is not allowed.
            InvalidNameError: dirpath is not a folder or URL.
        """
        check_every("memory_every_n_train_steps", memory_every_n_train_steps)
        check_every("s3_every_n_train_steps", s3_every_n_train_steps)
        if s3_every_n_train_steps is not None:
            if model_checkpoint_args.get("every_n_train_steps") is not None:
                raise ConfigError(
                    "both s3_every_n_train_steps and every_n_train_steps are set", hint="they mean the same: set one"
                )
            model_checkpoint_args["every_n_train_steps"] = s3_every_n_train_steps
        # Upstream opens the file system of a dirpath that it is given; the IO does all of that here.
        super().__init__(dirpath=None, **model_checkpoint_args)
        self.dirpath = None if dirpath is None else ids.normalize_dirpath(dirpath)
        self.memory_every_n_train_steps = memory_every_n_train_steps
        self.s3_every_n_train_steps = s3_every_n_train_steps
        self._begin()

    @classmethod
    def adopt(cls, stock: ModelCheckpoint) -> None:
        """Makes one of ours of Lightning's own, not of a derived class, before its ``setup``; without memory steps."""
        stock.__class__ = cls
        assert isinstance(stock, TieredModelCheckpoint)
        stock.memory_every_n_train_steps = stock.s3_every_n_train_steps = None
        stock._begin()

    def _begin(self) -> None:
        """The state of a callback that has done nothing yet."""
        if self.save_last == "link":
            # An alias is what a link would be, on every tier.
            self.save_last = True
        super()._begin()
        self._last_memory_step = -1
        #: The step and path of the newest durable save of this callback's own.
        self._durable_save: tuple[int, str] = (-1, "")
        self._naming_last = False
        self._ask_exists = True
        self._polled = 0.0
        self._reporter = Reporter(self)
        self._promise_best()

    @classmethod
    def from_config(cls, block: Any, **model_checkpoint_args: Any) -> TieredModelCheckpoint:
        """The callback that ``s3_checkpointing``, in any of its forms, describes; with ModelCheckpoint's arguments.

        An argument replaces the block's value; ``every_n_train_steps``, ``every_n_epochs`` and
        ``train_time_interval`` replace ``s3_every_n_train_steps``.

        Raises:
            ConfigError: A key or value is not allowed.
        """
        config = TieredCheckpointConfig.from_any(block)
        described: dict[str, Any] = {
            "dirpath": config.dirpath,
            "memory_every_n_train_steps": config.memory_every_n_train_steps,
        }
        if all(model_checkpoint_args.get(trigger) is None for trigger in _TRIGGERS):
            described["s3_every_n_train_steps"] = config.s3_every_n_train_steps
        return cls(**{**described, **model_checkpoint_args})

    # ------------------------------------------------------------------------------------ hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes the trainer's checkpoint IO.

        Raises:
            UsageError: It is not ours, or the strategy would go past it; or another live run writes to the same
                dirpath and namespace.
            ConfigError: The callback's dirpath is not below the IO's, or differs between ranks.
        """
        io = require_tiered_io(trainer.strategy, "TieredModelCheckpoint")
        check_strategy(trainer.strategy)
        root = io.config.dirpath
        dirpath = root if self.dirpath is None else str(self.dirpath)
        if not trainer.strategy.reduce_boolean_decision(dirpath == trainer.strategy.broadcast(dirpath)):
            raise ConfigError(
                f"dirpath differs between ranks; here it is {dirpath!r}",
                hint="it must not depend on the rank or the time of day",
            )
        if not is_below(f"{dirpath}/x", root):
            raise ConfigError(
                f"the callback's dirpath {dirpath!r} is not below the IO's {root!r}",
                hint="leave the callback's dirpath out",
            )
        if stage == "fit":
            # Before anything is trained: whether another run writes there.
            on_rank_0(trainer, io.checkpointer.session.claims.claim)
        self._io = io
        self._ask_exists = True
        if ids.parse_best_url(self.best_model_path) is not None:
            self.best_model_path = ""
        # Upstream looks into the folder here; ours holds many checkpoints by design, and is remote.
        self.dirpath = NOWHERE
        try:
            super().setup(trainer, pl_module, stage)
        finally:
            self.dirpath = dirpath

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage != "fit":
            self._promise_best()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            self._reporter.start(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        step = trainer.global_step
        tiers = tiers_for_step(step, self.memory_every_n_train_steps, self.s3_every_n_train_steps)
        # A durable step whose save upstream put off, or did not want, is a memory step still.
        if "memory" in tiers and not (self._should_skip_saving_checkpoint(trainer) or self._saved(trainer, step)):
            self._last_memory_step = step
            name = f"memory/epoch={trainer.current_epoch}-step={step}{self.FILE_EXTENSION}"
            self._save(trainer, ids.join_url(self._engine.dirpath, name), {"tiers": ["memory"]}, weights_only=False)
        clock = self._engine.session.clock
        if clock.monotonic() - self._polled > clock.timing.outcome_poll_s:
            self._look_after(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            # What cannot be finished is shown by the IO's teardown, and taken up by the next start.
            with contextlib.suppress(DrainError):
                self._engine.wait()
        self._look_after(trainer)
        self._reporter.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An exception in another callback's setup leaves this one without its IO.
        if self._io is not None:
            super().on_exception(trainer, pl_module, exception)
        self._reporter.stop()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Training starts from scratch where there is no checkpoint; an evaluation has no use for that."""
        sentinels = (ids.LATEST, ids.LAST, ids.LAST_URL)
        if trainer.state.fn == TrainerFn.FITTING or trainer.ckpt_path not in sentinels:
            return
        if self._io is not None and self._io.found_nothing:
            raise CheckpointNotFoundError(
                f"there is no checkpoint at {self._io.config.dirpath}", operation="load", key=str(trainer.ckpt_path)
            )

    on_test_start = on_predict_start = on_validation_start

    # ----------------------------------------------------------- what ModelCheckpoint does, our way
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        step = trainer.global_step
        name = ids.name_in(self._engine.dirpath, filepath)
        if self._naming_last and self._durable_save[0] == step:
            # The same state is durable, or on its way, under its own name. Where that failed, the
            # old alias stays, and goes on to name what is good.
            if trainer.is_global_zero and self._landed:
                self._alias(filepath, self._durable_save[1])
                self._reporter.expect(name, pending=self._engine.is_pending(name))
        else:
            options: dict[str, Any] = {"tiers": ["memory", "durable"]}
            value = trainer.callback_metrics.get(self.monitor) if self.monitor is not None else None
            if value is not None:
                options["metric"] = (self.monitor, float(value))
            report = self._save(trainer, filepath, options, weights_only=self.save_weights_only)
            self._landed = report is not None and "durable" in report.tiers
            if not self._naming_last:
                self._durable_save = (step, filepath)
            if self._landed:
                self._reporter.expect(name, pending=self._engine.is_pending(name))
                self._remove_withheld(trainer)
        self._last_global_step_saved = step
        self._last_checkpoint_saved = filepath
        self._look_after(trainer)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        self._naming_last = True
        try:
            super()._save_last_checkpoint(trainer, monitor_candidates)
        finally:
            self._naming_last = False

    def file_exists(self, filepath: Any, trainer: Trainer) -> bool:
        """As upstream, from what rank 0 knows: one LIST at first use, none later."""
        if self._naming_last:
            # Overwriting is atomic here, so that "last" needs no versions.
            return False
        exists = False
        if trainer.is_global_zero and self._ask_exists:
            try:
                exists = self._engine.exists(filepath)
            except StoreError as error:
                # Overwriting keeps the old content until the new is good, so training need not stop.
                self._ask_exists = False
                rank_zero_warn(f"names of this run may repeat those of earlier ones: {error}")
        return bool(trainer.strategy.broadcast(exists))

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:  # noqa: ARG002
        return {ids.LAST_URL}

    def to_yaml(self, filepath: Any = None) -> None:
        """As upstream: writes the paths and scores of the best to a YAML file."""
        self._fs = get_filesystem(filepath or self.dirpath or "")
        super().to_yaml(filepath)

    # ----------------------------------------------------------------------------------- inside
    def _promise_best(self) -> None:
        """Lets ``ckpt_path="best"`` find, in a process that has not trained, what earlier ones saved."""
        self.best_model_path = self.best_model_path or ids.best_url(self.monitor, self.mode)

    def _save(
        self, trainer: Trainer, filepath: str, options: dict[str, Any], *, weights_only: bool
    ) -> SaveReport | None:
        """Saves on all ranks, or raises the same error on all.

        Returns:
            None where the save failed, and on all ranks but the first.
        """
        error: TieredCheckpointError | None = None
        before = self._engine.progress().last_save if trainer.is_global_zero else None
        try:
            trainer.save_checkpoint(filepath, weights_only, storage_options=options)
        except TieredCheckpointError as caught:
            error = caught
            if trainer.world_size > 1:
                # The other ranks wait in the barrier by which Trainer.save_checkpoint ends.
                trainer.strategy.barrier("Trainer.save_checkpoint")
        fail_together(trainer, error)
        if not trainer.is_global_zero:
            return None
        progress = self._engine.progress()
        report = progress.last_save if progress.last_save is not before else None
        self._reporter.saved(trainer, progress, report)
        return report

    def _saved(self, trainer: Trainer, step: int) -> bool:
        """Whether this step is saved already, by this callback or another of its kind.

        Gradient accumulation shows the same step for several batches.
        """
        others = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, TieredModelCheckpoint)]
        return any(step in (other._last_global_step_saved, other._last_memory_step) for other in others)

    def _alias(self, filepath: str, target: str) -> None:
        """Makes one path stand for what is saved at another."""
        self._engine.alias(filepath, target)

    def _look_after(self, trainer: Trainer) -> None:
        """Hears what the drain did, and passes it on to every callback of this kind."""
        self._polled = self._engine.session.clock.monotonic()
        if not trainer.is_global_zero:
            return
        outcomes = self._engine.poll()
        progress = self._engine.progress()
        log_drain(trainer, outcomes)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, TieredModelCheckpoint):
                shown = {ids.name_in(self._engine.dirpath, path) for path in callback._named() if self._is_ours(path)}
                callback._reporter.hear(trainer, outcomes, progress, shown=shown, is_pending=self._engine.is_pending)
