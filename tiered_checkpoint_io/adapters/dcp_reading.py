"""From the bytes of a ``.distcp`` file into the tensors of a load plan."""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from tiered_checkpoint_io.adapters import pinned_reads
from tiered_checkpoint_io.engine.chunks import Span
from tiered_checkpoint_io.engine.ranks.views import address_of, at
from tiered_checkpoint_io.engine.restore.shard_files import ShardFiles
from tiered_checkpoint_io.engine.restore.targets import Target
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.formats.shard_image import QUANTIZED, Skeleton, skeleton_of
from tiered_checkpoint_io.logs import Logger

_LOCAL_HEADER = b"PK\x03\x04"
_CRC_AT = 14
_CRC_LENGTH = 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a stored tensor most likely lies in its item: as rows, after a header that its type and shape tell."""

    skeleton: Skeleton
    dtype: torch.dtype
    shape: tuple[int, ...]

    def span(self, offsets: Sequence[int], lengths: Sequence[int]) -> Span:
        """``(offset, length)``, within the item, of the bytes from the first wanted element to the last."""
        if not all(lengths) or not math.prod(self.shape):
            return (self.skeleton.data_offset, 0)
        size = self.dtype.itemsize
        first = last = 0
        stride = 1
        for dimension in range(len(self.shape) - 1, -1, -1):
            first += offsets[dimension] * stride
            last += (offsets[dimension] + lengths[dimension] - 1) * stride
            stride *= self.shape[dimension]
        return (self.skeleton.data_offset + first * size, (last - first + 1) * size)

    def fits(self, item: memoryview) -> bool:
        """Whether the item's bytes before the elements are as expected."""
        head = bytes(self.skeleton.head)
        mine = bytes(item[: len(head)])
        # Who wrote the data along with the file knew its checksum; nobody reads that.
        crc = head.rfind(_LOCAL_HEADER) + _CRC_AT if self.skeleton.data_nbytes else len(head)
        return mine[:crc] == head[:crc] and mine[crc + _CRC_LENGTH :] == head[crc + _CRC_LENGTH :]


#: What decides where a planner's bytes go: its own, and it may do anything.
_RESOLVING = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")

_Wanted = tuple[ReadItem, Any, _Layout | None]


class _Direct:
    """An item whose bytes go from where they lie straight into the tensor that it is loaded into, also on a device."""

    def __init__(self, item: ReadItem, info: Any, layout: _Layout, tensor: torch.Tensor) -> None:
        offset, _ = layout.span(item.storage_offsets, item.lengths)
        self.wanted = item, info, layout
        self.tensor = tensor
        self._head = memoryview(bytearray(len(layout.skeleton.head)))
        into = tensor.reshape(-1).view(torch.uint8)
        #: See :mod:`targets`.
        self.targets: list[Target] = [(info.offset, self._head)]
        self.on_device: list[pinned_reads.OnDevice] = []
        if pinned_reads.is_on_device(tensor):
            self.on_device.append((info.offset + offset, into))
        else:
            self.targets.append((info.offset + offset, into.numpy().data))

    @classmethod
    def of(cls, wanted: _Wanted, planner: LoadPlanner) -> _Direct | None:
        """None where the bytes have to be converted; for a planner that resolves tensors as DCP's own does."""
        item, info, layout = wanted
        if layout is None:
            return None
        _, length = layout.span(item.storage_offsets, item.lengths)
        if not length or length != math.prod(item.lengths) * layout.dtype.itemsize:
            return None
        tensor = planner.resolve_tensor(item)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        is_within_reach = tensor.device.type == "cpu" or pinned_reads.is_on_device(tensor)
        if not is_plain or not is_within_reach or tensor.dtype != layout.dtype:
            return None
        tensor = tensor.detach()
        if tensor.size() != item.lengths or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        return None if tensor.is_inference() else cls(item, info, layout, tensor)

    @property
    def fits(self) -> bool:
        return self.wanted[2].fits(self._head)

    def commit(self, planner: LoadPlanner) -> None:
        """Has the planner take the tensor, once it is filled."""
        if self.fits:
            # As copy_ does: what autograd has saved of the tensor is outdated.
            torch.autograd.graph.increment_version(self.tensor)
            planner.commit_tensor(self.wanted[0], self.tensor)


