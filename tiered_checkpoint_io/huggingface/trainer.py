"""A callback that saves a transformers.Trainer's whole training state through both tiers."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import WEIGHTS_NAME

from tiered_checkpoint_io.adapters.sizes import size_here
from tiered_checkpoint_io.adapters.steps import name_of, tiers_due
from tiered_checkpoint_io.engine.checkpointer import TIERS, Checkpointer, NoCheckpoint
from tiered_checkpoint_io.engine.preflight import Need, newest, preflight
from tiered_checkpoint_io.engine.ranks.coordination import train_here
from tiered_checkpoint_io.engine.restore.restore import Restored
from tiered_checkpoint_io.engine.save.room import last_saves
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import RestoreError, UsageError
from tiered_checkpoint_io.huggingface.state import (
    as_taken,
    on_rank_0,
    random_states,
    refuse_sharded,
)
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.metrics.exports import targets_of_trainer
from tiered_checkpoint_io.metrics.recording import Recording
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: The files of the Trainer's own checkpoint folder that hold one entry of our checkpoint each.
_FILES = {"model": WEIGHTS_NAME, "optimizer": OPTIMIZER_NAME, "scheduler": SCHEDULER_NAME, "scaler": SCALER_NAME}


class TieredCheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Saves to node memory every so many steps, and to the durable tier every so many, in the background.

    ::

        tiered = TieredCheckpointCallback("s3://bucket/run", namespace="gpt-1")
        trainer = Trainer(model, args, train_dataset=data, callbacks=[tiered])
        trainer.train(resume_from_checkpoint=tiered.restore())

    The checkpoint of a step is taken after the Trainer has logged and evaluated that step, right before the next one.
    It is one file for ``torch.load``, a dictionary: ``model``, ``optimizer``, ``scheduler``, ``scaler`` (with fp16),
    ``rng`` of each rank, ``trainer_state`` (JSON), ``global_step`` and ``epoch``.

    Args:
        dirpath: The durable tier: an S3 URL, another fsspec URL, or a directory.
        logger: Where log lines go; None for the package's own.
        options: Any other key of docs/configuration.md, such as ``namespace``, ``memory_every_n_train_steps`` and
            ``s3_every_n_train_steps``.

    Raises:
        ConfigError: A key or value is not allowed.
    """

    def __init__(self, dirpath: str | os.PathLike[str], *, logger: Logger | None = None, **options: Any) -> None:
        self.config = TieredCheckpointConfig.from_any(None, dirpath=dirpath, **options)
        self._engine = Checkpointer(self.config, logger=logger)
        self._recording = Recording()
        self._args: TrainingArguments | None = None
        #: An entry for each of the Trainer's callbacks that has a state, as its own checkpoints have them.
        self._callbacks: dict[str, Any] = {}
        #: The folder that the Trainer resumes from, until it has.
        self._folder: Path | None = None
        #: Where the step that has just ended goes; empty where it is not saved.
        self._due: Collection[str] = ()
        #: Whether the first save of a training has been prepared.
        self._is_prepared = False
        #: The step that ended a training, once it is saved.
        self._ended = -1

    @classmethod
    def from_config(cls, block: Any, **overrides: Any) -> TieredCheckpointCallback:
        """The callback that a configuration block describes: a mapping, an OmegaConf block, or a configuration."""
        config = TieredCheckpointConfig.from_any(block, **overrides)
        return cls(**asdict(config))

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine."""
        return self._engine

    def restore(self, path: str = ids.LATEST) -> str | None:
        """Makes a checkpoint folder for ``trainer.train(resume_from_checkpoint=...)``; every rank calls this.

        The checkpoint is verified, and written in the Trainer's own layout below ``output_dir`` of each node, where
        it stays until the first step has ended; with ``auto_find_batch_size``, until training has.

        Args:
            path: ``tiered:latest``, a name, or a path or URL.

        Returns:
            The folder; None where ``tiered:latest`` finds no checkpoint at all: training then starts from scratch.

        Raises:
            UsageError: There is no Trainer with this callback yet.
            CheckpointNotFoundError: There is none of that name.
            RestoreError: None is intact, or it is not one of a Trainer.
            StoreError: The durable tier could not be asked.
        """
        args = self._args
        if args is None:
            raise UsageError(
                "restore() before there is a Trainer with this callback",
                operation="load",
                hint="first trainer = Trainer(..., callbacks=[callback]), then callback.restore()",
            )
        # Jobs that save nothing else there may have one output_dir.
        job = ids.namespace_of(f"{self.config.dirpath}/{self.config.namespace}")
        here = Rank(socket.gethostname(), args.process_index, args.local_process_index)

        def folder_of(writer: int) -> Path:
            # A start that fails early leaves it, and the next one may be on other hosts: it takes the same places.
            return Path(args.output_dir, f".tiered-restored-{writer}-{job}")

        def read(found: Restored) -> None:
            if here.local == 0:
                state = found.load(Trust.of(self.config), map_location="cpu")
                _write_folder(folder_of(here.rank), state, found.name, self._callbacks)

        answer = self._engine.load_by(path, read)
        if isinstance(answer, NoCheckpoint):
            return None
        self._folder = folder_of(writer_for(here, gather_object([here])))
        return str(self._folder)

    # ------------------------------------------------------------------------- what the Trainer calls
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        """Takes note of the Trainer's arguments, and of which of its callbacks have states."""
        self._args, self._callbacks = args, _without_states(state.stateful_callbacks)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        """Tries what saves will need, before the first batch.

        Raises:
            UsageError: The state is sharded, or callbacks' states are to be restored from checkpoints.
            StoreError, ConfigError, MemoryTierError: As :func:`preflight`, on all ranks.
            ConfigError: Metrics are to go where they can't: metrics_export or TIERED_CHECKPOINT_METRICS can't be
                understood, or names what is not installed.
        """
        refuse_sharded(args.distributed_state.distributed_type, [kw["model"]], type(self).__name__)
        targets = targets_of_trainer(self.config.metrics_export)
        if args.restore_callback_states_from_checkpoint:
            raise UsageError(
                "restore_callback_states_from_checkpoint: a callback can't see the states of the Trainer's others",
                operation="setup",
                hint="leave it out, or resume from a checkpoint of the Trainer's own (save_strategy)",
            )
        train_here()
        session, self._due, self._is_prepared, self._ended = self._engine.session, (), False, -1
        weights = size_here(kw["model"], [])
        memory, durable = self.config.memory_every_n_train_steps, self.config.s3_every_n_train_steps
        ends = self.config.save_on_train_end
        # Adam keeps two values for each parameter.
        need = Need(weights, 3 * weights, memory is not None, durable is not None or ends)
        on_rank_0(self._engine, lambda: preflight(session, need))
        if self.config.replication_factor > 1:
            session.meet_peers()
        if state.is_world_process_zero:
            self._warn(args, state)
        self._recording.begin(args.local_process_index, state.global_step, session, targets)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        """Saves the step before this one, if it is due: only now the Trainer has logged and evaluated it."""
        self._save(state, **kw)

    #: With the evaluation at the end of an epoch; and before the data of the next one is shuffled.
    on_epoch_begin = on_step_begin

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        """Notes what is due; removes what was restored, which all ranks of the node have read by now.

        With ``auto_find_batch_size`` a step that finds no memory has the Trainer begin once more, from there.
        """
        self._due = tiers_due(state.global_step, self.config)
        self._recording.reach(state.global_step, self._engine.session)
        if not self._is_prepared and state.is_world_process_zero:
            # The optimizer has its state now.
            self._engine.prepare(size_here(kw["model"], [getattr(kw["optimizer"], "optimizer", kw["optimizer"])]))
        self._is_prepared = True
        if not args.auto_find_batch_size:
            self._remove_folder(args)
        if state.is_world_process_zero:
            self._engine.session.poll()

    def on_prediction_step(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Notes the step: a long evaluation is no silence."""
        self._recording.reach(state.global_step, self._engine.session)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Saves the last step of a training, before the Trainer may put the best weights in place of the last.

        Where that does not happen, or the Trainer saves the step as well, this waits for the evaluation of the epoch.
        """
        if args.load_best_model_at_end and not control.should_save and _ends(state, control):
            self._save_last(state, **kw)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """As :meth:`on_epoch_end`, once the epoch is evaluated, which may have ended the training."""
        if args.load_best_model_at_end and _ends(state, control):
            self._save_last(state, **kw)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:  # noqa: ARG002
        """Saves the last step where that has not been done; waits for uploads, and frees everything.

        The callback may be used again.
        """
        error: BaseException | None = None
        try:
            self._finish(args, state, **kw)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._recording.end(state.global_step, self._engine.session, error)

    # ---------------------------------------------------------------------------------------- effects
    def _finish(self, args: TrainingArguments, state: TrainerState, **kw: Any) -> None:
        try:
            # Whether there is a best one is looked up on each node's own disk, and all ranks save together, or none.
            if self._is_prepared and not args.load_best_model_at_end:
                self._save_last(state, **kw)
        finally:
            self._remove_folder(args)
            self._engine.close()

    def _save_last(self, state: TrainerState, **kw: Any) -> None:
        """Saves the step that ends a training, once."""
        if self._ended != state.global_step:
            self._ended = state.global_step
            self._due = TIERS if self.config.save_on_train_end else self._due
            with last_saves(self._engine.session) if self.config.save_on_train_end else nullcontext():
                self._save(state, **kw)

    def _save(self, state: TrainerState, **kw: Any) -> None:
        tiers, self._due = self._due, ()
        if not tiers:
            return
        rng = random_states()
        if not state.is_world_process_zero:
            return
        scaler = getattr(kw["optimizer"], "scaler", None)
        content = {
            "model": kw["model"].state_dict(),
            "optimizer": kw["optimizer"].state_dict(),
            "scheduler": kw["lr_scheduler"].state_dict(),
            **({} if scaler is None else {"scaler": scaler.state_dict()}),
            "rng": rng,
            "trainer_state": _as_json(state),
            "global_step": state.global_step,
            "epoch": int(state.epoch or 0),
        }
        self._engine.save(content, name_of(state.global_step), tiers=tiers, wait=False)

    def _remove_folder(self, args: TrainingArguments) -> None:
        folder, self._folder = self._folder, None
        if folder is not None and args.local_process_index == 0:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                self._engine.session.log.warning("what training resumed from could not be removed: %s", error)

    def _warn(self, args: TrainingArguments, state: TrainerState) -> None:
        session = self._engine.session
        strategy = getattr(args.save_strategy, "value", args.save_strategy)
        if strategy != "no":
            session.log.warning(
                "the Trainer also saves by itself, to %s (save_strategy=%r); where the checkpoints of this callback"
                " suffice, set save_strategy='no'",
                args.output_dir,
                strategy,
            )
        found = newest(session) if state.global_step == 0 and self.config.preflight != "off" else None
        if found is not None:
            session.log.warning(
                "train was called without resume_from_checkpoint, so training does not resume;"
                " resume_from_checkpoint=callback.restore() would resume from %s (step %d, %s tier)",
                found.name,
                found.content.step,
                "memory" if found.held else "durable",
            )


class Rank(NamedTuple):
    """A process: its host's name, its rank in the job, and that on its node."""

    host: str
    rank: int
    local: int


def writer_for(own: Rank, ranks: Iterable[Rank]) -> int:
    """The rank that wrote what is restored on a process' own node, by all ranks of the job.

    A launcher may number ranks node by node, or give each node one in turn. Where all hosts have one name, as some
    containers do, the former holds.
    """
    writers = [each.rank for each in ranks if each.host == own.host and each.local == 0 and each.rank <= own.rank]
    return max(writers, default=own.rank)


def _ends(state: TrainerState, control: TrainerControl) -> bool:
    """Whether no step follows."""
    return bool(control.should_training_stop or state.global_step >= state.max_steps)


def _without_states(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """An entry for each callback that has a state; of several of one class, the Trainer makes a list."""
    return {name: [] if isinstance(state, list) else {} for name, state in callbacks.items()}


def _as_json(state: TrainerState) -> str:
    """The Trainer's state, without those of its callbacks, as its own checkpoints have it."""
    # asdict copies what it finds, and torch copies no tensor that has a graph.
    kept = {field.name: getattr(state, field.name) for field in fields(state)}
    return json.dumps({**kept, "stateful_callbacks": _without_states(state.stateful_callbacks)}, default=_plain)


def _plain(value: Any) -> Any:
    """What is logged and is not of JSON: the numbers of a tensor or a NumPy value; the text of all else."""
    try:
        return value.tolist()
    except Exception:
        # Training must not end for a value in its log.
        return str(value)


def _write_folder(folder: Path, state: Any, name: str, callbacks: Mapping[str, Any]) -> None:
    """Writes a checkpoint as the Trainer reads it; what was in the folder is removed.

    Args:
        folder: Where.
        state: The checkpoint.
        name: Its name.
        callbacks: An entry for each callback that has a state: the Trainer's own saves fail where one is missing.

    Raises:
        RestoreError: It is not one of a Trainer.
    """
    if not isinstance(state, dict) or not {"model", "optimizer", "scheduler", "rng", "trainer_state"} <= set(state):
        raise RestoreError(
            f"{name} is not a checkpoint of a transformers.Trainer",
            operation="load",
            key=name,
            hint="name one that TieredCheckpointCallback has saved",
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for entry, file in _FILES.items():
        if entry in state:
            torch.save(state[entry], folder / file)
    ranks = state["rng"]
    for rank, rng in enumerate(ranks):
        torch.save(as_taken(rng), folder / (f"rng_state_{rank}.pth" if len(ranks) > 1 else "rng_state.pth"))
    trainer_state = json.loads(state["trainer_state"])
    trainer_state["stateful_callbacks"] = {**callbacks, **trainer_state["stateful_callbacks"]}
    (folder / TRAINER_STATE_NAME).write_text(json.dumps(trainer_state))
