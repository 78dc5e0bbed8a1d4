"""A sharded state as it is now: what a capture that overlaps training leaves live, and what is copied at once.

DCP looks into mappings and lists, and pickles all else where it writes it, which is later. So whatever training may
change in place by then is copied: each tensor that is not the optimizers' alone, and each object that is not known to
stay as it is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_MAPPINGS = (dict, OrderedDict)


class UncopiedError(Exception):
    """The state holds what can't be copied."""


class Snapshot:
    """A state, without a copy of what only the optimizers change.

    Attributes:
        state: The same keys and values, in dictionaries and lists of its own.
        size: Bytes of its tensors, as far as this rank has them.
        copied_size: Of those, bytes of the tensors that :meth:`copy` copies.
    """

    def __init__(self, state: dict[str, Any], addresses: Sequence[int]) -> None:
        """Finds what is to be copied; copies all but tensors.

        Args:
            state: Dictionaries and lists of anything.
            addresses: Where the tensors begin that only the optimizers change, as this rank has them. A state dict's
                are other objects, which begin at the same places.

        Raises:
            UncopiedError: An object can't be copied.
        """
        self._memo: dict[int, Any] = {}
        #: Where each tensor stands, in what was made.
        self._places: list[tuple[Any, Any]] = []
        tensors: list[torch.Tensor] = []
        self.state: dict[str, Any] = self._of(state, tensors)
        # Training waits for this: what is asked of all is asked at once.
        here = [getattr(each, "_local_tensor", each) for each in tensors]
        sizes, live = list(map(attrgetter("nbytes"), here)), set(addresses)
        try:
            begins: list[int | None] = list(map(torch.Tensor.data_ptr, here))
        except RuntimeError:
            begins = list(map(_begin_of, here))
        others = [number for number, begin in enumerate(begins) if begin not in live]
        self.size, self.copied_size = sum(sizes), sum(sizes[number] for number in others)
        self._others = [(*self._places[number], tensors[number]) for number in others]

    def copy(self) -> None:
        """Copies the tensors that others than the optimizers may change."""
        for holder, key, tensor in self._others:
            holder[key] = tensor.detach().clone()
        self._others.clear()

    def _of(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind not in _MAPPINGS and kind is not list:
            return self._copied(value)
        made, items = (list(value), enumerate(value)) if kind is list else (kind(value), value.items())
        for key, each in items:
            if type(each) in _PLAIN:
                # It is in what was made already.
                continue
            if isinstance(each, torch.Tensor):
                self._places.append((made, key))
                tensors.append(each)
            else:
                made[key] = self._of(each, tensors)
        return made

    def _copied(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            kind = type(value)
            raise UncopiedError(f"a {kind.__module__}.{kind.__qualname__} can't be copied: {error}") from error


def _begin_of(tensor: torch.Tensor) -> int | None:
    """Where its memory begins; None of one that has none of its own."""
    return tensor.data_ptr() if tensor.layout == torch.strided else None
