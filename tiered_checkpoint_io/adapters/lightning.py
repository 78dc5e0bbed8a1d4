"""Lightning's CheckpointIO over the engine: synchronous, and asynchronous; and the saves that Lightning makes by it."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_type_hints

from lightning import __version__ as lightning_version
from lightning.pytorch.plugins.io import AsyncCheckpointIO as LightningAsyncCheckpointIO
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from typing_extensions import Unpack

from tiered_checkpoint_io.engine.checkpointer import TIERS, Checkpointer, NoCheckpoint
from tiered_checkpoint_io.engine.ranks.coordination import train_here
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, RestoreError, shown
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.node import register_owner
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import NOT_OF_IO, IOKeys, TieredCheckpointConfig, keys, refuse_keys_of_others
from tiered_checkpoint_io.model.manifest import Metric

#: Names of files that Lightning's tuner keeps for a moment, to come back to them.
_SCRATCH = (".lr_find_", ".scale_batch_size_")
#: Key by which Lightning knows a checkpoint of its own; without it, a Trainer fails with a KeyError.
_VERSION = "pytorch-lightning_version"
#: Keys of the optimizers in a whole training state: Lightning's, and Megatron's.
OPTIMIZERS = ("optimizer_states", "optimizer")


def is_of_tuner(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is the scratch of Lightning's tuner, in ``default_root_dir``."""
    return os.path.basename(os.fspath(path)).startswith(_SCRATCH)


def check_saved_by_trainer(checkpoint: Any, name: str) -> None:
    """Raises RestoreError for a checkpoint that a Trainer can't start from, as of a loop without one."""
    if not isinstance(checkpoint, Mapping) or _VERSION not in checkpoint:
        raise RestoreError(
            f"{name} was not saved by a Trainer: it has no {_VERSION!r}",
            operation="load",
            hint="load its weights by TieredCheckpointIO.load_checkpoint, and fit without ckpt_path",
        )


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
    metric: Metric | None = None
    wait: bool = True


def read_storage_options(options: Any) -> StorageOptions:
    """Validates ``storage_options``."""
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
            metric = Metric(name, float(value))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            # RuntimeError is torch's, of a tensor of several elements.
            raise ConfigError(f"storage_options['metric'] is {metric!r}", operation="save", hint=allowed) from error
    return StorageOptions(tiers, metric, wait)


_making = threading.Lock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


