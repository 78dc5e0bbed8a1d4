"""NeMo's ``S3CheckpointIO``, keyword for keyword, over both tiers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.errors import ConfigError, DrainError, UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.layouts import rank_folder_of

_FULL_STATE = ("optimizer_states", "lr_schedulers")


class NeMoCheckpointIO(TieredCheckpointIO):
    """A TieredCheckpointIO that understands what NeMo's callbacks and strategies tell a checkpoint IO.

    ``storage_options`` may hold ``finalize_fn``, called on the ranks that saved once the checkpoint is
    committed, and ``include_optimizer``. Checkpoints that hold OmegaConf's objects, as NeMo's models do,
    load without ``weights_only=False``. A path in ``mp_rank_00/`` and its kin is that of one rank alone.
    """

    def __init__(
        self, dirpath: Any = None, *, async_checkpointing: bool = False, logger: Logger | None = None, **options: Any
    ) -> None:
        """As :class:`TieredCheckpointIO`.

        Args:
            dirpath: The durable tier, or a configuration.
            async_checkpointing: Whether a save returns once the snapshot stands in node memory.
            logger: Where to log.
            options: Any other key of :class:`TieredCheckpointConfig`.
        """
        super().__init__(dirpath, logger=logger, **options)
        #: Whether a save returns once the snapshot stands in node memory.
        self.async_checkpointing = bool(async_checkpointing) or self.config.enable_async_checkpointing
        #: What is to be called once a save is durable, by the save's id, in order.
        self._to_finalize: dict[str, Callable[[], object]] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """As :meth:`TieredCheckpointIO.save_checkpoint`, and NeMo's ``storage_options``."""
        options, finalize, state = _split(checkpoint, storage_options)
        session = self.checkpointer.session
        before = session.last_save
        self._save(state, path, options, wait=not self.async_checkpointing)
        report = session.last_save
        if finalize is not None and report is not None and report is not before:
            self._to_finalize[report.save_id] = finalize
            if not self.async_checkpointing or report.tiers != {"memory", "durable"}:
                # It is where it was meant to be.
                self._to_finalize.pop(report.save_id)()
        self.maybe_finalize_save_checkpoint()

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> bool:
        """Calls ``finalize_fn`` of saves that are durable by now, in order.

        Args:
            blocking: Whether to wait for those that are on their way. One that fails is never called, and
                told of by the next save or the teardown.

        Returns:
            Whether any was called.
        """
        if not self._to_finalize:
            return False
        if blocking:
            # What fails is shown by the next save, or by the teardown.
            with contextlib.suppress(DrainError):
                self.checkpointer.wait()
        called = False
        for save_id in list(self._to_finalize):
            outcome = self.checkpointer.session.outcome(save_id)
            if outcome is not None and outcome.state != "failed":
                finalize = self._to_finalize.pop(save_id)
                if outcome.state == "committed":
                    called = True
                    finalize()
        return called

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As :meth:`TieredCheckpointIO.load_checkpoint`."""
        with _omegaconf_is_safe():
            return super().load_checkpoint(path, map_location, weights_only)

    def load_alone(self, path: str | os.PathLike[str]) -> Any:
        """As :meth:`TieredCheckpointIO.load_alone`."""
        with _omegaconf_is_safe():
            return super().load_alone(path)

    def teardown(self) -> None:
        """As :meth:`TieredCheckpointIO.teardown`; calls what is left of ``finalize_fn`` before."""
        self.maybe_finalize_save_checkpoint(blocking=True)
        self._to_finalize.clear()
        super().teardown()

    def _is_of_one_rank(self, path: str | os.PathLike[str]) -> bool:
        return rank_folder_of(os.fspath(path)) is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_to_finalize": {}}


class S3CheckpointIO(NeMoCheckpointIO):
    """What NeMo's ``S3CheckpointIO`` promises: checkpoints below an S3 URL, for any strategy that takes an IO."""

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        chunk_size_MB: int | None = None,  # noqa: N803 - NeMo's
        max_read_concurrency: int | Literal["auto"] | None = None,
        max_write_concurrency: int | Literal["auto"] | None = None,
        async_checkpointing: bool | None = False,
        **options: Any,
    ) -> None:
        """Takes NeMo's arguments, in NeMo's order; asks nothing of S3.

        Args:
            dirpath: ``s3://bucket/prefix``.
            chunk_size_MB: Size of one part of an upload, MiB; None for 64.
            max_read_concurrency: Ranges in flight at once; None for ``auto``.
            max_write_concurrency: Parts in flight at once; None for ``auto``.
            async_checkpointing: Whether a save returns once the snapshot stands in node memory.
            options: Any other key of :class:`TieredCheckpointConfig`, such as ``namespace``.

        Raises:
            ConfigError: dirpath is not an S3 URL, or another value is not allowed.
        """
        if not ids.is_s3_url(dirpath):
            raise ConfigError(
                f"S3CheckpointIO with dirpath {os.fspath(dirpath)!r}",
                hint="give an S3 URL; for other folders use tiered_checkpoint_io.TieredCheckpointIO",
            )
        given = {
            "chunk_size_MB": chunk_size_MB,
            "max_read_concurrency": max_read_concurrency,
            "max_write_concurrency": max_write_concurrency,
        }
        options |= {key: value for key, value in given.items() if value is not None}
        super().__init__(os.fspath(dirpath), async_checkpointing=bool(async_checkpointing), **options)


def _split(state: dict[str, Any], options: Any) -> tuple[Any, Callable[[], object] | None, dict[str, Any]]:
    """What of storage_options is ours, ``finalize_fn``, and the state that is to be saved."""
    if not isinstance(options, Mapping):
        return options, None, state
    ours = {key: value for key, value in options.items() if key not in ("finalize_fn", "include_optimizer")}
    finalize = options.get("finalize_fn")
    if finalize is not None and not callable(finalize):
        raise UsageError(
            f"storage_options['finalize_fn'] is {finalize!r}", operation="save", hint="allowed: a function, or None"
        )
    if not options.get("include_optimizer", True):
        state = {key: value for key, value in state.items() if key not in _FULL_STATE}
    return ours or None, finalize, state


@contextlib.contextmanager
def _omegaconf_is_safe() -> Iterator[None]:
    """Lets torch load what NeMo's hyper-parameters are made of: containers of OmegaConf, which run no code."""
    from collections import defaultdict

    from omegaconf import DictConfig, ListConfig, base, nodes

    values = [each for each in vars(nodes).values() if isinstance(each, type) and issubclass(each, base.Node)]
    builtin: list[Any] = [dict, list, tuple, set, int, float, str, bool, bytes, defaultdict, Any]
    with torch.serialization.safe_globals(
        [DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, *values, *builtin]
    ):
        yield
