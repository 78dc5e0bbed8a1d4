"""TieredModelCheckpoint: Lightning's ModelCheckpoint, with memory steps between durable ones."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import Unpack

from tiered_checkpoint_io.adapters.lightning import AsyncCheckpointIO, FreshStart, TieredCheckpointIO, require_tiered_io
from tiered_checkpoint_io.callbacks.reporting import log_drain, log_save, notify_loggers, say_summary_last
from tiered_checkpoint_io.callbacks.trainer import (
    SentinelFileSystem,
    all_failed,
    check_dirpath,
    check_places,
    check_retention,
    check_strategy,
    failing_together,
    is_below,
    of_rank_0,
    on_rank_0,
    trained_weights,
)
from tiered_checkpoint_io.engine.checkpointer import Checkpointer, passes, tiers_for_step
from tiered_checkpoint_io.engine.drain.status import SaveReport, looking
from tiered_checkpoint_io.engine.save.facts import last_saves
from tiered_checkpoint_io.errors import ConfigError, DrainError, StoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig, as_mapping, check_positive, refuse_keys_of_others
from tiered_checkpoint_io.model.config import keys as config_keys

#: Keys of the configuration that it reads.
_KEYS = ("dirpath", "memory_every_n_train_steps", "s3_every_n_train_steps", "save_on_train_end")
#: ModelCheckpoint's arguments that say when it saves, of which it takes one.
_TRIGGERS = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
#: A durable tier that was silent is asked again for names after so many times ``durable_timeout_s``.
_REST = 10
#: The key that our state has, and Lightning's has not.
_WITHHELD = "withheld"
#: The name of the checkpoint of the end of training below dirpath, without its ending; the next one replaces it. NeMo
#: takes names that end in "end" for the mark of a training that must not continue.
_END_NAME = "end_of_training"


def progress_of(trainer: Trainer) -> tuple[int, int]:
    """Returns the step, and the batches that are completed: NeMo counts the one that ends before it saves "last"."""
    return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.current.completed


class _Others(TypedDict, total=False):
    """ModelCheckpoint's arguments that are passed on."""

    save_on_exception: bool
    save_weights_only: bool
    mode: str
    auto_insert_metric_name: bool
    every_n_train_steps: int | None
    train_time_interval: timedelta | None
    every_n_epochs: int | None
    save_on_train_epoch_end: bool | None
    enable_version_counter: bool


class TieredModelCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose own checkpoints are durable, with cheap memory steps in between.

    All that ModelCheckpoint does (monitor, top-k, save_last, triggers, on_exception) holds for the durable tier. Memory
    steps are never in the top-k, and hold the whole training state even with ``save_weights_only``.

    A checkpoint is deleted only once its replacement is on the durable tier. A delete names the newest save, and the
    drain deletes once this save is committed. If a save is given up, the old checkpoint stays: one too many, which
    ``tiered-ckpt prune`` finds, and never one too few. A later run deletes the checkpoint that this run resumed from;
    checkpoints outside dirpath are never deleted.

    Args:
        dirpath: The IO's by default; otherwise a folder below it.
        filename: The pattern of the names, as ``{epoch}-{val_loss:.2f}``; ``{epoch}-{step}`` by default.
        monitor: The logged value by which checkpoints are the best; None for the newest.
        verbose: Prints each decision on the best checkpoints.
        save_last: Has the durable tier copy the newest durable checkpoint to ``last.ckpt``, without an upload.
            ``"link"`` makes an alias, which only this package loads; so does True of a sharded checkpoint.
        save_top_k: Number of the best that are kept; 0 for none, -1 for all.
        memory_every_n_train_steps: Optimizer steps between memory-only checkpoints; None for none.
        s3_every_n_train_steps: Optimizer steps between durable checkpoints; None for the other triggers.
        save_on_train_end: Saves the last state to S3 as ``end_of_training.ckpt`` when ``fit`` ends, if the newest
            checkpoint to resume from is only in memory. Must be true in the IO's configuration too.
        arguments: ModelCheckpoint's others. ``every_n_train_steps`` means the same as ``s3_every_n_train_steps``;
            ``save_weights_only`` is about durable checkpoints.

    Raises:
        ConfigError: A value is not allowed, or this Lightning's ModelCheckpoint has no such argument. dirpath is not a
            folder or URL.
        MisconfigurationException: Lightning refuses a value.
    """

    says_summary = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        *,
        memory_every_n_train_steps: int | None = None,
        s3_every_n_train_steps: int | None = None,
        save_on_train_end: bool = True,
        **arguments: Unpack[_Others],
    ) -> None:
        others = {key: "TieredCheckpointIO takes it" for key in config_keys() if key not in _KEYS}
        known = {**inspect.signature(ModelCheckpoint).parameters, **dict.fromkeys(_KEYS)}
        refuse_keys_of_others(arguments, type(self).__name__, others, known)
        check_positive("memory_every_n_train_steps", memory_every_n_train_steps)
        check_positive("s3_every_n_train_steps", s3_every_n_train_steps)
        if not isinstance(save_on_train_end, bool):
            raise ConfigError(f"save_on_train_end is {save_on_train_end!r}", hint="allowed: true or false")
        if s3_every_n_train_steps is not None:
            if arguments.get("every_n_train_steps") is not None:
                both = "both s3_every_n_train_steps and every_n_train_steps are set"
                raise ConfigError(both, hint="they mean the same: set one")
            arguments["every_n_train_steps"] = s3_every_n_train_steps
        # With a dirpath, upstream would open its file system.
        super().__init__(None, filename, monitor, verbose, save_last, save_top_k, **arguments)
        self.dirpath = ids.normalize_dirpath(dirpath) if dirpath else None
        self.memory_every_n_train_steps = memory_every_n_train_steps
        self.s3_every_n_train_steps = s3_every_n_train_steps
        self.save_on_train_end = save_on_train_end
        self._begin()

    @classmethod
    def adopt(cls, stock: ModelCheckpoint, dirpath: str) -> None:
        """Makes our callback, without memory steps, from Lightning's own before its ``setup``."""
        stock.__class__ = cls
        assert isinstance(stock, TieredModelCheckpoint)
        stock.memory_every_n_train_steps = stock.s3_every_n_train_steps = None
        stock.save_on_train_end = True
        stock.dirpath = dirpath
        stock._begin()

    def _begin(self) -> None:
        #: True if "last" is an alias, which replaces a link on every tier.
        self._links_last = self.save_last == "link"
        if self._links_last:
            self.save_last = True
        self._io: TieredCheckpointIO | None = None
        #: On rank 0, the newest save, if it is on the durable tier, or queued for it.
        self._landed: SaveReport | None = None
        #: On rank 0, paths that are to be deleted once a save has landed.
        self._withheld: list[str] = []
        #: Best checkpoints that never landed: too many saves waited, or the save failed.
        self._lost: set[str] = set()
        #: The step that training began with.
        self._began_at = 0
        #: True if training validates just now, perhaps with averaged weights.
        self._is_validating = False
        #: All ranks, to meet after an exception: a group that is made then may wait for ever for a dead one.
        self._group: Any = None
        self._last_memory_step = -1
        #: The step that the batch before has ended with.
        self._reached = 0
        #: The newest durable save of this callback's own: the progress of training by then, and its path.
        self._durable_save: tuple[tuple[int, int], str] | None = None
        self._naming_last = False
        #: The time from which on the durable tier is asked for names, and that of the last look.
        self._asks_from = self._polled = 0.0
        #: True if something became durable since the loggers were notified.
        self._has_news = False

    @classmethod
    def from_config(cls, block: Any, **overrides: Any) -> TieredModelCheckpoint:
        """Makes the callback from a block ``s3_checkpointing``.

        Args:
            block: A mapping, an OmegaConf block or a TieredCheckpointConfig.
            overrides: Arguments of the callback. They replace the block's keys; ``every_n_train_steps``,
                ``every_n_epochs`` and ``train_time_interval`` replace ``s3_every_n_train_steps``.

        Raises:
            ConfigError: A key or value is not allowed.
        """
        keys = {key: value for key, value in overrides.items() if key in _KEYS}
        config = TieredCheckpointConfig.from_any(block, **keys)
        own: dict[str, Any] = {key: getattr(config, key) for key in _KEYS}
        if "s3_every_n_train_steps" not in keys and any(overrides.get(each) is not None for each in _TRIGGERS):
            del own["s3_every_n_train_steps"]
        return cls(**own, **{key: value for key, value in overrides.items() if key not in keys})

    # ------------------------------------------------------------------------------------ state
    @property
    def state_key(self) -> str:
        """Names the state as Lightning's own callback with the same arguments does: a run may change over and back."""
        return ModelCheckpoint.__qualname__ + super().state_key.removeprefix(type(self).__qualname__)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _WITHHELD: [*self._withheld]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # State of Lightning's own callback counts, wherever it is. Files elsewhere are never deleted.
        state_dict = state_dict if _WITHHELD in state_dict else {**state_dict, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            self._withheld = [*state_dict.get(_WITHHELD, ())]

    # ------------------------------------------------------------------------------------ hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Takes the trainer's checkpoint IO; raises ConfigError if it can't save there."""
        io = require_tiered_io(trainer.strategy, "TieredModelCheckpoint")
        check_strategy(trainer.strategy)
        root = io.config.dirpath
        dirpath = root if self.dirpath is None else str(self.dirpath)
        check_dirpath(trainer, dirpath, root)
        if stage == "fit":
            check_places(of_ours(trainer), root)
            check_retention([self], io.config.retention)
            # The same step may be another state now.
            self._last_memory_step, self._last_checkpoint_saved, self._durable_save, self._landed = -1, "", None, None
        self._io, self._asks_from = io, 0.0
        # Not upstream's setup: it lists that folder, which is remote, and holds many checkpoints by design.
        self.dirpath = dirpath

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if getattr(self, "save_on_exception", False) and trainer.world_size > 1:
            bound = timedelta(seconds=self._engine.session.clock.timing.failed_together_s)
            self._group = torch.distributed.new_group(backend="gloo", timeout=bound)
        self._reached = self._began_at = trainer.global_step
        # Not in setup: a checkpoint restored since then may be of another step.
        if self._last_global_step_saved != trainer.global_step:
            self._last_global_step_saved = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._has_stepped(trainer):
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._save_passed_step(trainer)
            self._save_memory_step(trainer)
            self._reached = trainer.global_step
        clock = self._engine.session.clock
        if clock.monotonic() - self._polled > clock.timing.outcome_poll_s:
            self._look_after(trainer)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self._is_validating = trainer.state.fn == TrainerFn.FITTING

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        # The guard has saved the end by now.
        if trainer.is_global_zero:
            # The IO's teardown shows unfinished work, and the next start takes it up.
            with contextlib.suppress(DrainError):
                self._engine.session.wait()
        self._look_after(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # An exception in another callback's setup leaves this one without its IO.
        if self._io is not None:
            self._save_on_exception(trainer, pl_module, exception)
        say_summary_last(trainer, self, exception)

    # ----------------------------------------------------------- ModelCheckpoint's hooks, our way
    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        step = trainer.global_step
        if self._naming_last and self._durable_save is not None and self._durable_save[0] == progress_of(trainer):
            # The same state is durable, or queued, under its own name. If that save failed, the old alias stays.
            with failing_together(trainer):
                if trainer.is_global_zero and self._landed is not None:
                    self._engine.alias(filepath, self._durable_save[1], copy=not self._links_last)
        else:
            options: dict[str, Any] = {"tiers": ["memory", "durable"]}
            value = self._monitor_candidates(trainer).get(self.monitor) if self.monitor is not None else None
            if value is not None:
                options["metric"] = (self.monitor, float(value))
            report = self._save(trainer, filepath, options, weights_only=self.save_weights_only)
            if trainer.is_global_zero:
                self._note_saved(filepath, report, among_best=not self._naming_last)
            if not self._naming_last:
                self._durable_save = (progress_of(trainer), filepath)
            self._remove_withheld(trainer)
        self._last_global_step_saved = step
        self._last_checkpoint_saved = filepath
        self._look_after(trainer)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        super()._save_topk_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            # Upstream saves it when any training ends.
            return
        self._naming_last = True
        try:
            super()._save_last_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))
        finally:
            self._naming_last = False
        # After "last" points elsewhere: an alias goes with its target.
        self._remove_withheld(trainer)

    def file_exists(self, filepath: Any, trainer: Trainer) -> bool:
        """Answers from rank 0's knowledge: a LIST of each folder at first use, none later."""
        return on_rank_0(trainer, lambda: self._is_taken(filepath))

    def _is_taken(self, filepath: Any) -> bool:
        clock = self._engine.session.clock
        if clock.monotonic() < self._asks_from:
            return False
        try:
            # Overwriting is atomic here, so that "last" needs no versions, unless Lightning saved such a file.
            return (self._engine.is_unmanaged if self._naming_last else self._engine.exists)(filepath)
        except StoreError as error:
            # Overwriting keeps the old content until the new is good, so training need not stop.
            self._asks_from = clock.monotonic() + _REST * self._engine.config.support.durable_timeout_s
            rank_zero_warn(f"names of this run may repeat those of earlier ones: {error}")
            return False

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:  # noqa: ARG002
        return {SentinelFileSystem.LAST}

    def to_yaml(self, filepath: Any = None) -> None:
        """Writes the paths and scores of the best checkpoints to a YAML file, as upstream does."""
        self._fs = get_filesystem(filepath or self.dirpath or "")
        super().to_yaml(filepath)

    # ---------------------------------------------------------------------------------- deletes
    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:  # noqa: ARG002
        """Returns True: :meth:`_due` chooses the checkpoints to delete. The replacement is the newest save."""
        return True

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero and filepath not in self._withheld:
            # A checkpoint that never landed goes first: it can't replace another.
            self._withheld.insert(0 if filepath in self._lost else len(self._withheld), filepath)
            self._lost.discard(filepath)

    def _remove_withheld(self, trainer: Trainer) -> None:
        """Deletes the due checkpoints, if the newest save has landed; all ranks call this."""
        with failing_together(trainer):
            for path in self._due(trainer):
                # If there are retention policies, only they decide.
                if not self._engine.config.retention:
                    self._engine.remove(path, replaced_by=self._landed.save_id if self._landed is not None else "")

    def _due(self, trainer: Trainer) -> list[str]:
        """Returns the checkpoints to delete once the newest save is committed; on rank 0, which notes them.

        For each best checkpoint that never landed, one to be deleted stays; so does the one that was resumed from.
        """
        if not trainer.is_global_zero or self._landed is None:
            return []
        # A checkpoint that was saved again under its name, or is outside dirpath (another run's), is not deleted.
        there = [path for path in self._withheld if not self._shows(path) and is_below(path, self._engine.dirpath)]
        count = max(0, len(there) - sum(map(self._shows, self._lost)))
        restored = self._engine.restored
        due = [path for path in there[:count] if restored is None or path != restored.url]
        self._withheld = [path for path in there if path not in due]
        return due

    def _note_saved(self, path: str, report: SaveReport | None, *, among_best: bool) -> None:
        """Takes note on rank 0 of a save that has returned; without a report, of one that failed."""
        self._landed = report if report is not None and "durable" in report.tiers else None
        self._lost.discard(path)
        if among_best and self._landed is None:
            self._lost.add(path)

    # ---------------------------------------------------------------------------------- the end
    def _save_on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves as upstream does, with the trained weights."""
        saves = getattr(self, "save_on_exception", False) and self._should_save_on_exception(trainer)
        is_validating, self._is_validating = self._is_validating, False
        with trained_weights(trainer) if saves and is_validating else contextlib.nullcontext():
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

    def _has_stepped(self, trainer: Trainer) -> bool:
        """Returns True if the ending batch made a step: a save after any other lacks accumulated gradients."""
        return trainer.global_step > self._began_at and not trainer.fit_loop._should_accumulate()

    def _save_state(self, trainer: Trainer, name: str, *tiers: str) -> SaveReport | None:
        """Saves the whole training state below the IO's dirpath; ModelCheckpoint does not count this checkpoint."""
        return self._save(trainer, ids.join_url(self._engine.dirpath, name), {"tiers": tiers}, weights_only=False)

    def _save_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves the last state to the durable tier, if the newest is only in memory; all ranks call this."""
        # If nothing else was saved, upstream saves "last" now.
        super().on_train_end(trainer, module)
        self._save_what_is_in_memory_alone(trainer)

    def _save_where_it_left(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves a training that has left a batch; all ranks call this."""
        if self._has_stepped(trainer) and not self._is_validating:
            self._save_end(trainer, module)
        elif trainer.is_global_zero and self._is_in_memory_alone():
            self._engine.session.log.warning(
                "training was ended during accumulated gradients or a validation, and its newest checkpoint is in node"
                " memory alone; upload it before the node goes: tiered-ckpt flush"
            )

    def _save_what_is_in_memory_alone(self, trainer: Trainer) -> None:
        wanted = self.save_on_train_end and self._io is not None and self._io.config.save_on_train_end
        if wanted and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # Rank 0 knows the outcomes of the saves, and each rank its later losses.
            lost = trainer.strategy.reduce_boolean_decision(self._has_lost(), all=False)
            if trainer.strategy.broadcast(lost or (trainer.is_global_zero and self._is_in_memory_alone())):
                with last_saves(self._engine.session):
                    made = self._save_state(trainer, _END_NAME + self.FILE_EXTENSION, "memory", "durable")
                    # A sharded save after one that failed in the background is not made, and the next one is.
                    if trainer.strategy.broadcast(lost and made is None):
                        self._save_state(trainer, _END_NAME + self.FILE_EXTENSION, "memory", "durable")

    def _has_lost(self) -> bool:
        """Returns True if the last durable save has failed since, in the background."""
        background = self._engine.session.background
        with contextlib.suppress(DrainError):
            background.wait()
        return bool(background.lost)

    # ----------------------------------------------------------------------------------- inside
    @property
    def _engine(self) -> Checkpointer:
        if self._io is None:
            raise ConfigError(f"{type(self).__name__} is used before setup", operation="save")
        return self._io.checkpointer

    def _shows(self, path: str) -> bool:
        """Returns True if the callback names a path; quick even for many names."""
        return path in self.best_k_models or path in (self.best_model_path, self.last_model_path)

    def _save(
        self, trainer: Trainer, filepath: str, options: dict[str, Any], *, weights_only: bool
    ) -> SaveReport | None:
        """Saves on all ranks, or raises the same error on all; None if that failed, and on ranks other than 0."""
        session, before = self._engine.session, self._engine.session.last_save
        with failing_together(trainer):
            try:
                trainer.save_checkpoint(filepath, weights_only, storage_options=options)
            except TieredCheckpointError:
                # The other ranks wait in the barrier by which Trainer.save_checkpoint ends.
                trainer.strategy.barrier("Trainer.save_checkpoint")
                raise
        if not trainer.is_global_zero:
            return None
        report = session.last_save if session.last_save is not before else None
        log_save(trainer, session, report)
        return report

    def _save_passed_step(self, trainer: Trainer) -> None:
        """Saves if this batch has passed over a step that is due: upstream looks at the step that a batch ends with."""
        every, step = self._every_n_train_steps, trainer.global_step
        is_upstreams = every < 1 or step % every == 0
        if is_upstreams or not passes(every, self._reached, step) or self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        is_missing = self.monitor is not None and self.monitor not in candidates
        if is_missing and hasattr(self, "_defer_save_until_validation"):
            # Lightning 2.6 saves after the validation that logs the metric.
            self._defer_save_until_validation = True
            return
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def _save_memory_step(self, trainer: Trainer) -> None:
        step, since = trainer.global_step, self._reached
        tiers = tiers_for_step(step, self.memory_every_n_train_steps, self.s3_every_n_train_steps, since=since)
        # A durable step that upstream has put off or skipped is still saved to memory. If a memory step is due, a
        # weights-only save does not count: training can't resume from it.
        whole = passes(self.memory_every_n_train_steps, since, step)
        if "memory" in tiers and not (trainer.fast_dev_run or self._saved(trainer, step, whole=whole)):  # type: ignore[attr-defined]
            self._last_memory_step = step
            name = f"memory/epoch={trainer.current_epoch}-step={step}{self.FILE_EXTENSION}"
            self._save_state(trainer, name, "memory")

    def _saved(self, trainer: Trainer, step: int, *, whole: bool = False) -> bool:
        """Returns True if a callback of this kind has saved this step; ``whole``: with more than weights."""
        return any(
            step == each._last_memory_step
            or (step == each._last_global_step_saved and not (whole and each.save_weights_only))
            for each in of_ours(trainer)
        )

    def _is_in_memory_alone(self) -> bool:
        """Returns True if the newest checkpoint to resume from is not, and will not be, on the durable tier."""
        session, restored = self._engine.session, self._engine.restored
        has_saved = session.last_save is not None
        if not has_saved and (restored is None or restored.is_durable or restored.name in self._engine.also_last):
            # Lightning has the last of these removed when this fit ends.
            return restored is not None and restored.name in self._engine.also_last

        def look() -> bool:
            parts = [each.part for each in session.open().tier.parts() if each.part.place == session.place]
            if restored is not None and not has_saved:
                # It came from memory, perhaps only that of other nodes.
                return not any(each.durable for each in parts if each.save_id == restored.save_id)
            # In the order of their saves.
            return not next((each.durable for each in reversed(parts) if each.content.resumable), True)

        return looking(session.log, look, otherwise=True)

    def _look_after(self, trainer: Trainer) -> None:
        """Reads the drain's outcomes, and passes them on to every callback of this kind."""
        session = self._engine.session
        if trainer.is_global_zero:
            outcomes = session.poll()
            log_drain(trainer, outcomes)
            for each in of_ours(trainer):
                each._has_news |= any(outcome.state == "committed" for outcome in outcomes)
                each._tell_loggers(trainer)
        # After the work: however long it takes, it is not done at every batch.
        self._polled = session.clock.monotonic()

    def _tell_loggers(self, trainer: Trainer) -> None:
        """Notifies the loggers of new checkpoints, once all paths that they read are durable."""
        paths = [path for path in {*self.best_k_models, self.best_model_path, self.last_model_path} if path]
        names = [ids.name_in(self._engine.dirpath, path) for path in paths if is_below(path, self._engine.dirpath)]
        if self._has_news and not any(map(self._engine.session.is_pending, names)):
            self._has_news = False
            notify_loggers(trainer, self)


