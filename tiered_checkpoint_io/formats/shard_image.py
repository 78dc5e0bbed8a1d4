"""The exact bytes of one rank's file of a sharded checkpoint, planned without copying tensor data.

A ``.distcp`` file of torch.distributed.checkpoint is a row of items: what ``torch.save`` writes for
a single tensor, or raw bytes. ``.metadata`` tells the offset and length of each. The bytes around a
tensor's own depend on its type and shape alone, so they are laid out once for each of these and
then reused: a state of thousands of small tensors is planned in milliseconds.

Items begin at multiples of 64 bytes, and so do the tensors within them: a file that is mapped into
memory can be used in place. What lies between items is zero, and no reader looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tiered_checkpoint_io.formats.filling import Region, Segment, StorageRegion, TensorRegion
from tiered_checkpoint_io.formats.image import Image, plan

ALIGNMENT = 64
#: Skeletons that are kept: more than a model has different shapes, at about 2 KiB each.
_MAX_SKELETONS = 4096

Item = torch.Tensor | bytes | memoryview


@dataclass(frozen=True, slots=True)
class Placed:
    """Where an item lies in the file, bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """All of a single tensor's ``torch.save`` file but its elements.

    Attributes:
        length: Bytes of the file.
        segments: What surrounds the elements; the last one goes on to the next item's beginning.
        data_offset: Where the elements lie in it.
        data_nbytes: How many bytes they are.
    """

    length: int
    segments: tuple[Segment, ...]
    data_offset: int
    data_nbytes: int

    @property
    def head(self) -> memoryview:
        """What lies before the elements."""
        return self.segments[0].data


def plan_shard(items: Iterable[Item]) -> tuple[Image, list[Placed]]:
    """Plans the file that holds ``items`` in their order.

    Args:
        items: Tensors on any device, of which just the elements go to the file (not the rest of a
            storage that they are a view of), and raw bytes. They must not change until the image
            is filled.

    Returns:
        The file, and where each item lies.

    Raises:
        Exception: Whatever ``torch.save`` raises for a tensor that it can't save.
    """
    segments: list[Segment] = []
    regions: list[Region] = []
    placed: list[Placed] = []
    position = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            length = _place_tensor(item.detach(), position, segments, regions)
        else:
            data = memoryview(item)
            length = len(data)
            segments.append(Segment(position, data))
            _pad(position + length, segments)
        placed.append(Placed(position, length))
        position = _aligned(position + length)
    return Image(position, tuple(segments), tuple(regions), planned=True), placed


def skeleton_of(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Skeleton:
    """The skeleton of a tensor's file.

    Args:
        dtype: Of the elements.
        shape: Of the tensor.
        stride: How the elements lie, without gaps; row by row by default.
    """
    if stride is None:
        stride = _contiguous(shape)
    key = (dtype, shape, stride)
    known = _skeletons.get(key)
    if known is None:
        if len(_skeletons) >= _MAX_SKELETONS:
            _skeletons.clear()
        known = _skeletons[key] = _make(dtype, shape, stride)
    return known


_skeletons: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], Skeleton] = {}


def _make(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Skeleton:
    # The pages of the stand-in are never touched, so that its size costs nothing.
    image = plan(torch.empty_strided(shape, stride, dtype=dtype))
    last = image.segments[-1]
    padded = bytes(last.data) + bytes(_aligned(image.size) - image.size)
    segments = (*image.segments[:-1], Segment(last.offset, memoryview(padded)))
    if image.regions:
        return Skeleton(image.size, segments, image.regions[0].offset, image.regions[0].nbytes)
    return Skeleton(image.size, segments, image.size, 0)


def _place_tensor(tensor: torch.Tensor, position: int, segments: list[Segment], regions: list[Region]) -> int:
    if _is_awkward(tensor):
        return _place_image(_alone(tensor), position, segments, regions)
    shape, gathered = tuple(tensor.shape), False
    if tensor.is_contiguous():
        stride = _contiguous(shape)
    else:
        stride = torch.empty_like(tensor, device="meta").stride()
        gathered = stride != tensor.stride()
    skeleton = skeleton_of(tensor.dtype, shape, stride)
    segments += [Segment(position + segment.offset, segment.data) for segment in skeleton.segments]
    if skeleton.data_nbytes:
        offset = position + skeleton.data_offset
        if gathered:
            regions.append(TensorRegion(offset, skeleton.data_nbytes, tensor, stride))
        else:
            start = int(tensor.storage_offset()) * tensor.element_size()
            regions.append(StorageRegion(offset, skeleton.data_nbytes, tensor.untyped_storage(), start))
    return skeleton.length


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
    """The tensor as torch's own writer saves it: on the CPU, with no storage but its own."""
    tensor = tensor.cpu()
    try:
        shared = tensor.untyped_storage().nbytes() != tensor.nbytes
    except (NotImplementedError, RuntimeError):
        # It has none: it is made of other tensors.
        return tensor
    return tensor.clone() if shared else tensor


def _place_image(tensor: torch.Tensor, position: int, segments: list[Segment], regions: list[Region]) -> int:
    image = plan(tensor)
    segments += [Segment(position + segment.offset, segment.data) for segment in image.segments]
    for region in image.regions:
        assert isinstance(region, StorageRegion)
        regions.append(StorageRegion(position + region.offset, region.nbytes, region.storage, region.start))
    _pad(position + image.size, segments)
    return image.size


def _pad(end: int, segments: list[Segment]) -> None:
    # A slot is not empty when it is filled: what nobody writes is an earlier checkpoint's.
    missing = _aligned(end) - end
    if missing:
        segments.append(Segment(end, memoryview(bytes(missing))))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = 1
    strides = []
    for length in reversed(shape):
        strides.append(stride)
        stride *= max(1, length)
    return tuple(reversed(strides))
