"""The exact bytes of one rank's file of a sharded checkpoint, planned without copying tensor data.

A ``.distcp`` file of torch.distributed.checkpoint is a row of items: what ``torch.save`` writes for
a single tensor, or raw bytes. ``.metadata`` has the offset and length of each. The bytes around a tensor's own depend
only on its type and shape, so they are laid out once for each of these and then reused: a state of thousands of small
tensors is planned in milliseconds.

Items begin at multiples of 64 bytes, and so do the tensors within them: a file that is mapped into memory can be used
without a copy. Bytes between items are zero, and no reader looks at them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.image import (
    Image,
    Region,
    Segment,
    Segments,
    StorageRegion,
    StorageRegions,
    TensorRegion,
    devices_of,
)
from tiered_checkpoint_io.formats.torch_file import plan

ALIGNMENT = 64
#: Skeletons that are kept: more than a model has different shapes, at about 2 KiB each.
_MAX_SKELETONS = 4096
#: Linux's; Python's module has it since 3.13.
_MAP_NORESERVE = 0x4000

#: Types whose tensors have scales besides their elements.
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


Item = torch.Tensor | bytes | memoryview


class Placed(NamedTuple):
    """The place of an item in the file, bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """All of a single tensor's ``torch.save`` file but its elements."""

    #: Bytes of the file.
    length: int
    #: Bytes around the elements; the last segment reaches to the next item's beginning.
    segments: tuple[Segment, ...]
    data_offset: int
    data_nbytes: int

    @property
    def head(self) -> memoryview:
        """The bytes before the elements."""
        return self.segments[0].data


def plan_shard(items: Iterable[Item]) -> tuple[Image, list[Placed]]:
    """Plans the file that holds ``items`` in their order; returns the image, and the offset and length of each item.

    Of tensors, on any device, only the elements are written, not the rest of their storage. The items must not change
    until the image is filled.

    Raises:
        SaveError: See :func:`skeleton_of`.
        Exception: Errors of ``torch.save`` for a tensor that it can't save.
    """
    segments: list[Segment] = []
    regions: list[Region] = []
    placed: list[Placed] = []
    position = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            skeleton = _lay_out(item.detach(), position, regions)
        else:
            data = memoryview(item)
            skeleton = Skeleton(len(data), _padded((Segment(0, data),), len(data)), 0, 0)
        segments += [Segment(position + segment.offset, segment.data) for segment in skeleton.segments]
        placed.append(Placed(position, skeleton.length))
        position = _aligned(position + skeleton.length)
    return Image(position, tuple(segments), tuple(regions)), placed


class TensorRow:
    """The places of tensors in a file, one after the other, for later files of the same shape; holds no tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Plans them.

        Raises:
            ValueError: Some of them are not copied as they lie in their storages.
        """
        image, self.placed = plan_shard(tensors)
        self._filled = [index for index, tensor in enumerate(tensors) if tensor.nbytes]
        are_plain = not any(_is_awkward(tensor.detach()) for tensor in tensors)
        are_plain = are_plain and len(image.regions) == len(self._filled)
        if not are_plain or any(isinstance(region, TensorRegion) for region in image.regions):
            raise ValueError("some tensors are not copied as they lie in their storages")
        self._size, self._segments = image.size, Segments.of(image.segments)
        self._offsets = np.array([region.offset for region in image.regions], np.int64)
        self._lengths = np.array([region.nbytes for region in image.regions], np.int64)
        self._sizes = np.array([tensors[index].element_size() for index in self._filled], np.int64)
        self._devices = devices_of(image.regions)

    def plan(self, objects: Iterable[bytes], tensors: Sequence[torch.Tensor]) -> tuple[Image, list[Placed]]:
        """Plans as :func:`plan_shard`: first the objects, then tensors with the dtypes and shapes of this row."""
        head, placed = plan_shard(objects)
        before, after, base = Segments.of(head.segments), self._segments, head.size
        segments = Segments(
            memoryview(b"".join((before.data, after.data))),
            np.concatenate((before.offsets, after.offsets + base)),
            np.concatenate((before.cuts[:-1], after.cuts + len(before.data))),
        )
        filled = [tensors[index] for index in self._filled]
        starts = np.fromiter(map(torch.Tensor.storage_offset, filled), np.int64) * self._sizes
        storages = list(map(torch.Tensor.untyped_storage, filled))
        regions = StorageRegions(self._offsets + base, self._lengths, storages, starts, self._devices)
        placed += [Placed(offset + base, length) for offset, length in self.placed] if base else self.placed
        return Image(base + self._size, segments, regions), placed


