"""Which part of a sharded checkpoint holds which block of each tensor; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from tiered_checkpoint_io.export.blocks import Box, whole
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.shard_image import Blank, Placed, plan_shard, skeleton_of


class Share(NamedTuple):
    """A block of a tensor that a part holds."""

    name: str
    box: Box


def shares_of(tensors: Mapping[str, TensorStorageMetadata], parts: int) -> list[list[Share]]:
    """What each part holds of some tensors, as ranks that shard them evenly would have it.

    A tensor is cut in the dimension in which it was, by default the first, as torch.distributed.tensor cuts it:
    in equal blocks, of which the last ones may be smaller, or missing. One that a job of several ranks had whole was
    replicated there, and stays whole, in the part that is the smallest so far.
    """
    shares: list[list[Share]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    was_cut = any(len(entry.chunks) > 1 for entry in tensors.values())
    kept = []
    for name, entry in tensors.items():
        outer = whole(entry.size)
        if not outer.numel or not outer.sizes or (was_cut and len(entry.chunks) == 1):
            kept.append((name, outer))
            continue
        dim = _cut_dimension(entry)
        step = -(-outer.sizes[dim] // parts)
        for part, low in enumerate(range(0, outer.sizes[dim], step)):
            block = _cut(outer, dim, low, min(step, outer.sizes[dim] - low))
            shares[part].append(Share(name, block))
            sizes[part] += _nbytes(entry, block)
    for name, outer in kept:
        part = sizes.index(min(sizes))
        shares[part].append(Share(name, outer))
        sizes[part] += _nbytes(tensors[name], outer)
    return shares


def _nbytes(entry: TensorStorageMetadata, box: Box) -> int:
    return box.numel * entry.properties.dtype.itemsize


def _cut_dimension(entry: TensorStorageMetadata) -> int:
    """The dimension in which all blocks differ, where there is just one, else the first."""
    cut = [dim for dim, size in enumerate(entry.size) if any(chunk.sizes[dim] != size for chunk in entry.chunks)]
    return cut[0] if len(cut) == 1 else 0


def _cut(box: Box, dim: int, low: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = low, size
    return Box(tuple(offsets), tuple(sizes))


class Planned(NamedTuple):
    """The file of a part, all but the elements of tensors.

    Attributes:
        image: What is known of it, and its size.
        shares: The blocks that it holds.
        starts: Where their elements begin, bytes.
    """

    image: Image
    shares: Sequence[Share]
    starts: Sequence[int]


def plan_parts(
    tensors: Mapping[str, TensorStorageMetadata],
    objects: Mapping[str, bytes],
    parts: int,
    *,
    file_names: Sequence[str],
    paths: Mapping[str, Any] | None,
) -> tuple[list[Planned], Metadata]:
    """The files of a checkpoint's parts, and its ``.metadata``.

    Args:
        tensors: Shape, element type and stored blocks of each tensor.
        objects: What are not tensors, as torch.save wrote them; the first part holds them.
        parts: How many parts.
        file_names: Of each part.
        paths: The path of each name in the nested state; None where the state was flat.
    """
    planned = []
    places: dict[MetadataIndex, Any] = {}
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    for part, shares in enumerate(shares_of(tensors, parts)):
        raw = objects if part == 0 else {}
        blanks = [Blank(tensors[name].properties.dtype, box.sizes) for name, box in shares]
        image, placed = plan_shard([*raw.values(), *blanks])
        starts = [
            where.offset + skeleton_of(*blank).data_offset
            for where, blank in zip(placed[len(raw) :], blanks, strict=True)
        ]
        planned.append(Planned(image, shares, starts))
        indexes = [MetadataIndex(name) for name in raw]
        for name, box in shares:
            offsets = torch.Size(box.offsets)
            indexes.append(MetadataIndex(name, offsets, len(chunks[name])))
            chunks[name].append(ChunkStorageMetadata(offsets, torch.Size(box.sizes)))
        places |= {index: _info(file_names[part], where) for index, where in zip(indexes, placed, strict=True)}
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in objects}
    entries |= {name: replace(entry, chunks=chunks[name]) for name, entry in tensors.items()}
    metadata = Metadata(entries, paths, places)
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return planned, metadata


def _info(file_name: str, where: Placed) -> Any:
    return filesystem._StorageInfo(file_name, where.offset, where.length)
