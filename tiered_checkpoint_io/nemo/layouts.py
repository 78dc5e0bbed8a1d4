"""Finds the files that make a checkpoint in NeMo's layouts, and the checkpoints to resume from (pure).

::

    name.ckpt                                full
    mp_rank_01/name.ckpt                     tensor parallel
    mp_rank_01_fsdp_shard_00002/name.ckpt    tensor parallel, sharded optimizer
    tp_rank_01_pp_rank_002/name.ckpt         tensor and pipeline parallel
    fsdp_shard_00002/name.ckpt               sharded
    name/metadata.json, name/...             a distributed checkpoint: a folder
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids

_EXTENSION = ".ckpt"
#: NeMo's marker of a checkpoint that was not finished.
_UNFINISHED = "-unfinished"
_RANK_FOLDER = re.compile(
    r"(?:mp_rank_\d+(?:_fsdp_shard_\d+)?|tp_rank_\d+_pp_rank_\d+(?:_fsdp_shard_\d+)?|fsdp_shard_\d+)\Z"
)
#: The last file that Megatron, or torch, writes into the folder of a distributed checkpoint.
_FOLDER_MARKS = ("metadata.json", ".metadata")
_END = re.compile(r"(?:^|[/_-])end(?:\.ckpt)?\Z")


@dataclass(frozen=True, slots=True)
class Rules:
    """A configuration's rules of resuming, by NeMo's names; the last one is for runs without a checkpoint."""

    resume_past_end: bool = False
    resume_ignore_no_checkpoint: bool = False
    resume_from_checkpoint: str | None = None


def ranks_with_files() -> int:
    """Returns the number of ranks that save a file of their own of each checkpoint, once NeMo has made the model."""
    nemo = sys.modules.get("nemo.utils.app_state")
    return int(nemo.AppState().model_parallel_size or 1) if nemo is not None else 1


def rank_folder_of(path: str) -> str | None:
    """Returns the folder of the rank that a path belongs to, such as ``mp_rank_01``; None if there is none."""
    parent = path.rstrip("/").rpartition("/")[0].rpartition("/")[2]
    return parent if _RANK_FOLDER.match(parent) else None


def without_rank(path: str) -> str:
    """Returns the path that all ranks share: ``dir/name.ckpt`` for ``dir/mp_rank_01/name.ckpt``."""
    folder = rank_folder_of(path)
    if folder is None:
        return path
    parent, _, name = path.rpartition("/")
    return parent.removesuffix(folder) + name


def complete_checkpoints(keys: Iterable[tuple[str, float]], *, shards: int = 1) -> list[str]:
    """Lists complete checkpoints, without the folder of any rank: by step, and within a step by time.

    One of several ranks is complete with ``shards`` files, or, if that is 1 (not known), with one for each rank folder
    in which any checkpoint lies. One with NeMo's marker is not, and averaged weights are no checkpoint by themselves.
    Keys are relative to dirpath, and come with the time of the write.
    """
    listed = [(key, modified) for key, modified in keys if not key.startswith(ids.META_PREFIX)]
    unfinished = {key.removesuffix(_UNFINISHED) for key, _ in listed if key.endswith(_UNFINISHED)}
    folders = {key.rpartition("/")[0] for key, _ in listed if key.rpartition("/")[2] in _FOLDER_MARKS} - {""}
    # By path: the rank folders that hold a shard, none for a full checkpoint or a folder; and the last write.
    ranks: dict[str, set[str]] = {}
    written: dict[str, float] = {}
    for key, modified in listed:
        paths = [folder for folder in folders if key.startswith(folder + "/")]
        if not paths and key.endswith(_EXTENSION) and not ids.is_companion(key, ids.EMA):
            paths = [without_rank(key)]
            ranks.setdefault(paths[0], set()).update({rank_folder_of(key) or ""} - {""})
        for path in paths:
            written[path] = max(modified, written.get(path, modified))
    needed = shards if shards > 1 else len(set().union(*ranks.values()))
    complete = [
        path
        for path in written
        if path.removesuffix(_EXTENSION) not in unfinished and (not ranks.get(path) or len(ranks[path]) >= needed)
    ]
    return sorted(complete, key=lambda path: (step_of(path), written[path], path))


def newest_of_ranks(saved: Iterable[tuple[str, int]], *, shards: int) -> str | None:
    """Returns the path of the latest checkpoint of which each rank has a shard, all of one step; None if there is none.

    ``saved`` holds name and step of each resumable shard, the latest save first. One in no rank's folder is complete.
    """
    # By path, the latest first: the step of what each rank has under it.
    steps: dict[str, dict[str | None, int]] = {}
    for name, step in saved:
        steps.setdefault(without_rank(name), {}).setdefault(rank_folder_of(name), step)
    complete = (path for path, of in steps.items() if None in of or len(of) >= shards)
    return next((path for path in complete if len({*steps[path].values()}) == 1), None)


def choose(
    keys: Iterable[tuple[str, float]],
    rules: Rules,
    *,
    dirpath: str,
    shards: int = 1,
    incomplete: Collection[str] = (),
) -> str | None:
    """Chooses the checkpoint to resume from by NeMo's rules, which look at names only; None if there is none.

    Of several called "last", as after a crash, it is the one of the greatest step; a completed training continues from
    its end. ``incomplete`` names checkpoints that lack shards of other ranks.

    Raises:
        ConfigError: The training has completed.
        CheckpointNotFoundError: There are some, and none of them is complete.
    """
    listed = list(keys)
    complete = complete_checkpoints(listed, shards=shards)
    check_not_completed(complete, rules, dirpath=dirpath)
    wanted = [path for path in complete if _is_end(path)] or [path for path in complete if ids.is_last(path)]
    if wanted:
        return wanted[-1]
    broken = sorted({key for key, _ in (*listed, *((name, 0.0) for name in incomplete)) if _would_resume(key)})
    if len({*map(without_rank, incomplete)}) > 1:
        # A single one is an interrupted first save: there has never been a checkpoint to resume from.
        broken = sorted({*broken, *incomplete})
    if broken:
        raise CheckpointNotFoundError(
            f"{', '.join(broken)}: each is unfinished, or lacks the shards of some ranks or their averages, and there"
            " is no other to resume from",
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
    name = without_rank(key)
    return name.endswith(_EXTENSION) and not name.startswith(ids.META_PREFIX) and (ids.is_last(name) or _is_end(name))


def step_of(path: str) -> int:
    """Returns the step in a path; -1 without one."""
    step = ids.step_in_name(path)
    return -1 if step is None else step