class PlanReader:
    """Carries out one rank's load plan."""

    def __init__(self, metadata: Metadata, files: ShardFiles, transforms: Any, trust: Trust, log: Logger) -> None:
        """Takes an open checkpoint, and DCP's ``_StorageReaderTransforms``; None where torch has none."""
        self._log = log
        self._storage: dict[MetadataIndex, Any] = metadata.storage_data
        self._files = files
        self._transforms = transforms
        self._trust = trust
        self._tensors: dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                for chunk in stored.chunks:
                    key = (name, tuple(chunk.offsets))
                    self._tensors[key] = (stored.properties.dtype, tuple(chunk.sizes))

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads what the plan asks for, each file's bytes together, and nothing else.

        Raises:
            CorruptCheckpointError: No intact copy of some byte is within reach.
        """
        reads = pinned_reads.PinnedReads(self._files, self._log)
        for basename, wanted in self._by_file(plan).items():
            direct, rest = _split(wanted, planner)
            view = self._files.ensure(basename, [span for each in rest for span in _spans(*each)])
            targets = [target for each in direct for target in each.targets]
            reads.fill(basename, targets, [target for each in direct for target in each.on_device])
            for each in direct:
                each.commit(planner)
            # Where the bytes do not lie as expected, what was filled with them is filled anew.
            for item, info, layout in (*rest, *((*each.wanted[:2], None) for each in direct if not each.fits)):
                if layout is not None and layout.fits(view[info.offset : info.offset + info.length]):
                    _copy(view, item, info, layout, planner)
                    continue
                # It may be another file, if damage has shown since, and the view's other bytes were made sure of alone.
                whole = self._files.ensure(basename, [(info.offset, info.length)])
                self._load(whole, item, info, planner)

    def spans(self, plan: LoadPlan) -> dict[str, list[Span]]:
        """``(offset, length)`` of all that the plan needs of each file; whole items, for safety."""
        return {
            basename: [(info.offset, info.length) for _, info, _ in wanted]
            for basename, wanted in self._by_file(plan).items()
        }

    def _by_file(self, plan: LoadPlan) -> dict[str, list[_Wanted]]:
        by_file: dict[str, list[_Wanted]] = {}
        for item in plan.items:
            info = self._storage[item.storage_index]
            by_file.setdefault(info.relative_path, []).append((item, info, self._layout(item, info)))
        for wanted in by_file.values():
            wanted.sort(key=lambda each: int(each[1].offset))
        return by_file

    def _layout(self, item: ReadItem, info: Any) -> _Layout | None:
        if item.type == LoadItemType.BYTE_IO or _descriptors(info) or item.storage_index.offset is None:
            return None
        known = self._tensors.get((item.storage_index.fqn, tuple(item.storage_index.offset)))
        if known is None:
            return None
        if known[0] in QUANTIZED:
            # How it lies depends on its scales, too.
            return None
        skeleton = skeleton_of(*known)
        return _Layout(skeleton, *known) if skeleton.length == info.length else None

    def _load(self, view: memoryview, item: ReadItem, info: Any, planner: LoadPlanner) -> None:
        """As FileSystemReader does it: for what others laid out, and for all that is no plain tensor."""
        raw = io.BytesIO(view[info.offset : info.offset + info.length])
        stream: Any = raw
        if _descriptors(info):
            stream = self._transforms.transform_load_stream(item, _descriptors(info), raw)
        if not stream.seekable() or item.type == LoadItemType.BYTE_IO:
            stream = io.BytesIO(stream.read(-1))
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, self._checked(item, stream, planner))
            return
        tensor = self._trust.read(stream, "a tensor", {"key": item.storage_index.fqn}, map_location="cpu")
        _into(planner, item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

    def _checked(self, item: ReadItem, stream: io.BytesIO, planner: LoadPlanner) -> io.BytesIO:
        """Returns an object's bytes as this process would save it: DCP's own planner unpickles whatever it is given."""
        if self._trust.weights_only is False or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            return stream
        again = io.BytesIO()
        torch.save(self._trust.read(stream, "an object", {"key": item.storage_index.fqn}, map_location="cpu"), again)
        again.seek(0)
        return again


def _descriptors(info: Any) -> Sequence[str]:
    """What an item's bytes went through; files of older releases of torch do not have the field."""
    return getattr(info, "transform_descriptors", None) or ()


