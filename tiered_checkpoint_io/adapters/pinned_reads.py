"""Bytes of a file into tensors on a GPU, through two buffers of pinned memory.

One buffer is read into, and its bytes are verified there, while a device copies from the other. From memory that is not
pinned, as from a mapped file, its driver first copies them to a small buffer of its own, at a fraction of the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tiered_checkpoint_io.engine.chunks import Target, by_chunk
from tiered_checkpoint_io.engine.restore.shards import ShardFiles
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model.manifest import FileEntry

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


class DeviceCopies:
    """Copies from the host's memory to CUDA devices."""

    def __init__(self, log: Logger) -> None:
        self._log = log

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


class PinnedReads:
    """The reads of one load; its buffers go with it."""

    def __init__(self, files: ShardFiles, log: Logger) -> None:
        self._files = files
        self._copies = DeviceCopies(log)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

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
                    self._buffers[at] = self._copies.buffer(size)
                memory = self._buffers[at][: batch.nbytes]
                sources = memory.split_with_sizes([len(tensor) for _, tensor in batch.on_device])
                pairs = list(zip(batch.on_device, sources, strict=True))
                staged = [(offset, source.numpy().data) for (offset, _), source in pairs]
                self._files.fill(basename, [*batch.targets, *staged])
                waits[at] = self._copies.begin([(tensor, source) for (_, tensor), source in pairs])
        finally:
            for wait in waits:
                wait()
