"""Which checkpoints of others lie in a folder, by the names of its files, and what became of them; pure.

::

    name.ckpt, name.pt, name.pth                     torch.save: Lightning, NeMo, plain torch
    name.nemo                                        NeMo's archive; the weights in it
    name/.metadata, name/__0_0.distcp ...            torch.distributed.checkpoint; of Lightning's strategies, meta.pt
    rank_0/step_5/{checkpoint.pt,metadata.metadata}  the SageMaker library, one folder for each rank
    step_5/rank_0/...                                the same within Ray Train
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA

Layout = Literal["torch", "nemo", "dcp", "sagemaker"]

_TORCH = (".ckpt", ".pt", ".pth")
_NEMO = ".nemo"
_SHARD, _SHARD_METADATA = "checkpoint.pt", "metadata.metadata"
#: What Lightning's sharded strategies put beside the shards: all of the state but the model's and the optimizers'.
_OF_RANK = re.compile(
    r"(?P<base>(?:.*/)?)(?:rank_(?P<rank>\d+)/step_(?P<step>\d+)|step_(?P<step2>\d+)/rank_(?P<rank2>\d+))/[^/]+\Z"
)


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one checkpoint of others."""

    name: Annotated[str, "The checkpoint's, in the durable tier."]
    state: Annotated[Literal["imported", "exists", "failed"], "``exists``: something has its name already."]
    kind: Annotated[Literal["full", "sharded"], "What it is there."]
    step: Annotated[int | None, "The training step; None where nothing tells it."] = None
    resumable: Annotated[bool, "Whether ``tiered:latest`` takes it."] = False
    size_bytes: Annotated[int, "Bytes of its files."] = 0
    error: Annotated[str | None, "Why it was not imported."] = None
    earlier: Annotated[bool, "Whether an earlier import made it: it was left as it is."] = False
    hint: Annotated[str | None, "What can be done where it was not imported."] = None


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint that others wrote.

    Attributes:
        name: What it is called where it is imported to.
        layout: How its files lie.
        files: Where each of its files is read, by the basename that it gets.
        step: The step that the folder tells; None where it tells none.
        modified: When the last of its files was written, seconds since the epoch.
    """

    name: str
    layout: Layout
    files: dict[str, str]
    step: int | None
    modified: float

    @property
    def origin(self) -> str:
        """The file that it is, or the folder of its files."""
        key = next(iter(self.files.values()))
        return key if self.layout in ("torch", "nemo") else key.rpartition("/")[0]

    @property
    def told_by(self) -> str | None:
        """The basename of the file that torch.save wrote, and that tells step and epoch; None where there is none."""
        if self.layout in ("torch", "nemo"):
            return next(iter(self.files))
        return ids.rest_in(self.files) if self.layout == "dcp" else None


def find(listed: Iterable[tuple[str, float]], *, base: str) -> list[ForeignCheckpoint]:
    """The checkpoints among files, in the order of the steps in their names, and of their times where they tell none.

    Args:
        listed: Each file's key and time.
        base: What the folder itself is called, where it is a checkpoint.
    """
    times = {key: modified for key, modified in listed if not key.startswith(ids.META_PREFIX)}
    found = [*_sagemaker(times), *_dcp(times, base)]
    taken = {key for each in found for key in each.files.values()}
    # What lies below a sharded checkpoint is part of it.
    folders = tuple(f"{each.name}/" for each in found if each.layout == "dcp")
    for key, modified in times.items():
        name = key.rpartition("/")[2]
        if key in taken or METADATA in times or key.startswith(folders) or name.startswith("."):
            continue
        if key.endswith(_TORCH):
            found.append(ForeignCheckpoint(key, "torch", {name: key}, ids.step_in_name(key), modified))
        elif key.endswith(_NEMO):
            named = f"{key.removesuffix(_NEMO)}.ckpt"
            found.append(
                ForeignCheckpoint(named, "nemo", {named.rpartition("/")[2]: key}, ids.step_in_name(key), modified)
            )
    return sorted(found, key=lambda each: (-1 if each.step is None else each.step, each.modified, each.name))


def by_name(found: Iterable[ForeignCheckpoint]) -> dict[str, ForeignCheckpoint]:
    """Which of them gets its name: of several the one that is called so, and not ``x.nemo`` beside ``x.ckpt``."""
    return {each.name: each for each in sorted(found, key=lambda each: each.origin == each.name)}


def find_file(key: str, modified: float) -> ForeignCheckpoint:
    """The checkpoint that one file is, whatever its name ends with."""
    named = find([(key, modified)], base="")
    return named[0] if named else ForeignCheckpoint(key, "torch", {key: key}, ids.step_in_name(key), modified)


def _dcp(times: dict[str, float], base: str) -> list[ForeignCheckpoint]:
    found = []
    for key in times:
        folder, _, name = key.rpartition("/")
        if name == METADATA:
            prefix = f"{folder}/" if folder else ""
            files = {each[len(prefix) :]: each for each in times if each.startswith(prefix)}
            # Those beside it alone: what is in folders below belongs to other tools.
            files = {basename: each for basename, each in files.items() if "/" not in basename}
            modified = max(times[each] for each in files.values())
            found.append(ForeignCheckpoint(folder or base, "dcp", files, ids.step_in_name(folder or base), modified))
    return found


def _sagemaker(times: dict[str, float]) -> list[ForeignCheckpoint]:
    steps: dict[tuple[str, int], dict[str, str]] = {}
    for key in times:
        match = _OF_RANK.match(key)
        if match is None:
            continue
        rank, step = int(match["rank"] or match["rank2"]), int(match["step"] or match["step2"])
        name = key.rpartition("/")[2]
        files = steps.setdefault((match["base"], step), {})
        if name == _SHARD:
            files[shard_name(rank)] = key
        elif name == _SHARD_METADATA:
            files[METADATA] = key
    return [
        ForeignCheckpoint(f"{base}step_{step}", "sagemaker", files, step, max(times[key] for key in files.values()))
        for (base, step), files in steps.items()
        if files
    ]


def shard_name(rank: int) -> str:
    """The basename that a rank's file gets: as torch.distributed.checkpoint calls it."""
    return f"__{rank}_0.distcp"
