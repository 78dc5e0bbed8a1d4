"""Lightning's CheckpointIO over the engine: synchronous, and asynchronous."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from lightning import __version__ as lightning_version
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsyncCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy

from tiered_checkpoint_io.engine.checkpointer import TIERS, Checkpointer, NoCheckpoint
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.redaction import shown

REFUSE_LIGHTNING_ASYNC = (
    "lightning's AsyncCheckpointIO around TieredCheckpointIO: it copies the whole state for each save, queues without"
    " bound, and does not order deletes behind saves"
)
#: What Lightning's tuner keeps for a moment, to come back to it.
_SCRATCH = (".lr_find_", ".scale_batch_size_")
#: Where a whole training state has its optimizers: Lightning's key, and Megatron's.
_OPTIMIZERS = ("optimizer_states", "optimizer")
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
        #: Whether the last load was of a sentinel, and found no checkpoint at all.
        self.found_nothing = False
        #: What is saved beside each checkpoint, and has to be there to resume from it: see :class:`Selector`.
        self.companion = ""
        self._has_said_where = False

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
            path: Below dirpath, or relative to it. An absolute local path elsewhere becomes an ordinary file.
            storage_options: ``{"tiers": ["memory"]}`` for memory alone; both tiers by default.
                ``"metric"`` may hold what a ModelCheckpoint monitored, and its value; ``"wait": False``
                lets a durable save return as :class:`AsyncCheckpointIO` does.

        Raises:
            UsageError: storage_options are not understood, or Lightning's AsyncCheckpointIO calls.
        """
        self._save(checkpoint, path, storage_options, wait=True)

    def _save(self, checkpoint: Any, path: Any, storage_options: Any, *, wait: bool) -> None:
        if self._is_elsewhere(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, str(path))
            if not self._is_scratch(path):
                self.checkpointer.session.log.info(
                    "saved %s as an ordinary file: it is not below %s, so it is in neither tier",
                    path,
                    self.config.dirpath,
                )
            return
        if sys._getframe(2).f_globals.get("__name__", "").endswith("plugins.io.async_plugin"):
            raise UsageError(REFUSE_LIGHTNING_ASYNC, operation="save", hint=USE_OURS)
        asked = read_storage_options(storage_options)
        text = os.fspath(path)
        if not (self._has_said_where or os.path.isabs(text) or ids.url_scheme(text)):
            self._has_said_where = True
            where = ids.join_url(self.config.dirpath, text)
            self.checkpointer.session.log.info("relative names are below dirpath: %s is %s", text, where)
        self.checkpointer.save(
            checkpoint,
            path,
            tiers=asked.tiers,
            wait=wait and asked.wait,
            metric=asked.metric,
            resumable=is_resumable(checkpoint, path),
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads; see :meth:`Checkpointer.load`. Tensors stay on the CPU unless told otherwise.

        Args:
            path: ``tiered:latest``, ``tiered:last``, a name, or a path or URL.
            map_location: As ``torch.load`` takes it.
            weights_only: As ``torch.load`` takes it. Lightning before 2.6 never passes it; the
                configuration's ``weights_only`` holds where it is None.
        """
        if map_location is None:
            map_location = _stay
        if self._is_scratch(path):
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(str(path), map_location)
            return found
        state: dict[str, Any] = self.checkpointer.load(
            path,
            map_location=map_location,
            weights_only=weights_only,
            companion=self.companion,
            alone=self._is_of_one_rank(path),
        )
        self.found_nothing = isinstance(state, NoCheckpoint)
        return no_checkpoint() if self.found_nothing else state

    def load_alone(self, path: str | os.PathLike[str]) -> Any:
        """What a checkpoint holds, for this rank by itself: no other is waited for.

        It is not what the run resumed from, as :meth:`load_checkpoint` would have it.
        """
        restored = self.checkpointer.restored
        try:
            return self.checkpointer.load(path, map_location=_stay, alone=True)
        finally:
            self.checkpointer.restored = restored

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes; see :meth:`Checkpointer.remove`."""
        if self._is_elsewhere(path):
            TorchCheckpointIO().remove_checkpoint(str(path))
            return
        self.checkpointer.remove(path)

    def _is_of_one_rank(self, path: str | os.PathLike[str]) -> bool:  # noqa: ARG002
        """Whether a path names what one rank alone loads."""
        return False

    def _is_scratch(self, path: str | os.PathLike[str]) -> bool:
        """Whether Lightning takes the IO for a file of the moment, outside dirpath and of one machine.

        Launchers that spawn hand the weights to their parent so; the tuner keeps the state so that
        it comes back to.
        """
        return self._is_elsewhere(path) and os.path.basename(os.fspath(path)).startswith(".")

    def _is_elsewhere(self, path: str | os.PathLike[str]) -> bool:
        """Whether a path is an absolute local one outside dirpath."""
        text = os.fspath(path)
        if not os.path.isabs(text) or ".." in text.split("/"):
            # A name says where it lies: the engine refuses what leaves its folder again.
            return False
        return not ids.normalize_dirpath(text).startswith(self.config.dirpath.rstrip("/") + "/")

    def teardown(self) -> None:
        """Waits for queued work and frees everything; the IO may be used again."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def __getstate__(self) -> dict[str, Any]:
        # Launchers that spawn pickle the IO; each process opens its own engine.
        return {**self.__dict__, "_checkpointer": None}


class AsyncCheckpointIO(_WrappingCheckpointIO):
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
        super().__init__(checkpoint_io)
        self._tiered = checkpoint_io

    @property
    def config(self) -> TieredCheckpointConfig:
        """The configuration of the wrapped IO."""
        return self._tiered.config

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine of the wrapped IO."""
        return self._tiered.checkpointer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As :meth:`TieredCheckpointIO.save_checkpoint`, without waiting for the durable tier."""
        self._tiered._save(checkpoint, path, storage_options, wait=False)

    def teardown(self) -> None:
        """As :meth:`TieredCheckpointIO.teardown`."""
        self._tiered.teardown()


def tiered_io_of(checkpoint_io: Any) -> TieredCheckpointIO | None:
    """The TieredCheckpointIO that a strategy's checkpoint IO is, or wraps; None where it is not ours.

    Raises:
        UsageError: It is ours, inside Lightning's AsyncCheckpointIO.
    """
    if isinstance(checkpoint_io, AsyncCheckpointIO):
        return checkpoint_io._tiered
    if isinstance(checkpoint_io, LightningAsyncCheckpointIO) and tiered_io_of(checkpoint_io.checkpoint_io) is not None:
        raise UsageError(REFUSE_LIGHTNING_ASYNC, operation="setup", hint=USE_OURS)
    return checkpoint_io if isinstance(checkpoint_io, TieredCheckpointIO) else None


def require_tiered_io(strategy: Strategy, user: str) -> TieredCheckpointIO:
    """The TieredCheckpointIO of a strategy, without which ``user`` can't work.

    Raises:
        UsageError: It has another one.
    """
    io = tiered_io_of(strategy.checkpoint_io)
    if io is None:
        raise UsageError(
            f"{user} with a {type(strategy.checkpoint_io).__name__}",
            operation="setup",
            hint="give the trainer plugins=[TieredCheckpointIO(...)], or AsyncCheckpointIO around it",
        )
    return io


def no_checkpoint() -> NoCheckpoint:
    """What Lightning is given where there is nothing to resume from."""
    # By this key Lightning knows a checkpoint of its own release: with it alone, it skips every step of a restore.
    return NoCheckpoint({"pytorch-lightning_version": lightning_version})


def is_resumable(checkpoint: Any, path: str | os.PathLike[str]) -> bool:
    """Whether training can resume from what Lightning saves: not from weights alone, nor from its tuner's scratch."""
    if os.path.basename(os.fspath(path)).startswith(_SCRATCH):
        return False
    is_lightnings = isinstance(checkpoint, Mapping) and {"pytorch-lightning_version", "state_dict"} <= set(checkpoint)
    return not is_lightnings or any(key in checkpoint for key in _OPTIMIZERS)


class StorageOptions(NamedTuple):
    """What ``storage_options`` of a save say."""

    tiers: Collection[str] = TIERS
    metric: tuple[str, float] | None = None
    wait: bool = True


def read_storage_options(options: Any) -> StorageOptions:
    """Validates ``storage_options``.

    Raises:
        UsageError: They are not ``{"tiers": [...], "metric": (name, value), "wait": bool}``, or a part of that.
    """
    allowed = "allowed: {'tiers': ['memory', 'durable'] or one of the two, 'metric': (name, value), 'wait': bool}"
    if options is None:
        return StorageOptions()
    if not isinstance(options, Mapping):
        raise UsageError(f"storage_options is {shown(options)}", operation="save", hint=allowed)
    tiers, metric, wait = options.get("tiers", TIERS), options.get("metric"), options.get("wait", True)
    if unknown := {str(key) for key in options} - {"tiers", "metric", "wait"}:
        # Not their values: for other libraries these options hold credentials.
        raise UsageError(f"storage_options has {', '.join(sorted(unknown))}", operation="save", hint=allowed)
    if not isinstance(wait, bool):
        raise UsageError(f"storage_options['wait'] is {wait!r}", operation="save", hint=allowed)
    if isinstance(tiers, str):
        tiers = [tiers]
    if not isinstance(tiers, Collection) or not tiers or not all(isinstance(t, str) and t in TIERS for t in tiers):
        raise UsageError(f"storage_options['tiers'] is {tiers!r}", operation="save", hint=allowed)
    if metric is not None:
        try:
            name, value = metric
            if not isinstance(name, str):
                raise TypeError(name)
            metric = name, float(value)
        except (TypeError, ValueError) as error:
            raise UsageError(f"storage_options['metric'] is {metric!r}", operation="save", hint=allowed) from error
    return StorageOptions(tiers, metric, wait)


def _stay(storage: Any, _: Any) -> Any:
    return storage
