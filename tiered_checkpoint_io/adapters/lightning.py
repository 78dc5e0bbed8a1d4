"""Lightning's CheckpointIO over the engine: synchronous, and asynchronous."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from tiered_checkpoint_io.adapters.fresh_start import FreshStart
from tiered_checkpoint_io.adapters.given import noting_what_is_given
from tiered_checkpoint_io.adapters.storage_options import is_of_tuner, is_resumable, read_storage_options
from tiered_checkpoint_io.engine.checkpointer import Checkpointer, NoCheckpoint
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory import forks
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import Concurrency, TieredCheckpointConfig, keys
from tiered_checkpoint_io.model.retention import Policies
from tiered_checkpoint_io.model.s3_options import S3Options

REFUSE_LIGHTNING_ASYNC = (
    "lightning's AsyncCheckpointIO around TieredCheckpointIO: it copies the whole state for each save, queues without"
    " bound, and does not order deletes after saves"
)
USE_OURS = "use tiered_checkpoint_io.AsyncCheckpointIO(TieredCheckpointIO(...)) instead"
_making = threading.Lock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


class TieredCheckpointIO(CheckpointIO):
    """Checkpoints to node memory and, as told, on to the durable tier; a save returns when both are done.

    Tensors of any shape, dtype and device are copied before a save returns: later changes do not affect the checkpoint.
    """

    _given: frozenset[str]

    @noting_what_is_given
    def __init__(
        self,
        # With Path, jsonargparse takes a text for the place itself, and reads no file of configuration there.
        dirpath: str | Path | os.PathLike[str] | TieredCheckpointConfig | None = None,
        *,
        logger: Logger | None = None,
        namespace: str = "auto",
        memory_dir: str = "/dev/shm",  # noqa: S108 - tmpfs by design; its folder is checked before use
        spill_dir: str | None = "auto",
        memory_every_n_train_steps: int | None = 10,
        s3_every_n_train_steps: int | None = 50,
        memory_keep_last: int = 2,
        retention: Policies | None = None,
        memory_allocation_percentage: int = 50,
        chunk_size_MB: int = 64,  # noqa: N803 - the name that NeMo's users know
        delta_upload: bool = False,
        max_write_concurrency: Concurrency = "auto",
        max_read_concurrency: Concurrency = "auto",
        enable_async_checkpointing: bool = True,
        staging: Literal["eager", "overlapped", "auto"] = "eager",
        on_save_error: Literal["warn", "raise"] = "warn",
        replication_factor: int = 1,
        safe_globals: tuple[str, ...] = (),
        save_on_train_end: bool = True,
        preflight: Literal["error", "warn", "off", False] = "error",
        log_dir: str | None = None,
        metrics_export: str | None = None,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        s3_options: S3Options | Mapping[str, str] | None = None,
        **unknown: NoReturn,  # no value is of this type: type checkers, too, refuse what is misspelt
    ) -> None:
        """Validates the configuration; opens nothing.

        Args:
            dirpath: The durable tier: an S3 URL, any fsspec URL, or a directory. Or a :class:`TieredCheckpointConfig`:
                then each further argument that is given replaces the configuration's.
            logger: Where to log, in place of the package's own logger.
            namespace: Keeps jobs that share a node apart in memory: letters, digits, ``_`` and ``-``; ``auto`` for one
                made from dirpath.
            memory_dir: A folder on tmpfs, or on node-local disk, for the memory tier.
            spill_dir: A folder on node-local disk for what does not fit into memory; ``auto`` for one in the system's
                temporary directory, else in ``/var/tmp``, where that is on local disk, else none; None for none.
            memory_every_n_train_steps: A checkpoint to memory every so many steps; None for none. Read by
                ``TieredModelCheckpoint.from_config``.
            s3_every_n_train_steps: A checkpoint to the durable tier every so many steps; None leaves that to
                ModelCheckpoint's other triggers. Read by ``TieredModelCheckpoint.from_config``.
            memory_keep_last: How many checkpoints memory keeps; of DCP and local ones, of each series of names.
            retention: Which checkpoints the durable tier keeps, such as ``{latest: 3, every_steps: 1000}``; without a
                policy all that are not deleted otherwise. See docs/retention.md.
            memory_allocation_percentage: Per cent of the node's memory, or of its cgroup's ``memory.max`` or
                ``memory.high``, that checkpoints take; 20 to 100.
            chunk_size_MB: Size of one part of an upload, MiB; 8 to 5,120.
            delta_upload: Whether what an earlier checkpoint has as well is copied by the server, where it can, in
                place of being sent again; each copied part is compared, which takes CPU time. Pays where the uplink is
                the limit and much of the state is frozen: see docs/deployment.md. S3 alone.
            max_write_concurrency: Parts in flight at once per node, or ``auto``.
            max_read_concurrency: Ranges in flight at once per node, or ``auto``.
            enable_async_checkpointing: Whether ``from_config`` gives an ``AsyncCheckpointIO``, whose saves return once
                the checkpoint is in node memory. ``TieredCheckpointIO`` itself does not read it.
            staging: When a save copies the state: ``eager``, before it returns; ``overlapped``, what only the
                optimizers change while the next forward and backward run; ``auto``, whichever costs training less. See
                docs/staging.md.
            on_save_error: ``warn`` and train on, or ``raise``.
            replication_factor: On how many nodes each part is kept in memory, its own included; 1 for no copies.
            safe_globals: Classes and functions, as ``module.name``, that checkpoints may hold beside tensors and plain
                data.
            save_on_train_end: Whether the last state is saved to the durable tier, as ``end_of_training.ckpt``, when
                ``fit`` ends and the newest of ``TieredModelCheckpoint`` that training can resume from is in memory
                alone.
            preflight: What follows at the start of ``fit`` where the durable tier can't be used and no retry can mend
                that: an ``error``, a warning (``warn``; also where only credentials, or rights to write, are
                missing and node memory holds a checkpoint to resume from), or nothing is tried (``off``).
            log_dir: Folder for ``{namespace}_checkpointing.log``; None for no file.
            metrics_export: Where the metrics of this node go while training runs, such as ``prometheus=9464``; None
                for nowhere. TIERED_CHECKPOINT_METRICS in the environment replaces it. See docs/metrics.md.
            endpoint_url: Of an S3 server other than AWS.
            region: AWS region.
            profile: Profile in the AWS configuration files.
            s3_options: Options of S3 requests by boto3's own names, such as ``{ServerSideEncryption: aws:kms}``:
                ``ServerSideEncryption``, ``SSEKMSKeyId``, ``ExpectedBucketOwner``, ``RequestPayer``, ``ACL``,
                ``StorageClass``, ``ChecksumAlgorithm``. Passed on as they are.
            unknown: Refused, with the nearest key that is known.

        Raises:
            ConfigError: A key or value is not allowed.
        """
        given = locals()
        options = {key: given[key] for key in keys() if key != "dirpath"}
        if isinstance(dirpath, TieredCheckpointConfig):
            options = {key: value for key, value in options.items() if key in self._given}
            self.config = TieredCheckpointConfig.from_any(dirpath, **options, **unknown)
        else:
            self.config = TieredCheckpointConfig.from_any(None, dirpath=dirpath, **options, **unknown)
        self._logger = logger
        self._checkpointer: Checkpointer | None = None
        #: Whether the last load was of a sentinel, and found no checkpoint at all.
        self.found_nothing = False
        #: What is saved beside each checkpoint, and has to be there to resume from it: see :class:`Selector`.
        self.companion = ""
        #: What a checkpoint has to hold to resume from, where a loop of Fabric has said so.
        self.resumes_with: frozenset[str] = frozenset()
        #: Whether what a trainer saves next has weights of one step and optimizers' states of another.
        self.mixes_steps = False
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
        with _making:
            # Of threads that save at once, all get the same.
            if self._checkpointer is None:
                self._checkpointer = Checkpointer(self.config, logger=self._logger)
                forks.register(self)
            return self._checkpointer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves to node memory, and to the durable tier unless told otherwise; returns when both are done.

        A save that fails is logged, and training continues; with ``on_save_error: raise`` it is raised.

        Args:
            checkpoint: The state.
            path: Below dirpath, or relative to it. An absolute local path elsewhere becomes an ordinary file.
            storage_options: ``{"tiers": ["memory"]}`` for memory alone; both tiers by default.
                ``"metric"`` may hold what a ModelCheckpoint monitored, and its value; ``"wait": False``
                lets a durable save return as :class:`AsyncCheckpointIO` does.

        Raises:
            SaveError: The save failed, or an earlier one in the background did, and ``on_save_error`` is ``raise``.
            InvalidNameError: The path leaves dirpath, or is no name.
            UsageError: storage_options are not understood, or Lightning's AsyncCheckpointIO calls.
        """
        self._save(checkpoint, path, storage_options, wait=True)

    def _save(self, checkpoint: Any, path: Any, storage_options: Any, *, wait: bool) -> None:
        if self._is_elsewhere(path):
            TorchCheckpointIO().save_checkpoint(checkpoint, str(path))
            if not self._is_scratch(path):
                text = "saved %s as an ordinary file: it is not below %s, so it is in neither tier"
                self.checkpointer.session.log.info(text, path, self.config.dirpath)
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
            resumable=self.is_resumable(checkpoint, path),
        )

    def is_resumable(self, checkpoint: Any, path: str | os.PathLike[str]) -> bool:
        """Whether training can resume from what is saved now; see the function of that name."""
        return not self.mixes_steps and is_resumable(checkpoint, path, self.resumes_with)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads from node memory, a peer or the durable tier, whichever has an intact copy; every byte is verified.

        Tensors have the shape and dtype that they were saved with, and stay on the CPU unless told otherwise.

        Args:
            path: ``tiered:latest``, ``tiered:last``, a name, or a path or URL.
            map_location: As ``torch.load`` takes it.
            weights_only: As ``torch.load`` takes it.

        Returns:
            The state. Where ``tiered:latest`` or ``tiered:last`` finds nothing, a falsy :class:`FreshStart`: a Trainer
            then trains from scratch, and ``fabric.load`` into a state raises a CheckpointNotFoundError.

        Raises:
            CheckpointNotFoundError: No tier has a checkpoint of that name.
            RestoreError: There are checkpoints, but none is intact; or the ranks can't agree on one.
            StoreError: The durable tier could not be asked, and memory alone does not do.
        """
        # Upstream's function does the same, but torch takes none for DTensors.
        place: Any = "cpu" if map_location is None else map_location
        if self._is_scratch(path):
            self.found_nothing = False
            found: dict[str, Any] = TorchCheckpointIO().load_checkpoint(str(path), place)
            return found
        state: dict[str, Any] = self.checkpointer.load(
            path,
            map_location=place,
            weights_only=weights_only,
            companion=self.companion,
            alone=self._is_of_one_rank(path),
        )
        self.found_nothing = isinstance(state, NoCheckpoint)
        return FreshStart(self.config.dirpath) if self.found_nothing else state

    def load_alone(self, path: str | os.PathLike[str]) -> Any:
        """What a checkpoint holds, for this rank by itself: no other is waited for.

        It is not what the run resumed from, as :meth:`load_checkpoint` would have it.
        """
        restored = self.checkpointer.restored
        try:
            return self.checkpointer.load(path, map_location="cpu", alone=True)
        finally:
            self.checkpointer.restored = restored

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint from both tiers; from the durable one in the background, after earlier saves."""
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
        """Whether a path is an absolute local one outside dirpath, or any there of what the tuner keeps."""
        text = os.fspath(path)
        if not (is_of_tuner(text) and "/" in text) and (not os.path.isabs(text) or ".." in text.split("/")):
            # A name says where it lies: the engine refuses what leaves its folder again.
            return False
        # dirpath itself is no place for a file: the engine refuses it as a name.
        return not (ids.normalize_dirpath(text).rstrip("/") + "/").startswith(self.config.dirpath.rstrip("/") + "/")

    def teardown(self) -> None:
        """Waits for queued work and frees everything; the IO may be used again."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def forked(self) -> None:
        """See :class:`forks.Owner`: the engine that a child makes knows its own rank."""
        self._checkpointer = None

    def __getstate__(self) -> dict[str, Any]:
        # Launchers that spawn pickle the IO; each process opens its own engine.
        return {**self.__dict__, "_checkpointer": None}


class AsyncCheckpointIO(_WrappingCheckpointIO):
    """Makes a :class:`TieredCheckpointIO` return as soon as the checkpoint is in node memory.

    The upload goes on in the background. Its failure is logged once, in the trainer's log; training continues, or with
    ``on_save_error: raise`` the next save raises it.
    """

    def __init__(self, checkpoint_io: TieredCheckpointIO) -> None:
        """Wraps an IO.

        Args:
            checkpoint_io: The IO whose saves are not to wait for the durable tier.

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
