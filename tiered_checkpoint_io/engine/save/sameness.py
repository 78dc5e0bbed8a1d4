"""Weights, or an optimizer's state, that no step changes any more: frozen by accident, and mostly found out at the end.

A part's file is hashed in chunks. The tensors of the model lie in one stretch of it, and so do those of the optimizers:
the chunks' hashes tell whether they are those of the save before. Where all of them are, the chunks at the two ends of
a stretch, which hold other bytes too, are hashed once more, without these.

A rank may hold nothing but what is frozen on purpose, so a checkpoint of several parts is warned of where all of its
ranks find theirs unchanged. They count themselves in the key-value store of torch.distributed, which a rank asks only
where its part is unchanged; the one that completes the count warns.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import xxhash

from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import PeerError
from tiered_checkpoint_io.formats.filling import Sliced
from tiered_checkpoint_io.formats.image import Image

MODEL, OPTIMIZER = "model's state", "optimizer's state"
#: Other tensors that training may change: adapters, averages. They count with the model, where that is there.
_OTHER = ""
#: How states call them: those of Lightning and Fabric, of DCP's recipes, and of loops of one's own.
_NAMES = {MODEL: re.compile(r"state_dict|model|model_state_dict"), OPTIMIZER: re.compile(r"optim\w*")}
_ADVICE = {
    MODEL: "is the learning rate 0, is everything frozen, or are all steps skipped?",
    OPTIMIZER: "is its step() called, with gradients?",
}
#: More stretches than this are no state that is laid out as expected, and each costs two pieces to hash.
_MAX_STRETCHES = 4

#: ``[start, end)`` of the bytes of a file that hold the one, and the other.
Stretches = Mapping[str, Sequence[tuple[int, int]]]
_Placed = tuple[str | None, int, int]


# --------------------------------------------------------------------------------- what lies where
def kind_of(path: Sequence[str], dtype: torch.dtype, dims: int) -> str | None:
    """What a tensor of a state is: of the model's, the optimizer's, other numbers, or None for what does not count.

    Args:
        path: Its keys, from the outermost on.
        dtype: Its type.
        dims: How many dimensions it has.
    """
    # An application's state, as DCP's recipes have it, is one level further down.
    kind = next(filter(None, map(_named, path[:2])), None)
    if kind is None and dims and (dtype.is_floating_point or dtype.is_complex):
        return _OTHER
    return kind


@functools.lru_cache(1024)
def _named(key: str) -> str | None:
    return next((kind for kind, names in _NAMES.items() if names.fullmatch(key)), None)


def stretches_of(placed: Iterable[_Placed]) -> Stretches:
    """Where a file holds them.

    Args:
        placed: Of each of its tensors, in their order, what it is by :func:`kind_of`, and the bytes ``[start, end)``.
    """
    items = list(placed)
    if not any(kind == MODEL for kind, _, _ in items):
        items = [(None if kind == _OTHER else kind, start, end) for kind, start, end in items]
    found: dict[str, list[tuple[int, int]]] = {}
    before: str | None = None
    for kind, start, end in items:
        what = MODEL if kind == _OTHER else kind
        if what is not None:
            stretches = found.setdefault(what, [])
            begin = stretches.pop()[0] if what == before else start
            stretches.append((begin, end))
        before = what
    return {what: stretches for what, stretches in found.items() if len(stretches) <= _MAX_STRETCHES}


#: Of layouts: where the first tensor's bytes stood, and the stretches then.
_known: weakref.WeakKeyDictionary[Any, tuple[int, Stretches]] = weakref.WeakKeyDictionary()


def stretches_of_state(get_state: Callable[[], object], image: Image) -> Stretches:
    """As :func:`stretches_of`, of a state that is one file; looked for once for files that are laid out alike.

    Args:
        get_state: Gives what is saved.
        image: Its file, planned.
    """
    if image.layout is None or not image.regions:
        return _stretches_in(get_state(), image)
    first = image.regions[0].offset
    if image.layout not in _known:
        _known[image.layout] = first, _stretches_in(get_state(), image)
    before, stretches = _known[image.layout]
    move = first - before
    return {what: [(start + move, end + move) for start, end in each] for what, each in stretches.items()}


def _stretches_in(state: object, image: Image) -> Stretches:
    kinds: dict[int, str] = {}
    for path, tensors in _tensors(state):
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()._cdata
            except (NotImplementedError, RuntimeError):
                # Made of other tensors: it is not judged.
                continue
            kind = kind_of(path, tensor.dtype, tensor.dim())
            if kind is not None:
                # What two share, as averages do that have not begun, is the model's.
                kinds[storage] = kinds.get(storage, _OTHER) or kind
    return stretches_of(
        (kinds.get(region.storage._cdata), region.offset, region.offset + region.nbytes)
        for region in sorted(image.regions, key=attrgetter("offset"))
    )


def _tensors(state: object) -> Iterator[tuple[tuple[str, ...], list[torch.Tensor]]]:
    """The tensors of a state, by the first two of their keys."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        for path, each in (
            [((str(key), str(inner)), each) for inner, each in value.items()]
            if _named(str(key)) is None and isinstance(value, Mapping)
            else [((str(key),), value)]
        ):
            found: list[torch.Tensor] = []
            _find(each, found, set())
            yield path, found


