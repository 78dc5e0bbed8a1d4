"""Weights, or an optimizer's state, that no step changes any more: frozen by accident, and mostly found out at the end.

A full checkpoint is hashed in chunks. The tensors of the model lie in one run of its file, and so do those of the
optimizers: the chunks' hashes tell whether they are those of the save before. Just the chunks at the two ends of a run,
which hold other bytes too, are hashed once more, without these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash

from tiered_checkpoint_io.formats.filling import Sliced
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.model.hashing import chunk_ranges

#: Where states hold them: Lightning's checkpoints, and what loops of one's own mostly call them.
_KEYS = {
    "model's state": ("state_dict", "model"),
    "optimizer's state": ("optimizer_states", "optimizer", "optim"),
}
_ADVICE = {
    "model's state": "is the learning rate 0, is everything frozen, or are all steps skipped?",
    "optimizer's state": "is its step() called, with gradients?",
}
#: More runs than this are no state that is laid out as expected, and each costs two pieces to hash.
_MAX_RUNS = 4


class LastTensors:
    """What the last save of this process held."""

    def __init__(self) -> None:
        self._step = -1
        self._digests: dict[str, str] = {}

    def same(self, step: int, digests: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Takes note of a save; what of it is the same as in the last one though the step has risen, and a sentence."""
        before, last = self._step, self._digests
        self._step, self._digests = step, dict(digests)
        if 0 <= before < step:
            for what, digest in digests.items():
                if last.get(what) == digest:
                    yield what, f"the {what} has not changed by a bit since step {before}: {_ADVICE[what]}"


def digests_of(state: object, image: Image, hashes: Sequence[str], content: Sliced) -> dict[str, str]:
    """One digest for the model's tensors, and one for the optimizers', of those that a state holds.

    Args:
        state: What is saved.
        image: Its file, planned.
        hashes: Of the file's chunks.
        content: The file.
    """
    digests = {}
    for what, keys in _KEYS.items():
        held = [state[key] for key in keys if key in state] if isinstance(state, Mapping) else []
        runs = _runs(image, set(_storages(held)))
        if 0 < len(runs) <= _MAX_RUNS:
            digests[what] = _digest(runs, image, hashes, content)
    return digests


def _storages(value: object) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        try:
            yield value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            # Made of other tensors: it is not judged.
            return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _storages(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _storages(each)


def _runs(image: Image, storages: set[int]) -> list[tuple[int, int]]:
    """The stretches of the file in which no tensor lies but these, from the first one's begin to the last one's end."""
    runs: list[tuple[int, int]] = []
    follows = False
    for region in sorted(image.regions, key=lambda each: each.offset):
        if region.storage._cdata not in storages:
            follows = False
            continue
        start = runs.pop()[0] if follows else region.offset
        runs.append((start, region.offset + region.nbytes))
        follows = True
    return runs


def _digest(runs: Sequence[tuple[int, int]], image: Image, hashes: Sequence[str], content: Sliced) -> str:
    hasher = xxhash.xxh3_128()
    for start, end in runs:
        for (offset, length), digest in zip(chunk_ranges(image.size, image.chunk_size), hashes, strict=True):
            low, high = max(start, offset), min(end, offset + length)
            if high - low == length:
                hasher.update(digest.encode())
            elif low < high:
                with content[low:high] as piece:
                    hasher.update(piece)
    return hasher.hexdigest()
