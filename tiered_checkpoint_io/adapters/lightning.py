"""Lightning's CheckpointIO over the engine: synchronous, and asynchronous."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from lightning import __version__ as lightning_version
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsyncCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO

from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine.checkpointer import TIERS, Checkpointer, NoCheckpoint
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.logs import Logger

_OPTIONS = {"tiers", "metric"}
REFUSE_LIGHTNING_ASYNC = (
    "lightning's AsyncCheckpointIO around TieredCheckpointIO: it copies the whole state for each save, queues without"
    " bound, and does not order deletes behind saves"
)
USE_OURS = "use tiered_checkpoint_io.AsyncCheckpointIO(TieredCheckpointIO(...)) instead"


class TieredCheckpointIO(CheckpointIO):
    """Checkpoints to node memory and, as told, on to the durable tier; returns when both are done."""

    def __init__(self, dirpath: Any = None, *, logger: Logger | None = None, **options: Any) -> None:
        """Validates the configuration; opens nothing.

        Args:
            dirpath: The durable tier (S3 URL, fsspec URL or directory), or a
                :class:`TieredCheckpointConfig`.
            logger: Where to log, in place of the package's own logger.
            options: Any other key of :class:`TieredCheckpointConfig`.

        Raises:
            ConfigError: A key or value is not allowed.
        """
        if isinstance(dirpath, TieredCheckpointConfig):
            self.config = TieredCheckpointConfig.from_any(dirpath, **options)
        else:
            self.config = TieredCheckpointConfig.from_any(None, dirpath=dirpath, **options)
        self._logger = logger
        self._checkpointer: Checkpointer | None = None

    @staticmethod
    def from_config(
        block: Any, *, logger: Logger | None = None, **overrides: Any
    ) -> TieredCheckpointIO | AsyncCheckpointIO:
        """The IO that a configuration block describes.

        Args:
            block: ``s3_checkpointing``: a mapping, an OmegaConf block or a TieredCheckpointConfig.
            logger: See above.
            overrides: Single keys that replace those of the block.

        Returns:
            An :class:`AsyncCheckpointIO` where ``enable_async_checkpointing`` is true.
        """
        config = TieredCheckpointConfig.from_any(block, **overrides)
        io = TieredCheckpointIO(config, logger=logger)
        return AsyncCheckpointIO(io) if config.enable_async_checkpointing else io

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine; made on first use, in the process that uses it."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(self.config, logger=self._logger)
        return self._checkpointer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves; see :meth:`Checkpointer.save`.

        Args:
            checkpoint: The state.
            path: Below dirpath, or relative to it.
            storage_options: ``{"tiers": ["memory"]}`` for memory alone; both tiers by default.
        """
        self._save(checkpoint, path, storage_options, wait=True)

    def _save(self, checkpoint: Any, path: Any, storage_options: Any, *, wait: bool) -> None:
        if sys._getframe(2).f_globals.get("__name__", "").endswith("plugins.io.async_plugin"):
            raise UsageError(REFUSE_LIGHTNING_ASYNC, operation="save", hint=USE_OURS)
        options = dict(storage_options or {})
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise UsageError(
                f"storage_options has unknown keys {unknown}",
                operation="save",
                hint="allowed: {'tiers': ['memory', 'durable']}, or one of the two",
            )
        tiers = options.get("tiers", TIERS)
        if isinstance(tiers, str):
            tiers = [tiers]
        self.checkpointer.save(checkpoint, path, tiers=tiers, wait=wait, metric=options.get("metric"))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads; see :meth:`Checkpointer.load`. Tensors stay on the CPU unless told otherwise."""
        if map_location is None:
            map_location = _stay
        state: dict[str, Any] = self.checkpointer.load(path, map_location=map_location, weights_only=weights_only)
        if isinstance(state, NoCheckpoint):
            # The key by which Lightning knows a checkpoint of its own release: with it, and nothing
            # else, it skips every step of a restore.
            state["pytorch-lightning_version"] = lightning_version
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes; see :meth:`Checkpointer.remove`."""
        self.checkpointer.remove(path)

    def teardown(self) -> None:
        """Waits for queued work and frees everything; the IO may be used again."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def __getstate__(self) -> dict[str, Any]:
        # Launchers that spawn pickle the IO; each process opens its own engine.
        return {**self.__dict__, "_checkpointer": None}


class AsyncCheckpointIO(CheckpointIO):
    """Makes a :class:`TieredCheckpointIO` return as soon as the snapshot stands in node memory."""

    def __init__(self, checkpoint_io: TieredCheckpointIO) -> None:
        """Wraps an IO.

        Raises:
            UsageError: It is not a TieredCheckpointIO: only that one snapshots before it returns.
        """
        if not isinstance(checkpoint_io, TieredCheckpointIO):
            raise UsageError(
                f"AsyncCheckpointIO around a {type(checkpoint_io).__name__}",
                hint="it wraps a TieredCheckpointIO only: that one takes the snapshot",
            )
        self.checkpoint_io = checkpoint_io

    @property
    def config(self) -> TieredCheckpointConfig:
        """The configuration of the wrapped IO."""
        return self.checkpoint_io.config

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine of the wrapped IO."""
        return self.checkpoint_io.checkpointer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As :meth:`TieredCheckpointIO.save_checkpoint`, without waiting for the durable tier."""
        self.checkpoint_io._save(checkpoint, path, storage_options, wait=False)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As :meth:`TieredCheckpointIO.load_checkpoint`."""
        return self.checkpoint_io.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """As :meth:`TieredCheckpointIO.remove_checkpoint`."""
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """As :meth:`TieredCheckpointIO.teardown`."""
        self.checkpoint_io.teardown()


def engine_of(checkpoint_io: Any) -> Checkpointer | None:
    """The engine behind a checkpoint IO; None where it is not ours.

    Raises:
        UsageError: It is ours, inside Lightning's AsyncCheckpointIO.
    """
    if isinstance(checkpoint_io, TieredCheckpointIO | AsyncCheckpointIO):
        return checkpoint_io.checkpointer
    if isinstance(checkpoint_io, LightningAsyncCheckpointIO):
        inner = checkpoint_io.checkpoint_io
        if isinstance(inner, TieredCheckpointIO | AsyncCheckpointIO):
            raise UsageError(REFUSE_LIGHTNING_ASYNC, operation="setup", hint=USE_OURS)
    return None


def _stay(storage: Any, _: Any) -> Any:
    return storage
