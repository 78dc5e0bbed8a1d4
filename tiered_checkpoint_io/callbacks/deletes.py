"""What the deletes of a ModelCheckpoint wait for, on tiers where a save may fail after it has returned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import Trainer

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.callbacks.migration import WITHHELD, PortableState
from tiered_checkpoint_io.callbacks.trainer import failing_together, is_below, of_rank_0, on_rank_0
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.operations import DAMAGED_IN_MEMORY, SAVES, Outcome
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, StoreError
from tiered_checkpoint_io.model import ids

_SCORES = "scores"


class SafeDeletes(PortableState):
    """A ModelCheckpoint that deletes a checkpoint only once what replaces it is on the durable tier.

    Where that does not get there, it is none of the best any more, and what it replaced is one of them again. What the
    run resumed from is left for the next run to delete; what lies elsewhere is never deleted. What is known of the
    tiers is known on rank 0; what waits there is part of the callback's state.
    """

    _io: TieredCheckpointIO | None
    #: Whether the newest save is on the durable tier, or queued for it; and then its id.
    _landed: bool
    _landed_as: str
    #: Paths that are to be deleted once a save has landed, with the scores of those that were among the best.
    _withheld: dict[str, Any]
    #: Those whose delete is queued, with their scores, and the id of the save that it waits for.
    _queued: dict[str, tuple[Any, str]]
    #: The ids of the saves of :meth:`_named`.
    _saved_as: dict[str, str]
    #: Of the best, those that will not be on the durable tier: too many saves waited, or it failed.
    _lost: list[str]
    #: All of which that is so, while they wait for a delete: these are not taken back.
    _gone: set[str]
    #: Whether the best are those of an earlier run, of which some may have been lost with its node.
    _is_unchecked: bool
    #: While a checkpoint is saved that may replace others: what was kept before it, with the scores.
    _before: dict[str, Any]

    def _begin(self) -> None:
        """The state of a callback that has done nothing yet."""
        self._io = None
        self._landed, self._landed_as, self._is_unchecked = False, "", False
        self._withheld, self._queued, self._saved_as, self._lost, self._gone = {}, {}, {}, [], set()
        self._before = {}

    # ------------------------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        # This state is part of the save that replaces these: the run that resumes from it deletes what this one can't.
        queued = {path: score for path, (score, _) in self._queued.items()}
        replaced = {path: score for path, score in sorted(self._before.items()) if not self._shows(path)}
        waiting = {**queued, **replaced, **self._withheld}
        scores = {path: score for path, score in waiting.items() if score is not None}
        return {**super().state_dict(), WITHHELD: [*waiting], _SCORES: scores}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            scores = state_dict.get(_SCORES, {})
            self._withheld = {path: scores.get(path) for path in state_dict.get(WITHHELD, ())}
            self._is_unchecked = True

    # ---------------------------------------------------------------------------------- deletes
    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        self._take_back(trainer)
        with self._replacing(self._named() if self.save_top_k >= 1 else set()):
            super()._save_topk_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._replacing(self._named()):
            super()._save_last_checkpoint(trainer, of_rank_0(trainer, monitor_candidates))
        # After "last" points elsewhere: an alias goes with its target.
        self._remove_withheld(trainer)

    @contextlib.contextmanager
    def _replacing(self, before: Iterable[str]) -> Iterator[None]:
        self._before = {path: self.best_k_models.get(path) for path in before}
        try:
            yield
        finally:
            self._before = {}

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:  # noqa: ARG002
        """Always: :meth:`_due` leaves out what is not to be deleted. What replaces it is the newest save."""
        return True

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            self._withheld.setdefault(filepath, self._before.get(filepath))

    def _remove_withheld(self, trainer: Trainer) -> None:
        """Deletes what is due, where the newest save has landed; all ranks call this."""
        with failing_together(trainer):
            for path in self._due(trainer):
                self._delete(trainer, path)

    def _due(self, trainer: Trainer) -> list[str]:
        """What is to be deleted once the newest save is committed; on rank 0, which takes note of it.

        What the run resumed from stays: the next run may delete that. While one of the best is lost, all stay.
        """
        if not (trainer.is_global_zero and self._landed) or self._lost:
            return []
        # What was saved again under its name, or lies elsewhere and so belongs to another run, is not deleted.
        there = {path: score for path, score in self._withheld.items() if not self._shows(path) and self._is_ours(path)}
        due = [path for path in there if not self._is_restored(path)]
        self._withheld = {path: score for path, score in there.items() if path not in due}
        if self._landed_as and not self._engine.config.retention:
            self._queued.update({path: (there[path], self._landed_as) for path in due})
        return due

    def _delete(self, trainer: Trainer, path: str) -> None:
        """Deletes what nothing needs any more; where there are policies of retention, they alone decide what goes."""
        if self._engine.config.retention:
            return
        if self._landed_as:
            self._engine.remove(path, replaced_by=self._landed_as)
        else:
            super()._remove_checkpoint(trainer, path)

    # ------------------------------------------------------------------------- what came to nothing
    def _note_saved(self, path: str, report: SaveReport | None) -> None:
        """Takes note on rank 0 of a save that has returned; without a report, of one that failed."""
        self._landed = report is not None and "durable" in report.tiers
        self._landed_as = report.save_id if report is not None and report.queued else ""
        self._saved_as = {known: save_id for known, save_id in self._saved_as.items() if self._shows(known)}
        self._lost = [each for each in self._lost if each != path]
        if report is not None and (self._landed or self._landed_as):
            self._saved_as[path] = report.save_id
            self._gone.discard(path)

    def _heed(self, outcomes: Iterable[Outcome]) -> None:
        """Takes note on rank 0 of what became of queued saves and deletes."""
        for outcome in outcomes:
            path, save_id = self._path_of(outcome.name), ids.save_id_of_op(outcome.op_id)
            if outcome.action in SAVES and (outcome.state == "skipped" or outcome.error_type == DAMAGED_IN_MEMORY):
                self._lose(save_id)
                # Of what an earlier process has saved, no id is known. A name may have been saved again since.
                if self._saved_as.get(path, save_id) == save_id:
                    self._note_lost(path)
            elif outcome.action == "delete" and path in self._queued and outcome.state != "failed":
                # Else it is done, or another program uses it, and it stays.
                if outcome.error_type == CheckpointNotFoundError.__name__:
                    self._lose(self._queued[path][1])
                    self._withhold_again(path)
                else:
                    del self._queued[path]

    def _lose(self, save_id: str) -> None:
        self._lost += [path for path, each in self._saved_as.items() if each == save_id and path not in self._lost]

    def _note_lost(self, path: str) -> None:
        self._gone.add(path)
        # "last" takes no place among the best.
        if self._shows(path) and path != self.last_model_path and path not in self._lost:
            self._lost.append(path)

    def _withhold_again(self, path: str) -> None:
        """Takes note of a queued delete that is not done, because what it waits for is lost."""
        self._withheld[path], _ = self._queued.pop(path)
        name = ids.name_in(self._engine.dirpath, path)
        self._engine.session.known.note(name, exists=path not in self._gone)

    def _take_back(self, trainer: Trainer) -> None:
        """Takes what is lost out of the best, and what it had replaced back into them; all ranks call this."""
        lost, best, path = on_rank_0(trainer, self._instead)
        if not lost:
            return
        # First those that were saved first.
        self.best_k_models = best | {known: score for known, score in self.best_k_models.items() if known not in lost}
        if self.monitor is None:
            self.best_model_path = path if self.best_model_path in lost else self.best_model_path
            return
        worst_first = sorted(self.best_k_models, key=self.best_k_models.__getitem__, reverse=self.mode == "min")
        self.best_model_path = worst_first[-1] if worst_first else ""
        self.best_model_score = self.best_k_models.get(self.best_model_path)
        self.kth_best_model_path = worst_first[0] if len(worst_first) == self.save_top_k else ""
        self.kth_value = self.best_k_models.get(self.kth_best_model_path, self.kth_value)

    def _instead(self) -> tuple[list[str], dict[str, Any], str]:
        """What is lost, and what takes its place among the best; without a monitor, what the best path is then."""
        if self._is_unchecked:
            self._is_unchecked = False
            with contextlib.suppress(StoreError):
                ours = [path for path in (*self._named(), *self._withheld) if self._is_ours(path)]
                for path in [path for path in ours if not self._is_there(path)]:
                    self._note_lost(path)
        # The delete of what they had replaced may not be skipped yet. One that could not be queued never is.
        lost_as = {self._saved_as.get(path) for path in self._lost}
        for path in [path for path, (_, save_id) in self._queued.items() if save_id in lost_as]:
            if not self._engine.session.is_pending(ids.name_in(self._engine.dirpath, path)):
                self._withhold_again(path)
        waited_for = {save_id for _, save_id in self._queued.values()}
        lost = [path for path in self._lost if self._saved_as.get(path) not in waited_for]
        self._lost = [path for path in self._lost if path not in lost]
        self._gone &= {*self._withheld, *self._queued, *self._lost, *lost}
        there = [path for path in self._withheld if path not in self._gone and self._is_ours(path)]
        there = [path for path in there if not ids.is_last(path)]
        rated = {path: self._withheld[path] for path in there if self._withheld[path] is not None}
        best_first = sorted(rated, key=rated.__getitem__, reverse=self.mode == "max")
        room = max(0, self.save_top_k - sum(path not in lost for path in self.best_k_models))
        best = {path: rated[path] for path in best_first[:room]} if lost else {}
        path = there[-1] if self.monitor is None and self.best_model_path in lost and there else ""
        self._withheld = {each: score for each, score in self._withheld.items() if each not in (*best, path)}
        self._withheld.update(dict.fromkeys(lost))
        return lost, best, path

    # ----------------------------------------------------------------------------------- inside
    @property
    def _engine(self) -> Checkpointer:
        if self._io is None:
            raise ConfigError(f"{type(self).__name__} is used before setup", operation="save")
        return self._io.checkpointer

    def _is_ours(self, path: str) -> bool:
        return is_below(path, self._engine.dirpath)

    def _is_there(self, path: str) -> bool:
        """Whether the durable tier has a checkpoint, or it is queued; raises as :meth:`Checkpointer.exists`."""
        return self._engine.exists(path)

    def _path_of(self, name: str) -> str:
        """The path by which this callback knows what is saved under a name."""
        return ids.join_url(self._engine.dirpath, name)

    def _is_restored(self, path: str) -> bool:
        restored = self._engine.restored
        return restored is not None and path == ids.join_url(self._engine.dirpath, restored.name)

    def _named(self) -> set[str]:
        return {self.best_model_path, self.last_model_path, *self.best_k_models} - {""}

    def _shows(self, path: str) -> bool:
        """Whether :meth:`_named` has a path; as quick where it has very many."""
        return path in self.best_k_models or path in (self.best_model_path, self.last_model_path)
