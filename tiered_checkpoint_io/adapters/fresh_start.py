"""What a load of the newest checkpoint gives where there is none."""

from __future__ import annotations

from typing import Any

from lightning import __version__ as lightning_version

from tiered_checkpoint_io.engine.checkpointer import NoCheckpoint
from tiered_checkpoint_io.errors import CheckpointNotFoundError


class FreshStart(NoCheckpoint):
    """What Lightning is given where there is nothing to resume from."""

    def __init__(self, dirpath: str) -> None:
        """Takes where there is nothing."""
        # By this key Lightning knows a checkpoint of its own release: with it alone, it skips every step of a restore.
        super().__init__({"pytorch-lightning_version": lightning_version})
        self._dirpath = dirpath

    def keys(self) -> Any:
        """A Trainer never asks for them; Fabric does, before it fills a state, model or optimizer.

        Raises:
            CheckpointNotFoundError: Always: what is not filled would be taken for restored.
        """
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {self._dirpath} yet, so nothing was loaded into the state",
            operation="load",
            key=self._dirpath,
            hint="catch CheckpointNotFoundError where the first start of a run has none",
        )
