"""Resumes by NeMo's rules: rank 0 finds the checkpoint, all ranks load it, or all fail with its error."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, require_tiered_io
from tiered_checkpoint_io.callbacks.trainer import on_rank_0
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.layouts import Rules, check_not_completed, choose

#: The value of ``trainer.ckpt_path`` until the process group exists and rank 0 can look for a checkpoint.
RESUME = "tiered:nemo"


class NeMoCheckpointConnector(_CheckpointConnector):
    """A replacement for NeMo's connector of the same name.

    NeMo's documents set it before ``exp_manager``: ``trainer._checkpoint_connector =
    NeMoCheckpointConnector(trainer)``. Without a call of :meth:`resume_by` it does the same as Lightning's.

    Args:
        trainer: The trainer that it is set on.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._rules: Rules | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> NeMoCheckpointConnector:
        """Returns the trainer's connector; replaces one of another kind."""
        connector = trainer._checkpoint_connector
        if not isinstance(connector, cls):
            before, connector = connector, cls(trainer)
            connector._ckpt_path, connector._user_managed = before._ckpt_path, before._user_managed
            trainer._checkpoint_connector = connector
        return connector

    def resume_by(self, rules: Rules) -> None:
        """Makes the next start resume by these rules; sends no request to S3 before."""
        self._rules = rules
        self.trainer.ckpt_path = RESUME

    def resume_start(self, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Loads the checkpoint to resume from, if there is one; errors are the same on all ranks.

        Raises:
            ConfigError: The training has completed.
            CheckpointNotFoundError: There is none, and ``resume_ignore_no_checkpoint`` is not set.
        """
        rules = self._rules
        if checkpoint_path != RESUME or rules is None:
            super().resume_start(checkpoint_path, *args, **kwargs)
        else:
            self._resume_by(rules, *args, **kwargs)
        if rules is not None and self.trainer.state.fn == TrainerFn.FITTING:
            # A later test in this process uses the trained weights.
            self._user_managed = False

    def _resume_by(self, rules: Rules, *args: Any, **kwargs: Any) -> None:
        io = require_tiered_io(self.trainer.strategy, "resuming by NeMo's rules")
        super().resume_start(ids.LATEST, *args, **kwargs)
        restored = None if io.found_nothing else io.checkpointer.restored
        path = on_rank_0(self.trainer, lambda: find_checkpoint(io, rules, restored=restored is not None))
        if restored is not None:
            self._ckpt_path = ids.join_url(io.config.dirpath, restored.name)
        else:
            # Without a path, Lightning skips all of a restore.
            super().resume_start(path, *args, **kwargs)


def find_checkpoint(io: TieredCheckpointIO, rules: Rules, *, restored: bool) -> str | None:
    """Finds the path to load, if the engine restored no checkpoint; else only checks the rules."""
    dirpath, session = io.config.dirpath, io.checkpointer.session
    if restored:
        try:
            names = session.known.all(io.config.support.durable_timeout_s)
        except StoreError as error:
            if error.reason != "unavailable":
                raise
            # Node memory carries the job while the durable tier does not answer.
            session.log.warning("could not check whether this training has completed: %s", error)
            names = frozenset()
        check_not_completed(names, rules, dirpath=dirpath)
        return None
    # The engine has found no resumable checkpoint: the rest are weights-only.
    passed_by = session.known.all()
    check_not_completed(passed_by, rules, dirpath=dirpath)
    listed = session.durable().list("")
    written_by_nemo = ((entry.key, entry.modified) for entry in listed if entry.key not in passed_by)
    path = choose(written_by_nemo, rules, dirpath=dirpath)
    if path is not None:
        return ids.join_url(dirpath, path)
    if not rules.resume_ignore_no_checkpoint:
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {dirpath} to resume from",
            operation="resume",
            tier="durable",
            key=dirpath,
            hint="set exp_manager.resume_ignore_no_checkpoint: true to start from scratch where there is none",
        )
    return rules.resume_from_checkpoint