class TieredCheckpointIO(CheckpointIO):
    """Checkpoints to node memory and to the durable tier; a save returns when its tiers have the checkpoint.

    Tensors of any shape, dtype and device are copied before a save returns: later changes do not affect the checkpoint.
    """

    #: Keys that it does not read.
    _not_ours: ClassVar[Mapping[str, str]] = NOT_OF_IO

    def __init__(
        self,
        # With Path, jsonargparse takes a text for the place itself, and reads no file of configuration there.
        dirpath: str | Path | os.PathLike[str] | TieredCheckpointConfig | None = None,
        *,
        logger: Logger | None = None,
        **options: Unpack[IOKeys],
    ) -> None:
        """Validates the configuration; opens nothing.

        Args:
            dirpath: The durable tier: an S3 URL, any fsspec URL, or a directory. Or a :class:`TieredCheckpointConfig`:
                then each further argument that is given replaces the configuration's.
            logger: Logger to use instead of the package's own.
            options: Keys of :class:`TieredCheckpointConfig`, which describes them; not keys that only
                ``TieredModelCheckpoint`` or :meth:`from_config` reads.

        Raises:
            ConfigError: A key or value is not allowed.
        """
        refuse_keys_of_others(options, type(self).__name__, self._not_ours)
        block = dirpath if isinstance(dirpath, TieredCheckpointConfig) else {"dirpath": dirpath}
        self.config = TieredCheckpointConfig.from_any(block, **options)
        self._logger = logger
        self._checkpointer: Checkpointer | None = None
        #: True if the last load was of a sentinel, and found no checkpoint at all.
        self.found_nothing = False
        #: Returns True for the path from which a Trainer restores now; set by the guard.
        self.is_for_trainer: Callable[[Any], bool] | None = None
        #: True if the trainer has put averages, or the best weights, in the place of the trained ones.
        self.holds_other_weights = False
        #: True if the trainer's next save has weights of one step and optimizers' states of another.
        self.mixes_steps = False
        self._has_said_where = False

    @staticmethod
    def train_here() -> None:
        """Notes that this thread trains. A loop on a worker thread, as with Ray Train, calls this before it loads."""
        train_here()

    @staticmethod
    def from_config(
        block: Any, *, logger: Logger | None = None, **overrides: Any
    ) -> TieredCheckpointIO | AsyncCheckpointIO:
        """Makes the IO of a configuration block; raises ConfigError for a key or value that is not allowed.

        Args:
            block: ``s3_checkpointing``: a mapping, an OmegaConf block or a TieredCheckpointConfig.
            logger: Instead of the package's own logger.
            overrides: Single keys that replace keys of the block.

        Returns:
            An :class:`AsyncCheckpointIO` if ``enable_async_checkpointing`` is true.
        """
        config = TieredCheckpointConfig.from_any(block, **overrides)
        io = TieredCheckpointIO(config, logger=logger)
        return AsyncCheckpointIO(io) if config.enable_async_checkpointing else io

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine; made on first use, in the process that uses it."""
        with _making:
            # Of threads that save at once, all get the same.
            if self._checkpointer is None:
                self._checkpointer = Checkpointer(self.config, logger=self._logger)
                register_owner(self)
            return self._checkpointer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves to node memory and the durable tier, or to some tiers; returns when these have the checkpoint.

        A failed save is logged, and training continues; with ``on_save_error: raise`` its error is raised.

        Args:
            checkpoint: The state.
            path: Below dirpath, or relative to it. An absolute local path elsewhere becomes an ordinary file.
            storage_options: ``{"tiers": ["memory"]}`` for only memory; both tiers by default. ``"metric"`` may hold the
                name and value that a ModelCheckpoint monitored; ``"wait": False`` lets a durable save return as
                :class:`AsyncCheckpointIO` does.

        Raises:
            SaveError: The save failed, or an earlier one in the background did, and ``on_save_error`` is ``raise``.
            ConfigError: The path leaves dirpath, or is no name; or storage_options are not understood.
        """
        self._save(checkpoint, path, storage_options, wait=True)

    def _save(self, checkpoint: Any, path: Any, storage_options: Any, *, wait: bool) -> None:
        if self._is_elsewhere(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, str(path))
            if not self._is_scratch(path):
                text = "saved %s as an ordinary file: it is not below %s, so it is in neither tier"
                self.checkpointer.session.log.info(text, path, self.config.dirpath)
            return
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
            resumable=self.is_resumable(checkpoint, path),
        )

    def is_resumable(self, checkpoint: Any, path: str | os.PathLike[str]) -> bool:
        """Returns True if training can resume from a save made now: not from weights only, nor its tuner's files.

        Nor from a save of a Trainer that has not trained: it only evaluated, or its launcher (``ddp_spawn``,
        ``ddp_notebook``) trained in processes of their own. Training would begin at step 0, without optimizers' states.
        """
        if self.mixes_steps or is_of_tuner(path):
            return False
        if not isinstance(checkpoint, Mapping) or not {_VERSION, "state_dict"} <= set(checkpoint):
            return True
        return any(key in checkpoint for key in OPTIMIZERS) and not _has_not_trained(checkpoint)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads an intact copy from node memory, a peer or the durable tier; every byte is verified.

        Tensors have their saved shape and dtype, and are on the CPU without a ``map_location``.

        Args:
            path: ``tiered:latest``, ``tiered:last``, a name, or a path or URL.
            map_location: As ``torch.load`` takes it.
            weights_only: As ``torch.load`` takes it.

        Returns:
            The state. If ``tiered:latest`` or ``tiered:last`` finds no checkpoint, a falsy :class:`FreshStart`: a
            Trainer then trains from scratch, and ``fabric.load`` into a state raises a CheckpointNotFoundError.

        Raises:
            CheckpointNotFoundError: No tier has a checkpoint of that name.
            RestoreError: There are checkpoints, but none is intact; or the ranks can't agree on one.
            StoreError: The durable tier could not be read, and memory does not suffice.
        """
        # Upstream's function does the same, but torch takes none for DTensors.
        place: Any = "cpu" if map_location is None else map_location
        if self._is_scratch(path):
            self.found_nothing = False
            trust, where = Trust.of(self.config, weights_only), {"key": str(path)}
            state: dict[str, Any] = trust.read(path, "the scratch file", where, verified=False, map_location=place)
            return state
        state = self.checkpointer.load(path, map_location=place, weights_only=weights_only)
        self.found_nothing = isinstance(state, NoCheckpoint)
        if self.found_nothing:
            return FreshStart(self.config.dirpath)
        if self.is_for_trainer is not None and self.is_for_trainer(path):
            check_saved_by_trainer(state, getattr(self.checkpointer.restored, "name", str(path)))
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint from both tiers; from the durable one in the background, after the newest save."""
        if self._is_elsewhere(path):
            TorchCheckpointIO().remove_checkpoint(str(path))
            return
        self.checkpointer.remove(path)

    def _is_scratch(self, path: str | os.PathLike[str]) -> bool:
        """Returns True for a temporary file outside dirpath, of Lightning's launchers that spawn or of its tuner."""
        return self._is_elsewhere(path) and os.path.basename(os.fspath(path)).startswith(".")

    def _is_elsewhere(self, path: str | os.PathLike[str]) -> bool:
        """Returns True for an absolute local path outside dirpath, or a path of the tuner there."""
        text = os.fspath(path)
        if not (is_of_tuner(text) and "/" in text) and (not os.path.isabs(text) or ".." in text.split("/")):
            # A name is a path below dirpath: the engine refuses a name that leaves its folder.
            return False
        # dirpath itself is no place for a file: the engine refuses it as a name.
        return not (ids.normalize_dirpath(text).rstrip("/") + "/").startswith(self.config.dirpath.rstrip("/") + "/")

    def teardown(self) -> None:
        """Waits for queued work and frees everything; the IO may be used again."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def forked(self) -> None:
        """See :class:`node.Owner`: the engine that a child makes knows its own rank."""
        self._checkpointer = None

    def __getstate__(self) -> dict[str, Any]:
        # Launchers that spawn pickle the IO; each process opens its own engine.
        return {**self.__dict__, "_checkpointer": None, "is_for_trainer": None}


def _signature() -> inspect.Signature:
    """Returns the signature of an IO with each key: for ``help``, and for command lines that are made from it."""
    own = inspect.signature(TieredCheckpointIO.__init__)
    hints, given = get_type_hints(TieredCheckpointConfig), list(own.parameters.values())[:-1]
    made = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(TieredCheckpointConfig)
        if each.name in keys() and each.name != "dirpath" and each.name not in NOT_OF_IO
    ]
    return own.replace(parameters=[*given, *made])


vars(TieredCheckpointIO)["__init__"].__signature__ = _signature()


class AsyncCheckpointIO(_WrappingCheckpointIO):
    """Makes a :class:`TieredCheckpointIO` return as soon as the checkpoint is in node memory.

    The upload continues in the background. Its failure is logged once, in the trainer's log; training continues, or
    with ``on_save_error: raise`` the next save raises the failure.
    """

    def __init__(self, checkpoint_io: TieredCheckpointIO) -> None:
        """Wraps an IO.

        Args:
            checkpoint_io: The IO whose saves are not to wait for the durable tier.

        Raises:
            ConfigError: Not a TieredCheckpointIO: only such an IO copies the state before a save returns.
        """
        if not isinstance(checkpoint_io, TieredCheckpointIO):
            raise ConfigError(
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
        """Saves as :meth:`TieredCheckpointIO.save_checkpoint`, but does not wait for the durable tier."""
        self._tiered._save(checkpoint, path, storage_options, wait=False)

    def teardown(self) -> None:
        """Does :meth:`TieredCheckpointIO.teardown`."""
        self._tiered.teardown()


class FreshStart(NoCheckpoint):
    """An empty checkpoint for Lightning, if there is nothing to resume from."""

    def __init__(self, dirpath: str) -> None:
        """Takes the durable tier without a checkpoint."""
        # With only this key, Lightning skips every step of a restore.
        super().__init__({_VERSION: lightning_version})
        self._dirpath = dirpath

    def keys(self) -> Any:
        """Refuses the keys, which Fabric asks for before it fills a state, model or optimizer; a Trainer never does.

        An unfilled state would be taken for restored.
        """
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {self._dirpath} yet, so nothing was loaded into the state",
            operation="load",
            key=self._dirpath,
            hint="catch CheckpointNotFoundError where the first start of a run has none",
        )


def tiered_io_of(checkpoint_io: Any) -> TieredCheckpointIO | None:
    """Returns the TieredCheckpointIO that a strategy's checkpoint IO is, or wraps; None if there is none.

    Raises:
        ConfigError: Lightning's AsyncCheckpointIO wraps a TieredCheckpointIO.
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
    """Returns the TieredCheckpointIO of a strategy, without which ``user`` can't work."""
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"{user} in a trainer of pytorch_lightning, whose classes are others than those of lightning",
            operation="setup",
            hint="import Trainer from lightning.pytorch, and Fabric from lightning.fabric",
        )
    io = tiered_io_of(strategy.checkpoint_io)
    if io is None:
        raise ConfigError(
            f"{user} with a {type(strategy.checkpoint_io).__name__}",
            operation="setup",
            hint="give the trainer plugins=[TieredCheckpointIO(...)], or AsyncCheckpointIO around it",
        )
    return io
