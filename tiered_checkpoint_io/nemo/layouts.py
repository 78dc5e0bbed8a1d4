"""NeMo's names of checkpoints, and its rules of resuming (pure).

A distributed checkpoint is a folder with ``metadata.json``; any other is a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids

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

    Raises:
        ConfigError: The training has completed.
        CheckpointNotFoundError: There are some, and none of them is complete.
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


def step_of(path: str) -> int:
    """Returns the step in a path; -1 without one."""
    step = ids.step_in_name(path)
    return -1 if step is None else step
