"""Trainers of pytorch_lightning: it has classes of the same names as lightning's, from which ours are derived."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from tiered_checkpoint_io.adapters.lightning import of_other_package

#: So many callbacks, and IOs around one another, are looked at.
_MOST = 100


class OtherTrainerGuard(Callback):
    """Refuses a trainer of pytorch_lightning that has our checkpoint IO, or a callback of ours."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Looks before anything is loaded or trained.

        Raises:
            ConfigError: There is something of ours.
        """
        found: list[Any] = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        io: Any = trainer.strategy.checkpoint_io
        # One IO may wrap another; a mock IO in a test may wrap without end.
        while io is not None and len(found) < _MOST:
            found.append(io)
            io = getattr(io, "checkpoint_io", None)
        for each in found:
            if any(kind.__module__.startswith("tiered_checkpoint_io.") for kind in type(each).__mro__):
                raise of_other_package(type(each).__name__)
