"""Deletes of a ModelCheckpoint: they wait for the commit, because a save may fail after it has returned."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.callbacks.trainer import failing_together, is_below, of_rank_0
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids

#: The key that our state has, and Lightning's has not.
_WITHHELD = "withheld"


class SafeDeletes(ModelCheckpoint):
    """A ModelCheckpoint that deletes a checkpoint only once its replacement is on the durable tier.

    A delete names the newest save, and the drain deletes once this save is committed. If a save is given up, the old
    checkpoint stays: one too many, which ``tiered-ckpt prune`` finds, and never one too few. A later run deletes the
    checkpoint that this run resumed from; checkpoints outside dirpath are never deleted.
    """

    _io: TieredCheckpointIO | None
    #: True if the newest save is on the durable tier, or queued for it; and then its id.
    _landed: bool
    _landed_as: str
    #: On rank 0, paths that are to be deleted once a save has landed.
    _withheld: list[str]
    #: Best checkpoints that never landed: too many saves waited, or the save failed.
    _lost: set[str]

    def _begin(self) -> None:
        """Sets the state of a new callback."""
        self._io = None
        self._landed, self._landed_as, self._withheld, self._lost = False, "", [], set()

    # ------------------------------------------------------------------------------------ state
    @property
    def state_key(self) -> str:
        """Names the state as Lightning's own callback with the same arguments does: a run may change over and back."""
        return ModelCheckpoint.__qualname__ + super().state_key.removeprefix(type(self).__qualname__)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), _WITHHELD: [*self._withheld]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # State of Lightning's own callback counts, wherever it is. Files elsewhere are never deleted.
        state_dict = state_dict if _WITHHELD in state_dict else {**state_dict, "dirpath": self.dirpath}
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            self._withheld = [*state_dict.get(_WITHHELD, ())]

    # ---------------------------------------------------------------------------------- deletes
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        super()._save_topk_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        super()._save_last_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))
        # After "last" points elsewhere: an alias goes with its target.
        self._remove_withheld(trainer)

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:  # noqa: ARG002
        """Returns True: :meth:`_due` chooses the checkpoints to delete. The replacement is the newest save."""
        return True

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero and filepath not in self._withheld:
            # A checkpoint that never landed goes first: it can't replace another.
            self._withheld.insert(0 if filepath in self._lost else len(self._withheld), filepath)
            self._lost.discard(filepath)

    def _remove_withheld(self, trainer: Trainer) -> None:
        """Deletes the due checkpoints, if the newest save has landed; all ranks call this."""
        with failing_together(trainer):
            for path in self._due(trainer):
                self._delete(trainer, path)

    def _due(self, trainer: Trainer) -> list[str]:
        """Returns the checkpoints to delete once the newest save is committed; on rank 0, which notes them.

        For each best checkpoint that never landed, one to be deleted stays; so does the one that was resumed from.
        """
        if not (trainer.is_global_zero and self._landed):
            return []
        # A checkpoint that was saved again under its name, or is outside dirpath (another run's), is not deleted.
        there = [path for path in self._withheld if not self._shows(path) and is_below(path, self._engine.dirpath)]
        count = max(0, len(there) - sum(map(self._shows, self._lost)))
        due = [path for path in there[:count] if not self._is_restored(path)]
        self._withheld = [path for path in there if path not in due]
        return due

    def _delete(self, trainer: Trainer, path: str) -> None:
        """Deletes a checkpoint that is no longer needed; if there are retention policies, only they decide."""
        if self._engine.config.retention:
            return
        if self._landed_as:
            self._engine.remove(path, replaced_by=self._landed_as)
        else:
            super()._remove_checkpoint(trainer, path)

    def _note_saved(self, path: str, report: SaveReport | None, *, among_best: bool) -> None:
        """Takes note on rank 0 of a save that has returned; without a report, of one that failed."""
        self._landed = report is not None and "durable" in report.tiers
        self._landed_as = report.save_id if report is not None and report.queued else ""
        self._lost.discard(path)
        if among_best and not (self._landed or self._landed_as):
            self._lost.add(path)

    # ----------------------------------------------------------------------------------- inside
    @property
    def _engine(self) -> Checkpointer:
        if self._io is None:
            raise ConfigError(f"{type(self).__name__} is used before setup", operation="save")
        return self._io.checkpointer

    def _is_restored(self, path: str) -> bool:
        restored = self._engine.restored
        return restored is not None and path == ids.join_url(self._engine.dirpath, restored.name)

    def _shows(self, path: str) -> bool:
        """Returns True if the callback names a path; quick even for many names."""
        return path in self.best_k_models or path in (self.best_model_path, self.last_model_path)
