"""Which of our checkpoint IOs a strategy has."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsyncCheckpointIO
from lightning.pytorch.strategies import Strategy

from tiered_checkpoint_io.adapters.lightning import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.errors import ConfigError


def tiered_io_of(checkpoint_io: Any) -> TieredCheckpointIO | None:
    """The TieredCheckpointIO that a strategy's checkpoint IO is, or wraps; None where it is not ours.

    Raises:
        ConfigError: It is ours, inside Lightning's AsyncCheckpointIO.
    """
    if isinstance(checkpoint_io, AsyncCheckpointIO):
        return checkpoint_io._tiered
    if isinstance(checkpoint_io, LightningAsyncCheckpointIO) and tiered_io_of(checkpoint_io.checkpoint_io) is not None:
        raise ConfigError(
            "lightning's AsyncCheckpointIO around TieredCheckpointIO: it copies the whole state for each save, queues"
            " without bound, and does not order deletes after saves",
            operation="setup",
            hint="use tiered_checkpoint_io.AsyncCheckpointIO(TieredCheckpointIO(...)) instead",
        )
    return checkpoint_io if isinstance(checkpoint_io, TieredCheckpointIO) else None


def require_tiered_io(strategy: Strategy, user: str) -> TieredCheckpointIO:
    """The TieredCheckpointIO of a strategy, without which ``user`` can't work.

    Raises:
        ConfigError: It has another one, or is not of the package that ours are derived from.
    """
    if not isinstance(strategy, Strategy):
        raise of_other_package(user)
    io = tiered_io_of(strategy.checkpoint_io)
    if io is None:
        raise ConfigError(
            f"{user} with a {type(strategy.checkpoint_io).__name__}",
            operation="setup",
            hint="give the trainer plugins=[TieredCheckpointIO(...)], or AsyncCheckpointIO around it",
        )
    return io


def of_other_package(user: str) -> ConfigError:
    """What is raised where ``user`` is in a trainer of pytorch_lightning: plugins=[...] would be refused there, too."""
    return ConfigError(
        f"{user} in a trainer of pytorch_lightning, whose classes are others than those of lightning",
        operation="setup",
        hint="import Trainer from lightning.pytorch, and Fabric from lightning.fabric",
    )
