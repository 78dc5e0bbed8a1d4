"""TieredModelCheckpoint: Lightning's ModelCheckpoint, with memory steps between durable ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from weakref import proxy

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.adapters.lightning import engine_of
from tiered_checkpoint_io.callbacks import sentinel  # noqa: F401 - registers the sentinel's file system
from tiered_checkpoint_io.callbacks.progress import ProgressLine, metrics_of
from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.errors import ConfigError, InvalidNameError, StoreError, UsageError

_POLL_S = 1.0
_BYPASSING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAStrategy")


def tiers_for_step(
    global_step: int, memory_every_n_train_steps: int | None, s3_every_n_train_steps: int | None
) -> frozenset[str]:
    """The tiers that a training step is saved to: a function of the step alone, so that all ranks agree.

    ``{"memory", "durable"}`` on multiples of ``s3_every_n_train_steps``, else ``{"memory"}`` on
    multiples of ``memory_every_n_train_steps``, else nothing.
    """
    if global_step <= 0:
        return frozenset()
    if s3_every_n_train_steps and global_step % s3_every_n_train_steps == 0:
        return frozenset({"memory", "durable"})
    if memory_every_n_train_steps and global_step % memory_every_n_train_steps == 0:
        return frozenset({"memory"})
    return frozenset()


class TieredModelCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose own checkpoints are durable, with cheap memory steps in between.

    All that ModelCheckpoint does (monitor, top-k, save_last, triggers, on_exception) holds for the
    durable tier. Memory steps are never in the top-k and have names of their own.
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
        """
        for key, value in (
            ("memory_every_n_train_steps", memory_every_n_train_steps),
            ("s3_every_n_train_steps", s3_every_n_train_steps),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{key} is {value!r}", hint="allowed: a whole number from 1, or None")
        if s3_every_n_train_steps is not None:
            if model_checkpoint_args.get("every_n_train_steps") is not None:
                raise ConfigError(
                    "both s3_every_n_train_steps and every_n_train_steps are set", hint="they mean the same: set one"
                )
            model_checkpoint_args["every_n_train_steps"] = s3_every_n_train_steps
        if model_checkpoint_args.get("save_last") == "link":
            # An alias is what a link would be, on every tier.
            model_checkpoint_args["save_last"] = True
        super().__init__(dirpath=dirpath, **model_checkpoint_args)
        self.memory_every_n_train_steps = memory_every_n_train_steps
        self.s3_every_n_train_steps = s3_every_n_train_steps
        self._engine: Checkpointer | None = None
        self._last_memory_step = -1
        self._durable_save: tuple[int, str] = (-1, "")
        self._naming_last = False
        self._untold: set[str] = set()
        self._polled = 0.0
        self._logged_save = ""
        self._line = ProgressLine()

    @classmethod
    def from_config(cls, block: Any, **model_checkpoint_args: Any) -> TieredModelCheckpoint:
        """The callback that a configuration block describes.

        Args:
            block: ``s3_checkpointing``: a mapping, an OmegaConf block or a TieredCheckpointConfig.
            model_checkpoint_args: Anything that ModelCheckpoint takes.
        """
        config = TieredCheckpointConfig.from_any(block)
        model_checkpoint_args.setdefault("dirpath", config.dirpath)
        return cls(
            memory_every_n_train_steps=config.memory_every_n_train_steps,
            s3_every_n_train_steps=config.s3_every_n_train_steps,
            **model_checkpoint_args,
        )

    # ------------------------------------------------------------------------------------ hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        engine = engine_of(trainer.strategy.checkpoint_io)
        if engine is None:
            raise UsageError(
                f"TieredModelCheckpoint with a {type(trainer.strategy.checkpoint_io).__name__}",
                operation="setup",
                hint="give the trainer plugins=[TieredCheckpointIO(...)], or AsyncCheckpointIO around it",
            )
        bypassing = [kind.__name__ for kind in type(trainer.strategy).__mro__ if kind.__name__ in _BYPASSING]
        if bypassing:
            raise UsageError(
                f"{type(trainer.strategy).__name__} writes its shards past the checkpoint IO",
                operation="setup",
                hint="this release serves single devices and DDP; sharded strategies come with TieredFSDPStrategy and"
                " TieredModelParallelStrategy",
            )
        self._engine = engine
        if self.dirpath is None:
            self.dirpath = engine.dirpath
        elif str(self.dirpath).rstrip("/") != engine.dirpath:
            try:
                ids.name_in(engine.dirpath, ids.join_url(str(self.dirpath), "x"))
            except InvalidNameError as error:
                raise ConfigError(
                    f"the callback's dirpath {self.dirpath!r} is not below the IO's {engine.dirpath!r}",
                    hint="leave the callback's dirpath out",
                ) from error
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            self._line.attach(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        step = trainer.global_step
        tiers = tiers_for_step(step, self.memory_every_n_train_steps, self.s3_every_n_train_steps)
        # Gradient accumulation shows the same step for several batches.
        if "memory" in tiers and step not in (self._last_global_step_saved, self._last_memory_step):
            self._last_memory_step = step
            if not self._should_skip_saving_checkpoint(trainer):
                name = f"memory/epoch={trainer.current_epoch}-step={step}{self.FILE_EXTENSION}"
                self._save(trainer, ids.join_url(self._tiers.dirpath, name), {"tiers": ["memory"]})
        if time.monotonic() - self._polled > _POLL_S:
            self._look_after(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if trainer.is_global_zero:
            # What cannot be finished is shown by the IO's teardown, and taken up by the next start.
            with contextlib.suppress(Exception):
                self._tiers.wait()
        self._look_after(trainer)
        self._line.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._engine is not None:
            super().on_exception(trainer, pl_module, exception)
        self._line.detach()

    # ----------------------------------------------------------- what ModelCheckpoint does, our way
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        step = trainer.global_step
        if self._naming_last and self._durable_save[0] == step and self.save_top_k != 0:
            # The same state is durable, or on its way, under its own name.
            if trainer.is_global_zero:
                self._tiers.alias(filepath, self._durable_save[1])
        else:
            options: dict[str, Any] = {"tiers": ["memory", "durable"]}
            if self.monitor is not None and self.current_score is not None:
                options["metric"] = (self.monitor, float(self.current_score))
            self._save(trainer, filepath, options)
            if not self._naming_last:
                self._durable_save = (step, filepath)
        self._last_global_step_saved = step
        self._last_checkpoint_saved = filepath
        self._untold.add(ids.name_in(self._tiers.dirpath, filepath))
        self._look_after(trainer)

    def _save(self, trainer: Trainer, filepath: str, options: dict[str, Any]) -> None:
        trainer.save_checkpoint(filepath, self.save_weights_only, storage_options=options)
        self._log_save(trainer)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._as_last():
            super()._save_last_checkpoint(trainer, monitor_candidates)

    @contextlib.contextmanager
    def _as_last(self) -> Iterator[None]:
        self._naming_last = True
        try:
            yield
        finally:
            self._naming_last = False

    def file_exists(self, filepath: Any, trainer: Trainer) -> bool:
        """As upstream, from what rank 0 knows: one LIST at first use, none later."""
        if self._naming_last:
            # Overwriting is atomic here, so that "last" needs no versions.
            return False
        exists = False
        if trainer.is_global_zero:
            try:
                exists = self._tiers.exists(filepath)
            except StoreError:
                # Overwriting keeps the old content until the new is good; not knowing is no harm.
                exists = False
        return bool(trainer.strategy.broadcast(exists))

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:  # noqa: ARG002
        if previous == current:
            return False
        restored = self._tiers.restored
        name = ids.name_in(self._tiers.dirpath, previous)
        # What the run resumed from stays: until a newer one is good it may be all there is.
        return restored is None or restored.name != name

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:  # noqa: ARG002
        return {ids.LAST_URL}

    def _ModelCheckpoint__warn_if_dir_not_empty(self, dirpath: Any) -> None:  # noqa: N802
        """Upstream lists the folder here; ours may hold many checkpoints, by design, and is remote."""

    @property
    def _tiers(self) -> Checkpointer:
        if self._engine is None:
            raise UsageError("TieredModelCheckpoint is used before setup", operation="save")
        return self._engine

    # ------------------------------------------------------------------------------- after saving
    def _look_after(self, trainer: Trainer) -> None:
        """Tells loggers of what became durable, and logs what the drain did."""
        self._polled = time.monotonic()
        if not trainer.is_global_zero or self._engine is None:
            return
        told = False
        for outcome in self._engine.poll():
            if outcome.state == "committed" and outcome.action == "save":
                self._log(trainer, {"checkpoint/drain_s": outcome.seconds})
            if outcome.state == "committed" and outcome.name in self._untold:
                self._untold.discard(outcome.name)
                told = True
            elif outcome.state == "skipped":
                self._untold.discard(outcome.name)
        # A synchronous save has waited for its own outcome, which therefore is not polled.
        pending = {request for request in self._untold if not self._engine.is_pending(request)}
        if told or pending:
            self._untold -= pending
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))
        self._line.update(self._engine.progress())

    def _log_save(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        progress = self._tiers.progress()
        if progress.last_save is not None and progress.last_save.save_id != self._logged_save:
            self._logged_save = progress.last_save.save_id
            self._log(trainer, metrics_of(progress))
        self._line.update(progress)

    @staticmethod
    def _log(trainer: Trainer, metrics: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
