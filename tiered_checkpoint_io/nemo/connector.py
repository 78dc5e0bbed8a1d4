"""Resumes by NeMo's rules: rank 0 finds the checkpoint, all ranks load it, or all fail with its error.

Of NeMo's checkpoints, a distributed one is a folder with ``metadata.json``; any other is a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, require_tiered_io
from tiered_checkpoint_io.callbacks.trainer import on_rank_0
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, StoreError
from tiered_checkpoint_io.model import ids

#: The value of ``trainer.ckpt_path`` until the process group exists and rank 0 can look for a checkpoint.
RESUME = "tiered:nemo"


#: Averaged weights are next to each checkpoint.
_EXTENSION, _AVERAGES = ".ckpt", "-EMA.ckpt"
#: NeMo's marker of a checkpoint that was not finished.
_UNFINISHED = "-unfinished"
#: The last file that Megatron, or torch, writes into the folder of a distributed checkpoint.
_FOLDER_MARKS = ("metadata.json", ".metadata")
_END = re.compile(r"(?:^|[/_-])end(?:\.ckpt)?\Z")


@dataclass(frozen=True, slots=True)
class Rules:
    """A configuration's rules of resuming, by NeMo's names; the last one is for runs without a checkpoint."""

    resume_past_end: bool = False
    resume_ignore_no_checkpoint: bool = False
    resume_from_checkpoint: str | None = None


def complete_checkpoints(keys: Iterable[tuple[str, float]]) -> list[str]:
    """Lists complete checkpoints: by step, and within a step by time.

    One with NeMo's marker is not complete, and averaged weights are no checkpoint by themselves. Keys are relative to
    dirpath, and come with the time of the write.
    """
    listed = [(key, modified) for key, modified in keys if not key.startswith(ids.META_PREFIX)]
    unfinished = {key.removesuffix(_UNFINISHED) for key, _ in listed if key.endswith(_UNFINISHED)}
    folders = {key.rpartition("/")[0] for key, _ in listed if key.rpartition("/")[2] in _FOLDER_MARKS} - {""}
    written: dict[str, float] = {}
    for key, modified in listed:
        paths = [folder for folder in folders if key.startswith(folder + "/")]
        if not paths and key.endswith(_EXTENSION) and not key.endswith(_AVERAGES):
            paths = [key]
        for path in paths:
            written[path] = max(modified, written.get(path, modified))
    complete = [path for path in written if path.removesuffix(_EXTENSION) not in unfinished]
    return sorted(complete, key=lambda path: (step_of(path), written[path], path))


def choose(keys: Iterable[tuple[str, float]], rules: Rules, *, dirpath: str) -> str | None:
    """Chooses the checkpoint to resume from by NeMo's rules, which look at names only; None if there is none.

    Of several called "last", as after a crash, it is the one of the greatest step; a completed training continues from
    its end.
    """
    listed = list(keys)
    complete = complete_checkpoints(listed)
    check_not_completed(complete, rules, dirpath=dirpath)
    wanted = [path for path in complete if _is_end(path)] or [path for path in complete if ids.is_last(path)]
    if wanted:
        return wanted[-1]
    broken = sorted({key for key, _ in listed if _would_resume(key)})
    if broken:
        raise CheckpointNotFoundError(
            f"{', '.join(broken)}: each is unfinished, or only averages, and there is no other to resume from",
            operation="resume",
            tier="durable",
            key=dirpath,
            hint="remove these to start from scratch",
        )
    return None


def check_not_completed(names: Collection[str], rules: Rules, *, dirpath: str) -> None:
    """Raises ConfigError if a name marks the end of a training, and ``resume_past_end`` is not set."""
    ended = sorted(name for name in names if _is_end(name))
    if ended and not rules.resume_past_end:
        raise ConfigError(
            f"{dirpath}/{ended[-1]} shows that this training has completed",
            operation="resume",
            tier="durable",
            key=dirpath,
            hint="set exp_manager.resume_past_end: true to continue from there, or give another dirpath",
        )


def _is_end(path: str) -> bool:
    return _END.search(path) is not None


def _would_resume(key: str) -> bool:
    return key.endswith(_EXTENSION) and not key.startswith(ids.META_PREFIX) and (ids.is_last(key) or _is_end(key))


def known_names(session: Session, warning: str) -> frozenset[str]:
    """Returns the names on the durable tier; none, with a warning, while it does not answer: memory carries the job."""
    try:
        return session.known.all(session.config.support.durable_timeout_s)
    except StoreError as error:
        if error.reason != "unavailable":
            raise
        session.log.warning(warning, error)
        return frozenset()


def step_of(path: str) -> int:
    """Returns the step in a path; -1 without one."""
    step = ids.step_in_name(path)
    return -1 if step is None else step


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
        """Loads the checkpoint to resume from, if there is one; errors are the same on all ranks."""
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
        names = known_names(session, "could not check whether this training has completed: %s")
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
