"""Loops that do the least of a verified restore from node memory, with nothing around them: beside ours."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
from measure import MIB

PIECE = MIB


class Floor:
    """The bytes of a file in node memory, and tensors that take as many of them, whatever they mean."""

    def __init__(self, path: Path, targets: Mapping[str, torch.Tensor]) -> None:
        self.path = path
        self.targets = list(targets.values())
        sizes = [target.nbytes for target in self.targets]
        self.starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.size = sum(sizes)
        self.threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def read_and_hash(self) -> None:
        """Each piece is read to where it belongs, and hashed there while it is in the cache."""
        with self._open() as file:

            def one(index: int) -> None:
                view, hasher = _bytes_of(self.targets[index]), xxhash.xxh3_128()
                for at in range(0, len(view), PIECE):
                    piece = view[at : at + PIECE]
                    os.preadv(file, [piece], self.starts[index] + at)
                    hasher.update(piece)
                hasher.digest()

            self._spread(one)

    def map_hash_and_copy(self) -> None:
        """The whole file is hashed as it is mapped; then tensors of that mapping are copied."""
        with self._open() as file, mmap.mmap(file, self.size, mmap.MAP_PRIVATE) as mapped:
            view = memoryview(mapped)
            ends = [*self.starts[1:], self.size]

            def one(index: int) -> None:
                hasher = xxhash.xxh3_128()
                for at in range(self.starts[index], ends[index], PIECE):
                    hasher.update(view[at : min(at + PIECE, ends[index])])
                hasher.digest()

            self._spread(one)
            for target, start in zip(self.targets, self.starts, strict=True):
                target.copy_(torch.frombuffer(view, dtype=target.dtype, count=target.numel(), offset=start))
            view.release()

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        file = os.open(self.path, os.O_RDONLY)
        try:
            yield file
        finally:
            os.close(file)

    def _spread(self, one: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(one, range(len(self.targets))))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().reshape(-1).view(np.uint8))
