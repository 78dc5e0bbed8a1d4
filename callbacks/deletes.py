"""What the deletes of a ModelCheckpoint wait for, on tiers where a save may fail after it has returned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.callbacks.migration import WITHHELD, PortableState
from tiered_checkpoint_io.callbacks.trainer import failing_together, is_below, of_rank_0
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.model import ids

_LACKING = "lacking"


class SafeDeletes(PortableState):
    """A ModelCheckpoint that deletes a checkpoint only where nothing needs it any more.

    A delete waits until a later save is durable, or queued for it; what the run resumed from is left for the next run
    to delete; what lies elsewhere is never deleted. What waits is part of the callback's state.
    """

    _io: TieredCheckpointIO | None
    #: On rank 0, whether the newest save is on the durable tier, or queued for it.
    _landed: bool
    #: Paths that are to be deleted once they are not needed any more.
    _withheld: list[str]
    #: Of the best, those that are neither on the durable tier nor queued for it: too many saves waited, or it failed.
    _lacking: list[str]
    #: While a checkpoint is saved that may replace others: what was kept before it.
    _before: set[str]
    #: While a name is chosen: the path that the save replaces, whose name is free for it.

    def _begin(self) -> None:
        """The state of a callback that has done nothing yet."""
        self._io = None
        self._landed = False
        self._withheld, self._lacking = [], []
        self._before = set()

    # ------------------------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        # This state is part of the save that replaces these: the run that resumes from it deletes what this one can't.
        replaced = sorted(self._before - {*self._withheld, *self._named()})
        return {**super().state_dict(), WITHHELD: [*self._withheld, *replaced], _LACKING: [*self._lacking]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            self._withheld = list(state_dict.get(WITHHELD, ()))
            self._lacking = list(state_dict.get(_LACKING, ()))

    # ---------------------------------------------------------------------------------- deletes
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._replacing(self._named() if self.save_top_k >= 1 else set()):
            super()._save_topk_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._replacing(self._named()):
            super()._save_last_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))

    @contextlib.contextmanager
    def _replacing(self, before: set[str]) -> Iterator[None]:
        self._before = before
        try:
            yield
        finally:
            self._before = set()

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:  # noqa: ARG002
        """Always: :meth:`_remove_due` leaves out what is not to be deleted."""
        return True

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if filepath not in self._withheld:
            self._withheld.append(filepath)
        self._remove_withheld(trainer)

    def _remove_withheld(self, trainer: Trainer) -> None:
        """Deletes what is due, where the newest save has landed; all ranks call this.

        What the run resumed from stays: the next run may delete that. For each of the best that is lacking, the newest
        of those that it has replaced stays.
        """
        with failing_together(trainer):
            if self._landed:
                self._remove_due(trainer)

    def _remove_due(self, trainer: Trainer) -> None:
        named = self._named()
        self._lacking = [path for path in self._lacking if path in named]
        # What was saved again under its name, or lies elsewhere and so belongs to another run, is not deleted.
        due = [path for path in self._withheld if path not in named and self._is_ours(path)]
        replaced = [path for path in due if not (self._is_restored(path) or ids.is_last(path))]
        spare = replaced[-len(self._lacking) :] if self._lacking else []
        self._withheld = [path for path in due if self._is_restored(path) or path in spare]
        for path in due:
            if path not in self._withheld:
                self._delete(trainer, path)

    def _delete(self, trainer: Trainer, path: str) -> None:
        """Deletes what nothing needs any more; where there are policies of retention, they alone decide what goes."""
        if not self._engine.config.retention:
            super()._remove_checkpoint(trainer, path)

    # ----------------------------------------------------------------------------------- inside
    @property
    def _engine(self) -> Checkpointer:
        if self._io is None:
            raise UsageError(f"{type(self).__name__} is used before setup", operation="save")
        return self._io.checkpointer

    def _is_ours(self, path: str) -> bool:
        return is_below(path, self._engine.dirpath)

    def _is_restored(self, path: str) -> bool:
        restored = self._engine.restored
        return restored is not None and path == ids.join_url(self._engine.dirpath, restored.name)

    def _named(self) -> set[str]:
        return {self.best_model_path, self.last_model_path, *self.best_k_models} - {""}

    def _shows(self, path: str) -> bool:
        """Whether :meth:`_named` has a path; as quick where it has very many."""
        return path in self.best_k_models or path in (self.best_model_path, self.last_model_path)
