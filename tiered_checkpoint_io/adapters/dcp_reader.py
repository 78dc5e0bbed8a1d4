"""The storage reader for torch.distributed.checkpoint (DCP) over both tiers.

Bytes for tensors on a GPU go through two buffers of pinned memory. One is read into, and its bytes are verified there,
while a device copies from the other. From memory that is not pinned, as from a mapped file, its driver first copies
them to a small buffer of its own, at a fraction of the speed.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tiered_checkpoint_io.adapters.calls import dcp_arguments
from tiered_checkpoint_io.adapters.dcp_settings import OverTiers, close_shared, settings_of
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.chunks import Span, Target, by_chunk, merged
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.engine.restore.catalog import Tiers, tiers_of
from tiered_checkpoint_io.engine.restore.choice import ONE_FOLDER, Selector
from tiered_checkpoint_io.engine.restore.restore import note_restore
from tiered_checkpoint_io.engine.restore.search import DAMAGE
from tiered_checkpoint_io.engine.restore.shards import OpenShards, ShardFiles, open_shards, share_reads
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.formats.shard_image import QUANTIZED, Skeleton, skeleton_of
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, FileEntry


class TieredStorageReader(OverTiers, StorageReader):
    """Loads a sharded checkpoint: of one step, of one path, or the newest complete one.

    For ``torch.distributed.checkpoint.load``, on the main thread of every rank that loads. Memory is
    read first, then the durable tier; every byte is verified before the load returns. A rank fetches only the chunks
    that its plan needs, and a node each of them once.

    Damage that shows while tensors are read fails the load on all ranks. The same reader, used
    again, takes the next checkpoint; :func:`tiered_checkpoint_io.dcp.load` does so by itself.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        step: int | None = None,
        path: str | os.PathLike[str] | None = None,
        no_dist: bool | None = None,
        process_group: Any = None,
        world_size: int | None = None,
        logger: Logger | None = None,
        checkpoint_config: Any = None,
        **options: Any,
    ) -> None:
        """Validates; opens nothing.

        Args:
            config: As :class:`TieredStorageWriter` takes it.
            step: The training step; without step and path, the newest checkpoint. Both as in ``load``: of names in no
                folder, else of the only folder; of another with a path such as ``stage1/tiered:latest``.
            path: Instead of a ``checkpoint_id``. A later ``checkpoint_id`` replaces it, as in ``FileSystemReader``.
            no_dist: True if only this process loads; by default the argument of DCP's ``load``.
            process_group: The ranks that load together; by default the argument of DCP's ``load``.
            world_size: As the writer takes it; a checkpoint of any other world size loads.
            logger: Logger to use instead of the package's own.
            checkpoint_config: Another name for ``config``.
            options: Single keys of the configuration.

        Raises:
            ConfigError: A key or value is not allowed. The step or path is not allowed.
        """
        super().__init__()
        given = config if config is not None else checkpoint_config
        self._base = settings_of(given, {**options, "world_size": world_size, "logger": logger})
        self.settings = self._base
        self.step = step
        self._path = path
        self._began = 0.0
        self._no_dist = no_dist
        self._process_group = process_group
        #: The wanted checkpoint.
        self.selector = Selector("latest", folder=ONE_FOLDER)
        self._rejected: dict[str, str] = {}
        self._metadata: Metadata | None = None
        self._is_first = True
        #: The checkpoint that is, or was last, loaded.
        self.opened: OpenShards | None = None
        #: Why the last load failed on this rank, if it did.
        self.error: TieredCheckpointError | None = None
        #: Error of this rank before the load began, raised on all ranks.
        self.failed: Exception | None = None
        self.reset()

    # ------------------------------------------------------------------------------------ DCP's
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load; see ``StorageReader.reset``."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        path = self._path
        self.settings = self._base
        text = os.fspath(path) if path is not None else ""
        folder, is_latest = text.removesuffix(f"/{ids.LATEST}"), text in ("", ids.LATEST)
        if is_latest or folder != text:
            dirpath = self._base.config.dirpath
            if self.step is not None:
                ids.locate(dirpath, None, self.step)
            self.selector = Selector("latest", step=self.step, folder=ONE_FOLDER)
            if not is_latest:
                self.selector = replace(self.selector, folder=ids.folder_of(f"{ids.name_in(dirpath, folder)}/any"))
            return
        if text.startswith(f"{ids.SENTINELS}:"):
            hint = f"allowed: {ids.LATEST}, a name, a path or a URL"
            raise ConfigError(f"{text!r} stands for no checkpoint", operation="load", hint=hint)
        located = ids.locate(self._base.config.dirpath, path, self.step)
        self.settings = self._base.at(located.dirpath)
        self.selector = Selector("name", located.name)

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's path on the durable tier, or that tier itself while none is chosen."""
        name = self.selector.name or (self.opened.name if self.opened is not None else "")
        dirpath = self.settings.config.dirpath
        return ids.join_url(dirpath, name) if name else dirpath

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Chooses the checkpoint, with all ranks that load, and returns its ``.metadata``."""
        del args, options
        self._close()
        self.error, self._began = None, SYSTEM.monotonic()
        try:
            self._metadata = self._open()
            return self._metadata
        except TieredCheckpointError as error:
            self.error = error
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: :meth:`read_metadata` has set up all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan; with the spans that it reads, if the ranks of a node share their reads."""
        if self.opened is None or not self.opened.sharing:
            return plan
        assert self._metadata is not None
        return replace(plan, storage_data=spans_of(self._metadata, plan))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans; with the spans that others of the rank's node read too, instead of its own."""
        nodes, spans = self.opened.sharing if self.opened is not None else [], [each.storage_data for each in plans]
        # A planner may have left the spans out.
        if len(nodes) != len(plans) or not all(isinstance(each, dict) for each in spans):
            return plans
        shared = share_reads(spans, nodes)
        return [replace(plan, storage_data=each) for plan, each in zip(plans, shared, strict=True)]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the items of this rank's plan."""
        opened = self.opened
        if opened is None or opened.files is None or self._metadata is None:
            raise RestoreError("read_data without read_metadata", operation="load")
        session, log = self.session, self.session.log.at_step(opened.step)
        try:
            if self._is_first:
                self._warn_of_empty(getattr(planner, "original_state_dict", None), opened.name)
            if opened.sharing and isinstance(plan.storage_data, dict):
                opened.files.share(plan.storage_data)
            PlanReader(self._metadata, opened.files, Trust.of(self.settings.config), log).read(plan, planner)
            opened.rejected.extend(opened.files.rejected)
        except TieredCheckpointError as error:
            self.error = error
            if isinstance(error, DAMAGE):
                log.error("%s is not intact: %s", opened.name, error)
            raise
        finally:
            opened.close()
        opened.seconds = session.clock.monotonic() - self._began
        note_restore(session, opened, self._began)
        session.save_ids.follow(opened.newest_save_id)
        if opened.save_id:
            self.saver.is_complete(opened.name, opened.save_id, opened.step)
        session.take_up()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ------------------------------------------------------------------------------------- ours
    def reject(self) -> None:
        """Skips the checkpoint that was loaded last from now on."""
        if self.opened is not None and self.opened.save_id:
            # Empty if another rank can't read it, which says why.
            self._rejected[self.opened.save_id] = f"{self.opened.name}: {self.error}" if self.error is not None else ""

    def release(self) -> None:
        """Closes the open checkpoint, if the load ended before :meth:`read_data`."""
        if self.opened is not None:
            self.opened.close()

    def close(self) -> None:
        """See :meth:`TieredStorageWriter.close`."""
        self._close()
        close_shared(self.settings)

    def __del__(self) -> None:
        # DCP does not inform a reader of a failure while a load is planned.
        with contextlib.suppress(Exception):
            self.release()

    # ----------------------------------------------------------------------------------- inside
    def _warn_of_empty(self, state: Any, name: str) -> None:
        """Warns of entries that are not loaded because they have no target: DCP itself says nothing."""
        assert self._metadata is not None
        held = self._metadata.state_dict_metadata
        for path in _empty(state, ()):
            if any(fqn.startswith(f"{path}.") for fqn in held):
                self.session.log.warning(
                    "%s is empty in the state to load into, so what %s holds of it is not loaded; an optimizer that has"
                    " made no step gets its state by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
                    path,
                    name,
                )

    def _close(self) -> None:
        self.release()
        if isinstance(self.error, DAMAGE):
            self.reject()
        self.opened = None

    def _open(self) -> Metadata:
        failed, self.failed = self.failed, None
        session, config, found = self.session, self.settings.config, list[Metadata]()

        def ready() -> tuple[Tiers, Selector]:
            coordination.raise_first([failed])
            return tiers_of(session, config), self.selector

        def take(opened: OpenShards) -> None:
            found.append(self._parse(opened))
            # Of a large job these are hundreds of MB on each rank.
            del opened.small[METADATA]
            opened.expect(_sizes(found[-1]))

        group = self._group()
        self.opened, self._is_first = open_shards(ready, group, take, self._rejected), group.rank == 0
        if getattr(found[-1], "storage_meta", None) is None:
            found[-1].storage_meta = StorageMeta()
        return found[-1]

    def _parse(self, opened: OpenShards) -> Metadata:
        if Trust.of(self.settings.config).is_full:
            # A user who trusts the stored data may use planners that keep classes of their own in it.
            with contextlib.suppress(Exception):
                trusted: Metadata = pickle.loads(opened.metadata)
                return trusted
        return parse_metadata(opened.metadata, tier="durable", where=opened.url)

    def _group(self) -> coordination.Group:
        alone, process_group = self._no_dist, self._process_group
        if alone is None and process_group is None:
            alone, process_group, _ = dcp_arguments("_load_state_dict") or (None, None, False)
        return coordination.current_group(self.session.clock, alone=bool(alone), process_group=process_group)