def _find(value: object, found: list[torch.Tensor], met: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict | list | tuple) and id(value) not in met:
        # A collection may hold itself.
        met.add(id(value))
        for each in value.values() if isinstance(value, dict) else value:
            _find(each, found, met)


# ---------------------------------------------------------------------------------- has it changed?
def warn_of_sameness(
    session: Session,
    *,
    save_id: str,
    step: int,
    parts: int,
    stretches: Stretches,
    image: Image,
    hashes: Sequence[str],
    content: Sliced,
) -> None:
    """Warns, once, of what all ranks of a checkpoint hold as they did at an earlier step.

    Args:
        session: The rank's; it keeps what its last saves held.
        save_id: Which save.
        step: The training step; -1 where it is not known.
        parts: How many ranks save.
        stretches: What the rank's file holds, and where.
        image: The file, planned.
        hashes: Of its chunks.
        content: Its bytes.
    """
    found = {
        what: (
            _digest_of_chunks(each, image, hashes),
            functools.partial(_digest_of_ends, each, image.chunk_size, content),
        )
        for what, each in stretches.items()
        if what not in session.warned
    }
    for what, since in session.last_tensors.unchanged(step, found):
        try:
            key = f"unchanged/{session.config.namespace}/{what}"
            is_last = current_run().completes(key, save_id, parts, session.clock)
        except PeerError as error:
            session.warned.add(what)
            session.log.at_step(step).warning("could not ask the other ranks whether the %s changes: %s", what, error)
            continue
        if is_last:
            session.warned.add(what)
            text = "the %s has not changed by a bit since step %d: %s"
            session.log.at_step(step).warning(text, what, since, _ADVICE[what])


def _digest_of_chunks(stretches: Sequence[tuple[int, int]], image: Image, hashes: Sequence[str]) -> str:
    hasher = xxhash.xxh3_128()
    for start, end in stretches:
        for digest in hashes[slice(*_whole_chunks(start, end, image.chunk_size))]:
            hasher.update(digest.encode())
    return hasher.hexdigest()


def _digest_of_ends(stretches: Sequence[tuple[int, int]], chunk_size: int, content: Sliced) -> str:
    hasher = xxhash.xxh3_128()
    for start, end in stretches:
        first, last = (number * chunk_size for number in _whole_chunks(start, end, chunk_size))
        for low, high in ((start, first), (last, end)) if first < last else ((start, end),):
            with content[low:high] as piece:
                hasher.update(piece)
    return hasher.hexdigest()


def _whole_chunks(start: int, end: int, chunk_size: int) -> tuple[int, int]:
    """The first of the chunks that lie in a stretch, and the one after the last; no chunk where these are one."""
    first = -(-start // chunk_size)
    return first, max(first, end // chunk_size)
