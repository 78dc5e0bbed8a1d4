"""NeMo's ``S3CheckpointIO``, keyword for keyword, over both tiers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, read_storage_options
from tiered_checkpoint_io.errors import ConfigError, DrainError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_FULL_STATE = ("optimizer_states", "lr_schedulers")
#: NeMo's own default behaviour: which steps are saved is a matter of its callback, and saves wait.
NEMO_DEFAULTS: Mapping[str, Any] = {
    "memory_every_n_train_steps": None,
    "s3_every_n_train_steps": None,
    "enable_async_checkpointing": False,
}


class NeMoCheckpointIO(TieredCheckpointIO):
    """A TieredCheckpointIO that understands the arguments of NeMo's callbacks and strategies.

    ``storage_options`` may hold ``finalize_fn``, called on the ranks that saved once each requested tier has the
    checkpoint, never if a tier fails, and ``include_optimizer``.
    """

    #: NeMo's callback reads them from its IO.
    _not_ours: ClassVar[Mapping[str, str]] = {}

    def __init__(self, dirpath: Any = None, *, async_checkpointing: bool | None = False, **options: Any) -> None:
        """Takes :class:`TieredCheckpointIO`'s arguments; ``async_checkpointing`` returns after the save to memory."""
        if not isinstance(dirpath, TieredCheckpointConfig):
            options = {**NEMO_DEFAULTS, **options}
        super().__init__(dirpath, **options)
        self.async_checkpointing = bool(async_checkpointing) or self.config.enable_async_checkpointing
        #: Functions to call once a save is durable, by save id, in order.
        self._to_finalize: dict[str, Callable[[], object]] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Saves as :meth:`TieredCheckpointIO.save_checkpoint`; also takes NeMo's ``storage_options``."""
        finalize: Any = None
        if isinstance(storage_options, Mapping):
            ours = dict(storage_options)
            finalize = ours.pop("finalize_fn", None)
            if not ours.pop("include_optimizer", True):
                checkpoint = {key: value for key, value in checkpoint.items() if key not in _FULL_STATE}
            storage_options = ours or None
        if finalize is not None and not callable(finalize):
            raise ConfigError(
                f"storage_options['finalize_fn'] is {finalize!r}", operation="save", hint="allowed: a function, or None"
            )
        session = self.checkpointer.session
        before = session.last_save
        self._save(checkpoint, path, storage_options, wait=not self.async_checkpointing)
        report = session.last_save
        if finalize is not None and report is not None and report is not before:
            if report.queued:
                self._to_finalize[report.save_id] = finalize
            elif report.is_durable or "durable" not in read_storage_options(storage_options).tiers:
                # Every tier of this save has it already; not if too many wait for the durable one.
                finalize()
        self.maybe_finalize_save_checkpoint()

    def maybe_finalize_save_checkpoint(self, blocking: bool = False) -> bool:
        """Calls ``finalize_fn`` of saves that are durable by now, in order; returns True if any was called.

        With ``blocking``, waits for queued uploads. If an upload fails, its ``finalize_fn`` is never called, and the
        next save or the teardown raises the error.
        """
        if not self._to_finalize:
            return False
        if blocking:
            with contextlib.suppress(DrainError):
                self.checkpointer.session.wait()
        called = False
        for save_id in list(self._to_finalize):
            outcome = self.checkpointer.session.outcome(save_id)
            if outcome is not None and outcome.state != "failed":
                finalize = self._to_finalize.pop(save_id)
                if outcome.state == "committed":
                    called = True
                    finalize()
        return called

    def teardown(self) -> None:
        """Calls each ``finalize_fn`` that is due, then does :meth:`TieredCheckpointIO.teardown`."""
        self.maybe_finalize_save_checkpoint(blocking=True)
        self._to_finalize.clear()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_to_finalize": {}}


class S3CheckpointIO(NeMoCheckpointIO):
    """Saves checkpoints below an S3 URL, for any strategy that takes an IO, as NeMo's ``S3CheckpointIO`` promises."""

    def __init__(
        self,
        # With Path, jsonargparse takes a text for the place itself.
        dirpath: str | Path | os.PathLike[str] | TieredCheckpointConfig,
        chunk_size_MB: int | None = None,  # noqa: N803 - NeMo's
        max_read_concurrency: int | Literal["auto"] | None = None,
        max_write_concurrency: int | Literal["auto"] | None = None,
        async_checkpointing: bool | None = False,
        **options: Any,
    ) -> None:
        """Takes NeMo's arguments, in NeMo's order; sends no request to S3.

        Args:
            dirpath: ``s3://bucket/prefix``, or a configuration with one.
            chunk_size_MB: Size of one part of an upload, MiB; None for 64.
            max_read_concurrency: Ranges in flight at once; None for ``auto``.
            max_write_concurrency: Parts in flight at once; None for ``auto``.
            async_checkpointing: True if a save returns once the checkpoint is in node memory.
            options: Any other key of :class:`TieredCheckpointConfig`, such as ``namespace``.

        Raises:
            ConfigError: dirpath is not an S3 URL, or another value is not allowed.
        """
        given_path = dirpath.dirpath if isinstance(dirpath, TieredCheckpointConfig) else dirpath
        if not ids.is_s3_url(given_path):
            raise ConfigError(
                f"S3CheckpointIO with dirpath {os.fspath(given_path)!r}",
                hint="give an S3 URL; for other folders use tiered_checkpoint_io.TieredCheckpointIO",
            )
        given = {
            "chunk_size_MB": chunk_size_MB,
            "max_read_concurrency": max_read_concurrency,
            "max_write_concurrency": max_write_concurrency,
        }
        options |= {key: value for key, value in given.items() if value is not None}
        super().__init__(dirpath, async_checkpointing=async_checkpointing, **options)
