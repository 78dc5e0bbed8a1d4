"""NeMo's ``exp_manager`` for trainers whose checkpoint IO is ours.

NeMo looks for checkpoints, and makes its checkpoint callback, in two functions of ``nemo.utils.exp_manager``.
:func:`take_over` replaces both. For trainers with another checkpoint IO the replacements call NeMo's own; all else
of exp_manager (folders, loggers, timers, versions) stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from nemo.utils import exp_manager as upstream
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.callbacks.guard import ensure_guard
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig, as_mapping
from tiered_checkpoint_io.nemo.checkpoint import TieredNeMoCheckpoint
from tiered_checkpoint_io.nemo.connector import NeMoCheckpointConnector, Rules
from tiered_checkpoint_io.nemo.io import NEMO_DEFAULTS, NeMoCheckpointIO, S3CheckpointIO

#: Keys of NeMo's ``checkpoint_callback_params`` that are no arguments of our callback.
_NOT_OURS = ("filepath", "model_parallel_size", "async_save", "save_last_n_optim_states")


def take_over() -> None:
    """Replaces the two functions of NeMo's exp_manager. May be called any number of times."""
    for name, ours in (("check_resume", _check_resume), ("configure_checkpointing", _configure_checkpointing)):
        theirs = getattr(upstream, name)
        if not getattr(theirs, "asks_tiers", False):
            setattr(upstream, name, _for_our_trainers(theirs, ours))


def tiered_exp_manager(trainer: Trainer, cfg: Any) -> Path | None:
    """Runs NeMo's exp_manager, with checkpoints through both tiers.

    Args:
        trainer: A trainer with a stock checkpoint IO, or one of ours.
        cfg: The whole configuration: ``exp_manager`` as NeMo has it, and ``s3_checkpointing``, with NeMo's keys and all
            of ours. ``dirpath`` is the value in ``checkpoint_callback_params``, or else in ``s3_checkpointing``.

    Returns:
        The folder of exp_manager's logs.

    Raises:
        ConfigError: A key or value is not allowed, or ``cfg`` is no mapping; or a value differs from that of the
            trainer's checkpoint IO. The trainer has a checkpoint IO that is neither stock nor ours.
    """
    take_over()
    ensure_guard(trainer)
    # One of OmegaConf's is a mapping, too, and not resolved yet.
    cfg = cfg if isinstance(cfg, Mapping) else as_mapping(cfg, "the configuration")
    block, manager = as_mapping(_part(cfg, "s3_checkpointing")), as_mapping(_part(cfg, "exp_manager"), "exp_manager")
    params = dict(manager.get("checkpoint_callback_params") or {})
    io = tiered_io_of(trainer.strategy.checkpoint_io)
    dirpath = params.get("dirpath") or block.get("dirpath") or (io.config.dirpath if io is not None else None)
    if io is None:
        current = trainer.strategy.checkpoint_io
        if type(current) is not TorchCheckpointIO:
            raise ConfigError(
                f"tiered_exp_manager with a {type(current).__name__}",
                operation="setup",
                hint="leave the checkpoint IO to tiered_exp_manager, or take tiered_checkpoint_io.nemo.S3CheckpointIO",
            )
        config = TieredCheckpointConfig.from_any({**NEMO_DEFAULTS, **block, "dirpath": dirpath})
        io = S3CheckpointIO(config) if ids.is_s3_url(config.dirpath) else NeMoCheckpointIO(config)
        trainer.strategy.checkpoint_io = io
    else:
        _check_same(io, block)
    manager["checkpoint_callback_params"] = {**params, "dirpath": dirpath}
    log_dir: Path | None = upstream.exp_manager(trainer, OmegaConf.create(manager))
    return log_dir


def _part(cfg: Any, key: str) -> Any:
    """Returns one value of a configuration, resolved by itself: others may refer to what is not known yet."""
    if not isinstance(cfg, Mapping):
        return None
    try:
        return None if OmegaConf.is_config(cfg) and OmegaConf.is_missing(cfg, key) else cfg.get(key)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{key} can't be resolved: {str(error).partition(chr(10))[0]}", hint="set what its interpolation refers to"
        ) from error


