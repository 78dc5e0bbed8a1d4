"""How a rank's items lie in its file: planned for one save, or kept for those of the same structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from tiered_checkpoint_io.adapters.structure import local_of
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.shard_image import Item, Placed, TensorRow, plan_shard


class PlannedFile(NamedTuple):
    """A rank's file.

    Attributes:
        image: The file.
        indexes: What its items are to DCP, in their order.
        placed: Where each lies.
        names: Of each, as ``_StorageInfo`` takes them: what its bytes went through.
    """

    image: Image
    indexes: Sequence[MetadataIndex]
    placed: Sequence[Placed]
    names: Sequence[list[list[str]]]


def planned_file(ordered: Sequence[WriteItem], data: Sequence[Item], names: Sequence[list[list[str]]]) -> PlannedFile:
    """Plans the file of items, in their order."""
    image, placed = plan_shard(data)
    return PlannedFile(image, [item.index for item in ordered], placed, names)


class FileLayout:
    """What is kept of the file of a plan; none of its tensors."""

    def __init__(self, plan: SavePlan, ordered: Sequence[WriteItem], data: Sequence[Item]) -> None:
        """Takes a plan, and its items in the file's order: objects come first.

        Raises:
            ValueError: Later files can't be told by this one.
        """
        self.plan = plan
        count = sum(item.type == WriteItemType.BYTE_IO for item in ordered)
        self.objects, tensors = ordered[:count], ordered[count:]
        self._keys = [item.index.fqn for item in tensors]
        self._indexes = [item.index for item in ordered]
        self._row = TensorRow([each for each in data[count:] if isinstance(each, torch.Tensor)])

    def file(self, objects: Sequence[bytes], state: Mapping[str, Any]) -> PlannedFile:
        """The file of the same items with other contents.

        Args:
            objects: The bytes of those that are no tensors.
            state: A flattened state, of the structure that the plan was made for.
        """
        image, placed = self._row.plan(objects, [local_of(state[key]) for key in self._keys])
        return PlannedFile(image, self._indexes, placed, list(repeat([], len(placed))))
