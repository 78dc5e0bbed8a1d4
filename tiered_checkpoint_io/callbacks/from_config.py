"""The IO and the callback that one configuration block describes."""

from __future__ import annotations

from typing import Any

from tiered_checkpoint_io.adapters.lightning import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks.model_checkpoint import TieredModelCheckpoint
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model.config import TieredCheckpointConfig, keys


def from_config(
    block: Any, *, logger: Logger | None = None, **overrides: Any
) -> tuple[TieredCheckpointIO | AsyncCheckpointIO, TieredModelCheckpoint]:
    """Returns the IO and the callback that a configuration block describes, for a Trainer's plugins and callbacks.

    Args:
        block: ``s3_checkpointing``: a mapping, an OmegaConf block or a TieredCheckpointConfig.
        logger: Where the IO logs, instead of the package's own logger.
        overrides: Single keys that replace those of the block, and arguments of :class:`TieredModelCheckpoint`, such as
            ``monitor``.

    Raises:
        ConfigError: A key or value is not allowed.
    """
    given = {key: value for key, value in overrides.items() if key in keys()}
    config = TieredCheckpointConfig.from_any(block, **given)
    arguments = {key: value for key, value in overrides.items() if key not in given}
    if "s3_every_n_train_steps" in given:
        # It was named beside the block, so that it does not give way to other triggers.
        arguments["s3_every_n_train_steps"] = given["s3_every_n_train_steps"]
    return TieredCheckpointIO.from_config(config, logger=logger), TieredModelCheckpoint.from_config(config, **arguments)
