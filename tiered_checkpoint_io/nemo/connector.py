"""Resuming by NeMo's rules: rank 0 finds the checkpoint, all ranks load it, or all fail with its error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.engine.ranks.coordination import portable
from tiered_checkpoint_io.errors import TieredCheckpointError, UsageError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.rules import Rules, check_end, check_found, choose

#: What ``trainer.ckpt_path`` is until the ranks can talk, and it is known what to resume from.
RESUME = "tiered:nemo"


class NeMoCheckpointConnector(_CheckpointConnector):
    """Takes the place of NeMo's connector of the same name.

    NeMo's documents set it before ``exp_manager``: ``trainer._checkpoint_connector =
    NeMoCheckpointConnector(trainer)``. Without a call of :meth:`resume_by` it does what Lightning's does.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._rules: Rules | None = None
        self._shards: Callable[[], int] = lambda: 1

    @classmethod
    def of(cls, trainer: Trainer) -> NeMoCheckpointConnector:
        """The trainer's connector, which is put in the place of any other kind."""
        connector = trainer._checkpoint_connector
        if not isinstance(connector, cls):
            before, connector = connector, cls(trainer)
            connector._ckpt_path, connector._user_managed = before._ckpt_path, before._user_managed
            trainer._checkpoint_connector = connector
        return connector

    def resume_by(self, rules: Rules, shards: Callable[[], int] = lambda: 1) -> None:
        """Has the next start resume by these rules; nothing is asked before the ranks can talk.

        Args:
            rules: What the configuration says.
            shards: Tells, at the start, how many ranks save a part of each checkpoint.
        """
        self._rules = rules
        self._shards = shards
        self.trainer.ckpt_path = RESUME

    def resume_start(self, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Loads the checkpoint to resume from, where there is one.

        Raises:
            ConfigError: The training has completed.
            CheckpointNotFoundError: There is none, and none is not allowed.
            TieredCheckpointError: It could not be found out, or loaded; the same on all ranks.
        """
        rules = self._rules
        if checkpoint_path != RESUME or rules is None:
            super().resume_start(checkpoint_path, *args, **kwargs)
            return
        io = tiered_io_of(self.trainer.strategy.checkpoint_io)
        if io is None:
            raise UsageError(
                f"resuming with a {type(self.trainer.strategy.checkpoint_io).__name__}",
                operation="resume",
                hint="give the strategy tiered_checkpoint_io.nemo.S3CheckpointIO",
            )
        rules = replace(rules, shards=self._shards())
        if rules.shards > 1:
            path = self._on_rank_0(lambda: _in_layouts(io, rules))
        else:
            super().resume_start(ids.LATEST, *args, **kwargs)
            found = not io.found_nothing
            path = self._on_rank_0(lambda: _besides(io, rules, found=found))
            if found and io.checkpointer.restored is not None:
                self._ckpt_path = ids.join_url(io.config.dirpath, io.checkpointer.restored.name)
                return
        # Lightning skips all of a restore where there is no path.
        super().resume_start(path, *args, **kwargs)

    def _on_rank_0(self, work: Callable[[], str | None]) -> str | None:
        """What ``work`` gives on rank 0, on every rank; its error is raised on all of them."""
        answer: tuple[str | None, TieredCheckpointError | None] = None, None
        own: Exception | None = None
        if self.trainer.is_global_zero:
            try:
                answer = work(), None
            except Exception as error:
                own = error
                answer = None, portable(error, 0)
        path, failed = self.trainer.strategy.broadcast(answer)
        if failed is not None:
            raise failed from own
        return path


def _besides(io: TieredCheckpointIO, rules: Rules, *, found: bool) -> str | None:
    """What to load, where the tiers hold none of our own; checks the rules where they do."""
    dirpath = io.config.dirpath
    if found:
        check_end(io.checkpointer.session.known.all(), rules, dirpath=dirpath)
        return None
    return _written_by_nemo(io, rules)


def _in_layouts(io: TieredCheckpointIO, rules: Rules) -> str | None:
    """The path that ranks put their own folder into."""
    ours = choose(((name, 0.0) for name in io.checkpointer.session.known.all()), rules, dirpath=io.config.dirpath)
    return ids.join_url(io.config.dirpath, ours.path) if ours is not None else _written_by_nemo(io, rules)


def _written_by_nemo(io: TieredCheckpointIO, rules: Rules) -> str | None:
    dirpath = io.config.dirpath
    keys: Iterable[tuple[str, float]] = (
        (entry.key, entry.modified) for entry in io.checkpointer.session.durable().list("")
    )
    theirs = choose(keys, rules, dirpath=dirpath)
    if theirs is not None:
        return ids.join_url(dirpath, theirs.path)
    return check_found(False, rules, dirpath=dirpath)