def skeleton_of(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Skeleton:
    """Returns the skeleton of a gapless tensor's file; its elements lie row by row by default.

    The skeleton's length is 0 if this release of torch lays out the file in an unknown way.
    """
    key = (dtype, shape, stride)
    known = _skeletons.get(key)
    if known is None:
        if len(_skeletons) >= _MAX_SKELETONS:
            _skeletons.clear()
        # torch.empty would put the placeholder on the default device, and fill it if algorithms have to be
        # deterministic.
        storage: Any = untouched(math.prod(shape) * dtype.itemsize).untyped_storage()
        plain = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, stride or ())
        image = plan(plain)
        is_known = image.planned or not storage.nbytes()
        known = _skeletons[key] = _skeleton(image) if is_known else Skeleton(0, (), 0, 0)
    return known


def untouched(nbytes: int) -> torch.Tensor:
    """Returns bytes that take no memory until they are touched, and may be more than the machine has.

    Raises:
        SaveError: This process may not have so much address space.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError):
        raise SaveError(
            f"no address space for a tensor of {nbytes} bytes",
            operation="plan",
            hint="raise `ulimit -v`; with vm.overcommit_memory=2, set that to 0, or use a machine with more memory",
        ) from None
    return torch.frombuffer(mapping, dtype=torch.uint8)


_skeletons: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None], Skeleton] = {}


def _skeleton(image: Image) -> Skeleton:
    data_offset, data_nbytes = image.size, 0
    if image.regions:
        data_offset, data_nbytes = image.regions[0].offset, image.regions[0].nbytes
    return Skeleton(image.size, _padded(image.segments, image.size), data_offset, data_nbytes)


def _lay_out(tensor: torch.Tensor, position: int, regions: list[Region]) -> Skeleton:
    """Adds the regions of a tensor's elements to a file from ``position`` on; returns the bytes around them."""
    if _is_awkward(tensor):
        return _saved(tensor, position, regions)
    stride = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
    skeleton = skeleton_of(tensor.dtype, tuple(tensor.shape), stride)
    if not skeleton.length:
        return _saved(tensor, position, regions)
    offset, nbytes = position + skeleton.data_offset, skeleton.data_nbytes
    if nbytes and stride is not None and stride != tensor.stride():
        regions.append(TensorRegion(offset, nbytes, tensor, stride))
    elif nbytes:
        start = int(tensor.storage_offset()) * tensor.element_size()
        regions.append(StorageRegion(offset, nbytes, tensor.untyped_storage(), start))
    return skeleton


def _saved(tensor: torch.Tensor, position: int, regions: list[Region]) -> Skeleton:
    """Does :func:`_lay_out` by torch's own writer, of a tensor without a known skeleton."""
    image = plan(_alone(tensor))
    regions += [StorageRegion(position + each.offset, each.nbytes, each.storage) for each in image.regions]
    return _skeleton(image)


def _is_awkward(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is not torch.Tensor
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.device.type == "meta"
    )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as torch's own writer saves it: on the CPU, with no storage but its own."""
    tensor = tensor.cpu()
    try:
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes
    except (NotImplementedError, RuntimeError):
        # This tensor has no storage: it is made of other tensors.
        return tensor
    return tensor.clone() if shared else tensor


def _padded(segments: Sequence[Segment], size: int) -> tuple[Segment, ...]:
    """Returns segments with zeros up to the next item: a reused slot holds bytes of an earlier checkpoint."""
    *before, last = segments
    missing = bytes(_aligned(size) - size)
    return (*before, Segment(last.offset, memoryview(bytes(last.data) + missing))) if missing else tuple(segments)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
