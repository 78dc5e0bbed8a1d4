"""Whose weights a trainer holds: an evaluation, an export of the best or averages may leave others than it trained."""

from __future__ import annotations

import weakref
from typing import Any

from lightning.pytorch import LightningModule

from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids


class HeldWeights:
    """Whether a trainer holds the weights that it has trained.

    An evaluation may load others into the trained module, or hold another module; NeMo exports the best; callbacks that
    average weights leave the averages where training ends. The trainer still has the optimizers' states, the loops and
    the step of the training that has ended, so what it saves then is nothing to resume from.
    """

    def __init__(self) -> None:
        #: The module that was trained, for as long as it exists.
        self._trained: weakref.ref[LightningModule] | None = None
        #: Whether other weights were loaded into it since, and no more.
        self._has_loaded = False
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        # For a process that is spawned: it has a module of its own.
        return {**vars(self), "_trained": None, "_has_loaded": False}

    def train(self, module: LightningModule) -> None:
        """Notes that a training goes on with what the module holds now."""
        self._trained, self._has_loaded = weakref.ref(module), False

    def load(self, module: LightningModule) -> None:
        """Notes that a module has got other weights, as a checkpoint's, and nothing else that belongs to them."""
        self._has_loaded |= self._trained is not None and self._trained() is module

    def are_others(self, module: LightningModule) -> bool:
        """Whether a module, the one that the trainer has now, holds other weights than those that it has trained."""
        return self._trained is not None and (self._has_loaded or self._trained() is not module)

    def warn(self, log: Logger) -> None:
        """Says once what is left out of a resume."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the weights are those of an evaluation or of the best checkpoint, or averages, and the optimizers'"
                " states those of the training before: what trainer.save_checkpoint saves now is loaded by its name"
                " alone, and %s passes it by",
                ids.LATEST,
            )
