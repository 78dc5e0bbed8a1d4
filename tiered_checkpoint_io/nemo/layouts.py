"""NeMo's layouts of checkpoints: which files make one, and which of them is the newest (pure).

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiered_checkpoint_io.model import ids

EXTENSION = ".ckpt"
#: Beside a checkpoint that NeMo had not finished when it died.
UNFINISHED = "-unfinished"
EMA = "-EMA"

_RANK_FOLDER = re.compile(
    r"(?:mp_rank_\d+(?:_fsdp_shard_\d+)?|tp_rank_\d+_pp_rank_\d+(?:_fsdp_shard_\d+)?|fsdp_shard_\d+)\Z"
)
_NUMBER = re.compile(r"\d+")
#: What tells that a folder is a distributed checkpoint: the last that Megatron, or torch, writes of one.
_FOLDER_MARKS = ("metadata.json", ".metadata")
_END = re.compile(r"(?:^|[/_-])end(?:\.ckpt)?\Z")


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint.

    Attributes:
        path: Relative to dirpath, without the folder of any rank.
        shards: The folders of the ranks that saved it; ``("",)`` for a full one or a folder.
        modified: When the last of it was written, seconds since the epoch.
        is_folder: Whether it is a distributed checkpoint.
    """

    path: str
    shards: tuple[str, ...]
    modified: float = 0.0
    is_folder: bool = False

    @property
    def stem(self) -> str:
        """The path without its extension."""
        return self.path.removesuffix(EXTENSION)

    @property
    def step(self) -> int:
        """The step that the name tells; -1 where it tells none."""
        step = ids.step_in_name(self.path)
        return -1 if step is None else step

    @property
    def is_last(self) -> bool:
        """Whether NeMo would resume from it."""
        return ids.is_last(self.path)

    @property
    def is_end(self) -> bool:
        """Whether it marks the end of a training."""
        return is_end(self.path)


def is_end(path: str) -> bool:
    """Whether a checkpoint is one that NeMo writes at the end of a training: ``x-end.ckpt``."""
    return _END.search(path) is not None


def rank_folder_of(path: str) -> str | None:
    """The folder of the rank that a path belongs to: ``mp_rank_01`` and its kin; None where there is none."""
    parent = path.rstrip("/").rpartition("/")[0].rpartition("/")[2]
    return parent if _RANK_FOLDER.match(parent) else None


def without_rank(path: str) -> str:
    """The path that all ranks share: ``dir/name.ckpt`` for ``dir/mp_rank_01/name.ckpt``."""
    if rank_folder_of(path) is None:
        return path
    folder, _, name = path.rpartition("/")
    parent = folder.rpartition("/")[0]
    return f"{parent}/{name}" if parent else name


def group(keys: Iterable[tuple[str, float]], *, expected_shards: int | None = None) -> list[Saved]:
    """The checkpoints that keys make up, those that are whole alone.

    A checkpoint of several ranks is whole where all shards are there: as many as expected, or else each
    rank folder in which any checkpoint lies. One beside which NeMo left its mark is unfinished, and no
    checkpoint. An EMA copy is none by itself.

    Args:
        keys: Relative to dirpath, and when they were written, seconds since the epoch.
        expected_shards: How many ranks save a part, where that is known.

    Returns:
        By step, in numeric order, the newest last.
    """
    listed = [(key, modified) for key, modified in keys if not key.startswith(ids.META_PREFIX)]
    unfinished = {key.removesuffix(UNFINISHED) for key, _ in listed if key.endswith(UNFINISHED)}
    folders = {key.rpartition("/")[0] for key, _ in listed if key.rpartition("/")[2] in _FOLDER_MARKS} - {""}
    shards: dict[str, dict[str, float]] = {}
    for key, modified in listed:
        if not key.endswith(EXTENSION) or ids.is_companion(key, EMA) or _is_inside(key, folders):
            continue
        shards.setdefault(without_rank(key), {})[rank_folder_of(key) or ""] = modified
    for folder in folders:
        inside = [modified for key, modified in listed if key.startswith(folder + "/")]
        shards[folder] = {"": max(inside)}
    every = {name for parts in shards.values() for name in parts} - {""}
    found = []
    for path, parts in shards.items():
        names = tuple(sorted(parts, key=_numbers))
        saved = Saved(path, names, max(parts.values()), path in folders)
        needed = (expected_shards or len(every)) if names != ("",) else 1
        if saved.stem not in unfinished and len(set(names) - {""} or {""}) >= needed:
            found.append(saved)
    return sorted(found, key=lambda each: (each.step, each.modified, each.path))


def newest(checkpoints: Sequence[Saved]) -> Saved | None:
    """The one of the greatest step; of equals, and where names tell no step, the one written last."""
    return max(checkpoints, key=lambda each: (each.step, each.modified, each.path), default=None)


def _is_inside(key: str, folders: set[str]) -> bool:
    return any(key.startswith(folder + "/") for folder in folders)


def _numbers(name: str) -> list[int]:
    return [int(text) for text in _NUMBER.findall(name)]
