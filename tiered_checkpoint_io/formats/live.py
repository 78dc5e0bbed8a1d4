"""A planned file that is never put together: its bytes are copied from the state when they are asked for."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
import threading
from collections.abc import Iterator

import torch

from tiered_checkpoint_io.formats.filling import (
    Region,
    Segment,
    StorageRegion,
    TensorRegion,
    default_threads,
    devices_of,
    hash_chunks,
)
from tiered_checkpoint_io.formats.image import Image

#: Bytes that are held at once, or one piece, where that is larger.
_HELD = 256 << 20


class LiveFile:
    """The bytes of an image, by slices that are good while their block runs; what ``Store.upload`` takes.

    The state must not change meanwhile. Beside the pieces that are held, memory is taken by one copy of a tensor whose
    elements lie scattered, while its bytes are asked for.
    """

    def __init__(self, image: Image) -> None:
        self._size = image.size
        self._sources = sorted((*image.segments, *image.regions), key=lambda each: each.offset)
        self._ends = [each.offset + each.nbytes for each in self._sources]
        self._turn = threading.Condition()
        self._held = 0
        self._gathered: tuple[TensorRegion, StorageRegion] | None = None
        for device in {device for device in devices_of(image.regions) if device.type == "cuda"}:
            # What is still to be computed there; pieces are copied by other threads, and so on other streams.
            torch.cuda.synchronize(device)

    def __len__(self) -> int:
        return self._size

    @contextlib.contextmanager
    def _piece(self, start: int, end: int) -> Iterator[memoryview]:
        with self._turn:
            self._turn.wait_for(lambda: not self._held or self._held + end - start <= _HELD)
            self._held += end - start
        try:
            with memoryview(mmap.mmap(-1, end - start)) as view:
                self._cut(start, end).fill(view, threads=1, hashed=False)
                yield view
        finally:
            with self._turn:
                self._held -= end - start
                self._turn.notify_all()

    def __getitem__(self, piece: slice, /) -> contextlib.AbstractContextManager[memoryview]:
        start, end, _ = piece.indices(self._size)
        return self._piece(start, end)

    def hashes(self, threads: int | None = None) -> tuple[str, ...]:
        """The hashes of its chunks, as :meth:`Image.fill` gives them."""
        return hash_chunks(self, threads or default_threads())

    def _cut(self, start: int, end: int) -> Image:
        """A stretch of the file as an image of its own."""
        segments: list[Segment] = []
        regions: list[Region] = []
        for source in itertools.islice(self._sources, bisect.bisect_right(self._ends, start), None):
            if source.offset >= end:
                break
            low, high = max(start, source.offset), min(end, source.offset + source.nbytes)
            whole = self._contiguous(source) if isinstance(source, TensorRegion) else source
            piece = whole.cut(low - source.offset, high - low, low - start)
            if isinstance(piece, Segment):
                segments.append(piece)
            else:
                regions.append(piece)
        return Image(end - start, tuple(segments), tuple(regions), planned=True)

    def _contiguous(self, region: TensorRegion) -> StorageRegion:
        with self._turn:
            if self._gathered is None or self._gathered[0] is not region:
                self._gathered = None
                self._gathered = region, region.gathered()
            return self._gathered[1]
