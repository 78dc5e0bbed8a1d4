"""Checkpoints of a training loop with Accelerate: what accelerator.save_state keeps, through both tiers."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from tiered_checkpoint_io.adapters.steps import name_of, tiers_due
from tiered_checkpoint_io.engine.checkpointer import Checkpointer, NoCheckpoint
from tiered_checkpoint_io.engine.restore.loaders import report_left_out
from tiered_checkpoint_io.errors import RestoreError, UsageError
from tiered_checkpoint_io.huggingface.state import random_state, refuse_sharded, set_random_state
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.metrics.recording import say_not_exported
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: Where what torch.compile wraps has the model.
_COMPILED = "_orig_mod"


class AcceleratorCheckpoints:
    """Saves and loads what an Accelerator has prepared: models, optimizers, schedulers, registered objects.

    ::

        checkpoints = AcceleratorCheckpoints("s3://bucket/run", namespace="gpt-1")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step = checkpoints.load(accelerator) or 0
        ...
        checkpoints.save(accelerator, step)  # after each step: it saves those that are due

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
        self.checkpointer = Checkpointer(self.config, logger=logger)

    def save(self, accelerator: Accelerator, step: int, *, tiers: Collection[str] | None = None) -> None:
        """Saves a step in the background; every rank calls this.

        Args:
            accelerator: What it has prepared is saved, with ``register_for_checkpointing``, all random states, and the
                position of each rank's data loaders where ``use_stateful_dataloader`` is set.
            step: The number of steps that are done.
            tiers: ``"memory"``, ``"durable"`` or both; None for those that the step is due for, which may be none.

        Raises:
            UsageError: A save is due and the state is sharded (FSDP, DeepSpeed, tensor parallelism), the accelerator
                has hooks of its own saves, or the tiers are unknown.
            SaveError: A save failed, and ``on_save_error`` is ``raise``.
        """
        wanted = tiers_due(step, self.config) if tiers is None else tiers
        if tiers is None and not wanted:
            return
        self._check(accelerator)
        if self.config.replication_factor > 1:
            self.checkpointer.session.meet_peers()
        own = (random_state(), [each.state_dict() for each in _loaders(accelerator)])
        of_ranks = gather_object([own])
        if accelerator.is_main_process:
            state = {entry: [each.state_dict() for each in parts] for entry, parts in _parts(accelerator).items()}
            content = {
                **state,
                "rng": [rng for rng, _ in of_ranks],
                # Of each rank, those of its data loaders.
                **({"loaders": [loaders for _, loaders in of_ranks]} if own[1] else {}),
                "global_step": step,
                "accelerator_step": accelerator.step,
            }
            self.checkpointer.save(content, name_of(step), tiers=wanted, wait=False)

    def load(self, accelerator: Accelerator, path: str = ids.LATEST) -> int | None:
        """Loads a checkpoint into what the accelerator has prepared; every rank calls this, after ``prepare``.

        Args:
            accelerator: With the same objects, prepared and registered in the same order, as at the save.
            path: ``tiered:latest``, a name, or a path or URL.

        Returns:
            Its step; None where ``tiered:latest`` finds no checkpoint at all.

        Raises:
            UsageError: The state is sharded (FSDP, DeepSpeed, tensor parallelism), or the accelerator has hooks of its
                own saves and loads.
            CheckpointNotFoundError: There is none of that name.
            RestoreError: None is intact, or it holds other objects than the accelerator.
            StoreError: The durable tier could not be asked.
        """
        self._check(accelerator)
        state = self.checkpointer.load(path, map_location="cpu")
        if isinstance(state, NoCheckpoint):
            return None
        parts = _parts(accelerator)
        for entry, here in parts.items():
            found = state.get(entry) if isinstance(state, dict) else None
            if found is None or len(found) != len(here):
                there = "none" if found is None else len(found)
                raise RestoreError(
                    f"the accelerator has {len(here)} {entry}, the checkpoint {there}",
                    operation="load",
                    key=path,
                    hint="prepare and register the same objects, in the same order, as when it was saved",
                )
        loaders = self._restored_loaders(accelerator, state.get("loaders"))
        for entry, here in parts.items():
            for part, content in zip(here, state[entry], strict=True):
                part.load_state_dict(_as_named_here(content, part) if entry == "models" else content)
        for loader, content in loaders:
            loader.load_state_dict(content)
        accelerator.step = state["accelerator_step"]
        if accelerator.process_index < len(state["rng"]):
            set_random_state(state["rng"][accelerator.process_index])
        return int(state["global_step"])

    def close(self) -> None:
        """Waits for uploads, and frees everything; may be used again."""
        self.checkpointer.close()

    def _check(self, accelerator: Accelerator) -> None:
        refuse_sharded(accelerator.distributed_type, accelerator._models, type(self).__name__)
        if accelerator._save_model_state_pre_hook or accelerator._load_model_state_pre_hook:
            raise UsageError(
                f"{type(self).__name__} with hooks of register_save_state_pre_hook or register_load_state_pre_hook:"
                " they write and read folders, and it saves one file",
                operation="setup",
                hint="register what they save in place of them: accelerator.register_for_checkpointing(ema)",
            )
        if accelerator.is_main_process:
            say_not_exported(self.checkpointer.session, type(self).__name__)

    def _restored_loaders(self, accelerator: Accelerator, held: list[list[Any]] | None) -> list[tuple[Any, Any]]:
        """This rank's data loaders that have a state, with what a checkpoint has for each; none if it has not for all.

        Args:
            accelerator: With the data loaders.
            held: Of each rank, the states that the checkpoint has; None where it has no such entry.
        """
        loaders, says, session = _loaders(accelerator), accelerator.is_main_process, self.checkpointer.session
        if held is None:
            if loaders and says:
                session.log.warning("the checkpoint has no states of data loaders, so the data starts anew")
            return []
        count = len(held[0])
        if (len(held), count) == (accelerator.num_processes, len(loaders)):
            return list(zip(loaders, held[accelerator.process_index], strict=True))
        why = (
            f"it is of {len(held)} ranks with {count} each, here are {accelerator.num_processes} with {len(loaders)};"
            " accelerator.skip_first_batches goes to the position that you give"
        )
        report_left_out(session, "the checkpoint", count, why, says=says)
        return []


def _loaders(accelerator: Accelerator) -> list[Any]:
    """The prepared data loaders that have a state, in their order."""
    return [each for each in accelerator._dataloaders if getattr(each, "use_stateful_dataloader", False)]


def _parts(accelerator: Accelerator) -> dict[str, list[Any]]:
    scaler = accelerator.scaler
    return {
        "models": [_bare(accelerator, model) for model in accelerator._models],
        "optimizers": list(accelerator._optimizers),
        "schedulers": list(accelerator._schedulers),
        "custom_objects": list(accelerator._custom_objects),
        "scalers": [] if scaler is None else [scaler],
    }


def _bare(accelerator: Accelerator, model: torch.nn.Module) -> Any:
    """The model itself, without what DDP and ``torch.compile`` wrap around it, in either order."""
    # To keep the wrapper of torch.compile would take DDP out of it for good: the ranks would train apart.
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    return getattr(model, _COMPILED, model)


def _as_named_here(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A model's state with the names that it has here, where other parts of it may be compiled."""
    prefix = f"{_COMPILED}."
    here = {name.replace(prefix, ""): name for name in model.state_dict()}
    for name in list(state):
        state[here.get(name.replace(prefix, ""), name)] = state.pop(name)
    return state
