"""NeMo's rules of resuming, as pure functions of what lies at the durable tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo import layouts
from tiered_checkpoint_io.nemo.layouts import Saved


@dataclass(frozen=True, slots=True)
class Rules:
    """What a configuration says of resuming, by NeMo's names.

    Attributes:
        resume_past_end: Whether a training that has ended is gone on with.
        resume_ignore_no_checkpoint: Whether to start from scratch where there is no checkpoint.
        resume_from_checkpoint: What to start from where there is none of this run.
        shards: How many ranks save a part of each checkpoint; 1 for full ones.
    """

    resume_past_end: bool = False
    resume_ignore_no_checkpoint: bool = False
    resume_from_checkpoint: str | None = None
    shards: int = 1


def check_end(names: Collection[str], rules: Rules, *, dirpath: str) -> None:
    """Refuses to go on with a training that has ended.

    Args:
        names: All checkpoints of the run.
        rules: What is allowed.
        dirpath: For the error.

    Raises:
        ConfigError: It has, and ``resume_past_end`` is not set.
    """
    ended = sorted(name for name in names if layouts.is_end(name))
    if ended and not rules.resume_past_end:
        raise ConfigError(
            f"{dirpath}/{ended[-1]} tells that this training has completed",
            operation="resume",
            tier="durable",
            key=dirpath,
            hint="set exp_manager.resume_past_end: true to go on from there, or give another dirpath",
        )


def choose(keys: Iterable[tuple[str, float]], rules: Rules, *, dirpath: str) -> Saved | None:
    """The checkpoint to resume from, among those that lie in NeMo's layouts.

    Where several are called "last", as after a crash, the one of the greatest step; a training that has
    ended is gone on with from its end.

    Args:
        keys: Objects, or names of checkpoints, relative to dirpath, and when they were written.
        rules: See above.
        dirpath: For errors.

    Returns:
        None where there is none, which is not an error of this function.

    Raises:
        ConfigError: The training has ended.
        CheckpointNotFoundError: There are some, and none of them is whole.
    """
    listed = list(keys)
    whole = layouts.group(listed, expected_shards=rules.shards if rules.shards > 1 else None)
    check_end([each.path for each in whole], rules, dirpath=dirpath)
    wanted = [each for each in whole if each.is_end] or [each for each in whole if each.is_last]
    found = layouts.newest(wanted)
    broken = sorted({key for key, _ in listed if _would_resume(key)}) if found is None else []
    if broken:
        raise CheckpointNotFoundError(
            f"{broken[-1]} is unfinished, or lacks the shards of some ranks, and there is no other to resume from",
            operation="resume",
            tier="durable",
            key=dirpath,
            hint="remove it to start from scratch",
        )
    return found


def check_found(found: bool, rules: Rules, *, dirpath: str) -> str | None:
    """What to start from where nothing of this run was found.

    Returns:
        ``resume_from_checkpoint``, or None: from scratch.

    Raises:
        CheckpointNotFoundError: Nothing was found, and ``resume_ignore_no_checkpoint`` is not set.
    """
    if found:
        return None
    if not rules.resume_ignore_no_checkpoint:
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {dirpath} to resume from",
            operation="resume",
            tier="durable",
            key=dirpath,
            hint="set exp_manager.resume_ignore_no_checkpoint: true to start from scratch where there is none",
        )
    return rules.resume_from_checkpoint


def _would_resume(key: str) -> bool:
    name = layouts.without_rank(key)
    is_checkpoint = name.endswith(layouts.EXTENSION) and not name.startswith(ids.META_PREFIX)
    return is_checkpoint and (ids.is_last(name) or layouts.is_end(name))