def of_ours(trainer: Trainer) -> list[TieredModelCheckpoint]:
    """Returns a trainer's callbacks of this kind."""
    return [each for each in trainer.checkpoint_callbacks if isinstance(each, TieredModelCheckpoint)]


def from_config(
    block: Any, *, logger: Logger | None = None, **overrides: Any
) -> tuple[TieredCheckpointIO | AsyncCheckpointIO, TieredModelCheckpoint]:
    """Makes the IO and the callback that a configuration block describes, for a Trainer's plugins and callbacks.

    Args:
        block: ``s3_checkpointing``: a mapping, an OmegaConf block or a TieredCheckpointConfig. With ``enabled: false``
            in it, both are Lightning's own, and save to Lightning's folder.
        logger: The IO's logger, instead of the package's own.
        overrides: Keys that replace keys of the block, and arguments of :class:`TieredModelCheckpoint`.

    Raises:
        ConfigError: A key or value is not allowed.
    """
    enabled = True
    if isinstance(block, Mapping) and "enabled" in block:
        block = as_mapping(block)
        enabled = block.pop("enabled")
    given = {key: value for key, value in overrides.items() if key in config_keys()}
    config = TieredCheckpointConfig.from_any(block, **given)
    # An override for the callback is passed as an argument, so that other triggers do not replace it.
    arguments = {key: value for key, value in overrides.items() if key not in given or key in _KEYS}
    callback = TieredModelCheckpoint.from_config(config, **arguments)
    if enabled is True:
        return TieredCheckpointIO.from_config(config, logger=logger), callback
    if enabled is not False:
        raise ConfigError(f"s3_checkpointing.enabled is {enabled!r}", hint="allowed: true or false")
    rank_zero_warn("s3_checkpointing is off (enabled: false): Lightning saves to its own folder, from scratch")
    own = {key: value for key, value in arguments.items() if key not in _KEYS}
    return _LightningIO(), ModelCheckpoint(**{"every_n_train_steps": callback.s3_every_n_train_steps, **own})  # type: ignore[return-value]


class _LightningIO(TorchCheckpointIO):
    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Returns the state of a file; an empty one for ``tiered:latest``, by which a script resumes."""
        return FreshStart("off") if str(path).startswith("tiered:") else super().load_checkpoint(path, *args, **options)
