"""A save by Lightning: its ``storage_options``, and whether training can resume from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tiered_checkpoint_io.engine.checkpointer import TIERS
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.redaction import shown

#: What Lightning's tuner keeps for a moment, to come back to it.
_SCRATCH = (".lr_find_", ".scale_batch_size_")
#: Where a whole training state has its optimizers: Lightning's key, and Megatron's.
OPTIMIZERS = ("optimizer_states", "optimizer")


def is_of_tuner(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is the scratch of Lightning's tuner, in ``default_root_dir``."""
    return os.path.basename(os.fspath(path)).startswith(_SCRATCH)


def is_resumable(checkpoint: Any, path: str | os.PathLike[str]) -> bool:
    """Returns whether training can resume from a save by Lightning: not from weights only, nor its tuner's scratch.

    Nor from what a Trainer saves that has not trained: one that evaluated, or whose launcher (``ddp_spawn``,
    ``ddp_notebook``) trained in processes of their own. It would begin at step 0, without optimizers' states.
    """
    if is_of_tuner(path):
        return False
    is_lightnings = isinstance(checkpoint, Mapping) and {"pytorch-lightning_version", "state_dict"} <= set(checkpoint)
    if not is_lightnings:
        return True
    return any(key in checkpoint for key in OPTIMIZERS) and not _has_not_trained(checkpoint)


def _has_not_trained(checkpoint: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint of Lightning's says that no batch was trained, and holds no optimizer."""
    if any(checkpoint.get(key) for key in OPTIMIZERS):
        return False
    try:
        return bool(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] == 0)
    except (KeyError, TypeError):
        # Of another release, or of another form.
        return False


class StorageOptions(NamedTuple):
    """The ``storage_options`` of a save."""

    tiers: Collection[str] = TIERS
    metric: tuple[str, float] | None = None
    wait: bool = True


def read_storage_options(options: Any) -> StorageOptions:
    """Validates ``storage_options``.

    Raises:
        ConfigError: They are not ``{"tiers": [...], "metric": (name, value), "wait": bool}``, or a part of that.
    """
    allowed = "allowed: {'tiers': ['memory', 'durable'] or one of the two, 'metric': (name, value), 'wait': bool}"
    if options is None:
        return StorageOptions()
    if not isinstance(options, Mapping):
        raise ConfigError(f"storage_options is {shown(options)}", operation="save", hint=allowed)
    tiers, metric, wait = options.get("tiers", TIERS), options.get("metric"), options.get("wait", True)
    if unknown := {str(key) for key in options} - {"tiers", "metric", "wait"}:
        # Not their values: for other libraries these options hold credentials.
        raise ConfigError(f"storage_options has {', '.join(sorted(unknown))}", operation="save", hint=allowed)
    if not isinstance(wait, bool):
        raise ConfigError(f"storage_options['wait'] is {wait!r}", operation="save", hint=allowed)
    if isinstance(tiers, str):
        tiers = [tiers]
    if not isinstance(tiers, Collection) or not tiers or not all(isinstance(t, str) and t in TIERS for t in tiers):
        raise ConfigError(f"storage_options['tiers'] is {tiers!r}", operation="save", hint=allowed)
    if metric is not None:
        try:
            name, value = metric
            if not isinstance(name, str):
                raise TypeError(name)
            metric = name, float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            # RuntimeError is torch's, of a tensor of several elements.
            raise ConfigError(f"storage_options['metric'] is {metric!r}", operation="save", hint=allowed) from error
    return StorageOptions(tiers, metric, wait)