def _split(wanted: Sequence[_Wanted], planner: LoadPlanner) -> tuple[list[_Direct], list[_Wanted]]:
    """Items that are read straight into their tensors, of which no two share a byte, and all others.

    Args:
        wanted: Items of one file, in the order in which they lie there.
        planner: Whose tensors they are.
    """
    own = DefaultLoadPlanner
    if any(getattr(type(planner), name, None) is not getattr(own, name) for name in _RESOLVING):
        # It may do something of its own with the bytes.
        return [], list(wanted)
    direct: list[_Direct] = []
    rest: list[_Wanted] = []
    end = 0
    for each in wanted:
        found = _Direct.of(each, planner) if each[1].offset >= end else None
        end = max(end, each[1].offset + each[1].length)
        if found is None:
            rest.append(each)
        else:
            direct.append(found)
    direct.sort(key=lambda each: each.tensor.data_ptr())
    end = 0
    for one in direct:
        if one.tensor.data_ptr() < end:
            # Tied tensors are filled one after another, as by DCP itself.
            return [], list(wanted)
        end = one.tensor.data_ptr() + one.tensor.nbytes
    return direct, rest


def _spans(item: ReadItem, info: Any, layout: _Layout | None) -> list[Span]:
    if layout is None:
        return [(info.offset, info.length)]
    offset, length = layout.span(item.storage_offsets, item.lengths)
    return [(info.offset, len(layout.skeleton.head)), (info.offset + offset, length)]


def _copy(view: memoryview, item: ReadItem, info: Any, layout: _Layout, planner: LoadPlanner) -> None:
    """Straight from the mapped file into the tensor."""
    dtype, shape = layout.dtype, layout.shape
    count = math.prod(shape)
    if not count:
        _into(planner, item, torch.empty(shape, dtype=dtype, device="cpu"))
        return
    start, nbytes = info.offset + layout.skeleton.data_offset, layout.skeleton.data_nbytes
    if (address_of(view) + start) % dtype.itemsize:
        # Others do not align what they write. Bytes that were not asked for may not even be there.
        offset, length = layout.span(item.storage_offsets, item.lengths)
        aligned = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        inside = offset - layout.skeleton.data_offset
        ctypes.memmove(aligned.data_ptr() + inside, address_of(view) + start + inside, length)
        source = aligned.view(dtype)
    else:
        source = torch.frombuffer(at(view, start, nbytes), dtype=dtype)
    _into(planner, item, narrow_tensor_by_index(source.view(shape), item.storage_offsets, item.lengths))


def _into(planner: LoadPlanner, item: ReadItem, source: torch.Tensor) -> None:
    target = planner.resolve_tensor(item)
    if not target.is_quantized:
        # Of a quantized one, a detached alias would take the scales for itself.
        target = target.detach()
    if target.size() != source.size():
        raise AssertionError(f"{item.storage_index}: the state has {target.size()}, the checkpoint {source.size()}")
    with torch.no_grad():
        target.copy_(source)
    planner.commit_tensor(item, target)
