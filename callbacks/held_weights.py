"""Whose weights a trainer holds: after an evaluation they may be of another step than its optimizers' states."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids


class HeldWeights:
    """Whether a trainer holds the weights that it has trained.

    An evaluation replaces these by what it loads, or by those of another module. The trainer still has the optimizers'
    states, the loops and the step of the training that has ended, so what it saves then is nothing to resume from.
    """

    def __init__(self) -> None:
        #: Whether they are others than those that it has trained.
        self.are_others = False
        #: The module that was trained. Its number does: while it is compared, a second module exists beside it.
        self._trained: int | None = None
        self._has_warned = False

    def train(self, module: LightningModule) -> None:
        """Notes that a training goes on with what the module holds now."""
        self._trained, self.are_others = id(module), False

    def evaluate(self, module: LightningModule, *, loaded: bool) -> None:
        """Notes that a module is evaluated, which may have loaded its weights from a checkpoint."""
        self.are_others |= self._trained is not None and (loaded or self._trained != id(module))

    def warn(self, log: Logger) -> None:
        """Says once what is left out of a resume."""
        if self.are_others and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the weights are those of an evaluation, and the optimizers' states those of the training before it:"
                " what trainer.save_checkpoint saves now is loaded by its name alone, and %s passes it by",
                ids.LATEST,
            )