def _empty(state: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Returns the paths of a state's empty dictionaries."""
    if isinstance(state, Mapping):
        if path and not state:
            yield ".".join(path)
        for key, value in state.items():
            yield from _empty(value, (*path, str(key)))


def _sizes(metadata: Metadata) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes


#: Bytes of one buffer, at most, unless a chunk is larger. From node memory, each thread reads a chunk at once.
_MOST = 256 << 20

#: Offset of bytes in the file, and their target on a device: a flat tensor of bytes.
OnDevice = tuple[int, torch.Tensor]


def is_on_device(tensor: torch.Tensor) -> bool:
    """Returns True if copies to the tensor continue while the host does other work."""
    return tensor.device.type == "cuda"


@dataclass
class Batch:
    """Bytes that are read at once; ``nbytes`` counts the bytes for devices."""

    targets: list[Target] = field(default_factory=list)
    on_device: list[OnDevice] = field(default_factory=list)
    nbytes: int = 0


def batches_of(
    entry: FileEntry, targets: Sequence[Target], on_device: Sequence[OnDevice], most: int
) -> Iterator[Batch]:
    """Yields a file's reads in its order, in batches of whole chunks with at most ``most`` bytes for devices."""
    here, there = by_chunk(entry, targets), by_chunk(entry, on_device)
    batch = Batch()
    for index in sorted(here.keys() | there.keys()):
        pieces = there.get(index, [])
        nbytes = sum(len(piece) for _, piece in pieces)
        if batch.nbytes and batch.nbytes + nbytes > most:
            yield batch
            batch = Batch()
        batch.targets += here.get(index, [])
        batch.on_device += pieces
        batch.nbytes += nbytes
    yield batch


class PinnedReads:
    """The reads of one load, and copies to CUDA devices; its buffers go with it."""

    def __init__(self, files: ShardFiles, log: Logger) -> None:
        self._files, self._log = files, log
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Allocates pinned memory; ordinary memory if there is none: the host then waits for each copy."""
        try:
            # The default device may be another.
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            self._log.info("no pinned memory for %d bytes, loading to the device takes longer: %s", nbytes, why)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Begins to copy ``(target, source)`` on the current stream; returns a function that waits for the end."""
        with torch.no_grad():
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        devices = {target.device for target, _ in copies if target.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def fill(self, basename: str, targets: Sequence[Target], on_device: Sequence[OnDevice]) -> None:
        """Fills targets as :meth:`ShardFiles.fill`, and tensors on devices; no copy is under way when it ends."""
        if not on_device:
            self._files.fill(basename, targets)
            return
        spans = [(offset, len(target)) for offset, target in targets]
        spans += [(offset, len(tensor)) for offset, tensor in on_device]
        entry, at_once = self._files.begin(basename, spans)
        most = max(entry.chunk_size, min(at_once * entry.chunk_size, _MOST))
        size = min(most, sum(len(tensor) for _, tensor in on_device))
        # A buffer is read into once it has been copied from.
        waits: list[Callable[[], None]] = [lambda: None] * 2
        try:
            for number, batch in enumerate(batches_of(entry, targets, on_device, most)):
                at = number % 2
                waits[at]()
                if len(self._buffers[at]) < size:
                    self._buffers[at] = self.buffer(size)
                memory = self._buffers[at][: batch.nbytes]
                sources = memory.split_with_sizes([len(tensor) for _, tensor in batch.on_device])
                pairs = list(zip(batch.on_device, sources, strict=True))
                staged = [(offset, source.numpy().data) for (offset, _), source in pairs]
                self._files.fill(basename, [*batch.targets, *staged])
                waits[at] = self.begin([(tensor, source) for (_, tensor), source in pairs])
        finally:
            for wait in waits:
                wait()


_LOCAL_HEADER = b"PK\x03\x04"
_CRC_AT = 14
_CRC_LENGTH = 4


@dataclass(frozen=True, slots=True)
class _Layout:
    """The likely layout of a stored tensor in its item: rows, after a header that depends on its type and shape."""

    skeleton: Skeleton
    dtype: torch.dtype
    shape: tuple[int, ...]

    def span(self, offsets: Sequence[int], lengths: Sequence[int]) -> Span:
        """Returns ``(offset, length)``, within the item, of the bytes from the first wanted element to the last."""
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
        """Returns whether the item's bytes before the elements are as expected."""
        head = bytes(self.skeleton.head)
        mine = bytes(item[: len(head)])
        # A writer of the data with the file knew its checksum; no reader looks at that.
        crc = head.rfind(_LOCAL_HEADER) + _CRC_AT if self.skeleton.data_nbytes else len(head)
        return mine[:crc] == head[:crc] and mine[crc + _CRC_LENGTH :] == head[crc + _CRC_LENGTH :]


#: Methods that choose the target of a planner's bytes; a planner's own may do anything.
_RESOLVING = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")

_Wanted = tuple[ReadItem, Any, _Layout | None]


class _Direct:
    """An item whose bytes are read straight into the tensor that is loaded, also on a device."""

    def __init__(self, item: ReadItem, info: Any, layout: _Layout, tensor: torch.Tensor) -> None:
        offset, _ = layout.span(item.storage_offsets, item.lengths)
        self.wanted = item, info, layout
        self.tensor = tensor
        self._head = memoryview(bytearray(len(layout.skeleton.head)))
        into = tensor.reshape(-1).view(torch.uint8)
        #: See :mod:`chunks`.
        self.targets: list[Target] = [(info.offset, self._head)]
        self.on_device: list[OnDevice] = []
        if is_on_device(tensor):
            self.on_device.append((info.offset + offset, into))
        else:
            self.targets.append((info.offset + offset, into.numpy().data))

    @classmethod
    def of(cls, wanted: _Wanted, planner: LoadPlanner) -> _Direct | None:
        """Returns None if the bytes have to be converted. The planner must resolve tensors as DCP's own does."""
        item, info, layout = wanted
        if layout is None:
            return None
        _, length = layout.span(item.storage_offsets, item.lengths)
        if not length or length != math.prod(item.lengths) * layout.dtype.itemsize:
            return None
        tensor = planner.resolve_tensor(item)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        is_within_reach = tensor.device.type == "cpu" or is_on_device(tensor)
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
        """Hands the tensor to the planner, once it is filled."""
        if self.fits:
            # Tensor.copy_ does the same: values of the tensor that autograd has saved are outdated.
            torch.autograd.graph.increment_version(self.tensor)
            planner.commit_tensor(self.wanted[0], self.tensor)


class PlanReader:
    """Carries out one rank's load plan."""

    def __init__(self, metadata: Metadata, files: ShardFiles, trust: Trust, log: Logger) -> None:
        """Takes an open checkpoint."""
        self._log = log
        self._storage: dict[MetadataIndex, Any] = metadata.storage_data
        self._files = files
        self._trust = trust
        self._tensors: dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                for chunk in stored.chunks:
                    key = (name, tuple(chunk.offsets))
                    self._tensors[key] = (stored.properties.dtype, tuple(chunk.sizes))

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads only the plan's items, each file's bytes together."""
        reads = PinnedReads(self._files, self._log)
        for basename, wanted in self._by_file(plan).items():
            direct, rest = _split(wanted, planner)
            self._files.ensure(basename, [(info.offset, info.length) for _, info, _ in rest])
            targets = [target for each in direct for target in each.targets]
            reads.fill(basename, targets, [target for each in direct for target in each.on_device])
            for each in direct:
                each.commit(planner)
            # If the bytes do not lie as expected, tensors that were filled with them are filled again.
            for item, info, _ in (*rest, *(each.wanted for each in direct if not each.fits)):
                # After damage, the view may be another source's, and only its requested bytes were verified.
                self._load(self._files.ensure(basename, [(info.offset, info.length)]), item, info, planner)

    def _by_file(self, plan: LoadPlan) -> dict[str, list[_Wanted]]:
        by_file: dict[str, list[_Wanted]] = {}
        for item in plan.items:
            info = self._storage[item.storage_index]
            # Files of older releases of torch do not have the field.
            if getattr(info, "transform_descriptors", None):
                raise RestoreError(
                    f"{item.storage_index.fqn} was saved with the stream transformations {info.transform_descriptors}",
                    operation="load",
                    hint="load it by torch's FileSystemReader with the same _extension_registry",
                )
            by_file.setdefault(info.relative_path, []).append((item, info, self._layout(item, info)))
        for wanted in by_file.values():
            wanted.sort(key=lambda each: int(each[1].offset))
        return by_file

    def _layout(self, item: ReadItem, info: Any) -> _Layout | None:
        if item.type == LoadItemType.BYTE_IO or item.storage_index.offset is None:
            return None
        known = self._tensors.get((item.storage_index.fqn, tuple(item.storage_index.offset)))
        if known is None:
            return None
        if known[0] in QUANTIZED:
            # Its layout depends on its scales, too.
            return None
        skeleton = skeleton_of(*known)
        return _Layout(skeleton, *known) if skeleton.length == info.length else None

    def _load(self, view: memoryview, item: ReadItem, info: Any, planner: LoadPlanner) -> None:
        """Loads as FileSystemReader does: for files of other layouts, and for all items except plain tensors."""
        stream = io.BytesIO(view[info.offset : info.offset + info.length])
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, self._checked(item, stream, planner))
            return
        tensor = self._trust.read(stream, "a tensor", {"key": item.storage_index.fqn}, map_location="cpu")
        _into(planner, item, narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))

    def _checked(self, item: ReadItem, stream: io.BytesIO, planner: LoadPlanner) -> io.BytesIO:
        """Returns an object's bytes as this process would save it: DCP's own planner unpickles any bytes."""
        if self._trust.weights_only is False or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
            return stream
        again = io.BytesIO()
        torch.save(self._trust.read(stream, "an object", {"key": item.storage_index.fqn}, map_location="cpu"), again)
        again.seek(0)
        return again


def spans_of(metadata: Metadata, plan: LoadPlan) -> dict[str, list[Span]]:
    """Returns the ``(offset, length)`` spans of each file that a plan needs; whole items, for safety."""
    spans: dict[str, list[Span]] = {}
    for item in plan.items:
        info = metadata.storage_data[item.storage_index]
        spans.setdefault(info.relative_path, []).append((info.offset, info.length))
    return {basename: merged(each) for basename, each in spans.items()}


def _split(wanted: Sequence[_Wanted], planner: LoadPlanner) -> tuple[list[_Direct], list[_Wanted]]:
    """Items that are read straight into their tensors, of which no two share a byte, and all others."""
    own = DefaultLoadPlanner
    if any(getattr(type(planner), name, None) is not getattr(own, name) for name in _RESOLVING):
        # Such a planner may do anything with the bytes.
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