def _check_same(io: TieredCheckpointIO, block: Mapping[str, Any]) -> None:
    """Raises ConfigError for a block that says other than the trainer's checkpoint IO, which is made already."""
    wanted = TieredCheckpointConfig.from_any({"dirpath": io.config.dirpath, **block})
    # Of NeMo's IO, an argument says the same; of others, the class.
    is_async = getattr(io, "async_checkpointing", wanted.enable_async_checkpointing)
    has = replace(io.config, enable_async_checkpointing=is_async)
    for key in block:
        if getattr(wanted, key) != getattr(has, key):
            raise ConfigError(
                f"s3_checkpointing.{key} is {getattr(wanted, key)!r}, and {getattr(has, key)!r} in the trainer's"
                f" {type(io).__name__}",
                operation="setup",
                hint=f"leave {key} out of one of them, or leave the checkpoint IO to tiered_exp_manager",
            )


# ------------------------------------------------------------------------ instead of NeMo's own
def _for_our_trainers(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def ask(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is None:
            return theirs(trainer, *args, **kwargs)
        return ours(theirs, io, trainer, *args, **kwargs)

    ask.asks_tiers = True  # type: ignore[attr-defined]
    return ask


def _check_resume(
    theirs: Callable[..., Any],
    io: TieredCheckpointIO,  # noqa: ARG001 - as _configure_checkpointing
    trainer: Trainer,
    log_dir: Any,
    resume_if_exists: bool = False,
    resume_past_end: bool = False,
    resume_ignore_no_checkpoint: bool = False,
    dirpath: Any = None,  # noqa: ARG001 - the IO has it
    resume_from_checkpoint: str | None = None,
) -> None:
    # NeMo's own still moves old log files aside, and sets a given path.
    theirs(trainer, log_dir, resume_if_exists=False, resume_from_checkpoint=resume_from_checkpoint)
    connector = NeMoCheckpointConnector.of(trainer)
    if resume_if_exists:
        connector.resume_by(
            Rules(
                resume_past_end=bool(resume_past_end),
                resume_ignore_no_checkpoint=bool(resume_ignore_no_checkpoint),
                resume_from_checkpoint=resume_from_checkpoint,
            )
        )


def _configure_checkpointing(
    _: Callable[..., Any],
    io: TieredCheckpointIO,
    trainer: Trainer,
    log_dir: Any,  # noqa: ARG001 - checkpoints lie at the IO's dirpath
    name: str,
    resume: bool,  # noqa: ARG001 - top-k comes with the checkpoint's state
    params: DictConfig,
    create_preemption_callback: bool,
) -> None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        raise upstream.CheckpointMisconfigurationError(
            "The trainer that was passed to exp_manager has a ModelCheckpoint, and create_checkpoint_callback is"
            " true: leave one of them out"
        )
    _fill_in(params, name, io.config.dirpath)
    if params.async_save and isinstance(io, NeMoCheckpointIO):
        io.async_checkpointing = True
    callback = TieredNeMoCheckpoint(**_callback_arguments(params, io.config))
    callbacks.append(callback)
    # NeMo's needs CUDA, and is left out elsewhere by NeMo, too.
    if create_preemption_callback and torch.cuda.is_available():
        callbacks.append(upstream.PreemptionCallback(callback))


def _fill_in(params: DictConfig, name: str, dirpath: str) -> None:
    """Sets NeMo's defaults in NeMo's own block: other code reads them in ``app_state``."""
    with open_dict(params):
        if params.get("filepath") is not None:
            raise ConfigError("checkpoint_callback_params.filepath is set", hint="set dirpath and filename instead")
        params.dirpath = ids.normalize_dirpath(str(params.dirpath)) if params.dirpath else dirpath
        if params.filename is None:
            params.filename = f"{name}--{{{params.monitor}:.4f}}-{{epoch}}"
        if params.prefix is None:
            params.prefix = name


def _callback_arguments(params: DictConfig, config: TieredCheckpointConfig) -> dict[str, Any]:
    given = as_mapping(params)
    if given.get("save_last_n_optim_states", -1) >= 0:
        text = (
            "save_last_n_optim_states is ignored: each checkpoint keeps its optimizer states; bound them by save_top_k"
        )
        upstream.logging.warning(text)
    arguments = {key: value for key, value in given.items() if key not in _NOT_OURS}
    arguments["memory_every_n_train_steps"] = config.memory_every_n_train_steps
    if config.s3_every_n_train_steps is not None and arguments.get("every_n_train_steps") is None:
        # NeMo's schema says "each epoch" by default.
        arguments |= {"s3_every_n_train_steps": config.s3_every_n_train_steps, "every_n_epochs": None}
    elif arguments.get("every_n_train_steps") is not None or arguments.get("train_time_interval") is not None:
        arguments["every_n_epochs"] = None
    return arguments
