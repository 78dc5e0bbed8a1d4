"""A sharded state as it is now: the part that an overlapped capture leaves live, and the part that is copied at once.

DCP looks into mappings and lists, and pickles all else when it writes, which is later. So everything that training may
change in place by then is copied: each tensor that not only the optimizers hold, and each object that is not known to
be immutable.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from tiered_checkpoint_io.engine.save.spans import WHOLE, Integers, ends_of, parts_here

_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_MAPPINGS = (dict, OrderedDict)


class UncopiedError(Exception):
    """The state holds an object that can't be copied."""


class Snapshot:
    """A state, without copies of the tensors that only the optimizers change.

    Attributes:
        state: The same keys and values, in dictionaries and lists of its own.
        size: Bytes of its tensors, as far as this rank has them.
        copied_size: Bytes of the tensors that :meth:`copy` copies.
    """

    def __init__(
        self, state: dict[str, Any], find_others: Callable[[Sequence[torch.Tensor], Integers, Integers], list[int]]
    ) -> None:
        """Finds the tensors to copy; copies all other objects.

        Args:
            state: Dictionaries and lists of anything.
            find_others: Finds the tensors to copy; see :meth:`Overlapped.find_others`.

        Raises:
            UncopiedError: An object can't be copied.
        """
        self._memo: dict[int, Any] = {}
        #: Place of each tensor in the copied state.
        self._places: list[tuple[Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self.state: dict[str, Any] = self._of(state)
        # Training waits for this: one question about all tensors is asked at once.
        here = parts_here(self._tensors)
        try:
            begins = np.array(list(map(torch.Tensor.data_ptr, here)), np.int64)
        except RuntimeError:
            # Some have no memory of their own.
            own = [each.data_ptr() if each.layout == torch.strided else 0 for each in here]
            begins = np.array(own, np.int64)
        ends, sizes, _ = ends_of(here, begins)
        self._others = find_others(here, begins, ends)
        self.size, self.copied_size = int(sizes.sum()), int(sizes[self._others].sum())

    def copy(self, kept: Sequence[torch.Tensor]) -> None:
        """Copies the tensors that not only the optimizers may change; the others stay as they are.

        Raises:
            UncopiedError: As :func:`own_objects`.
        """
        for number, own in own_objects(self._tensors, kept).items():
            holder, key = self._places[number]
            holder[key] = own
        for number in self._others:
            holder, key = self._places[number]
            holder[key] = self._tensors[number].detach().clone()

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind not in _MAPPINGS and kind is not list:
            try:
                return copy.deepcopy(value, self._memo)
            except Exception as error:
                raise UncopiedError(f"a {kind.__module__}.{kind.__qualname__} can't be copied: {error}") from error
        made, items = (list(value), enumerate(value)) if kind is list else (kind(value), value.items())
        for key, each in items:
            if type(each) in _PLAIN:
                # The new container has it already.
                continue
            if isinstance(each, torch.Tensor):
                self._places.append((made, key))
                self._tensors.append(each)
            else:
                made[key] = self._of(each)
        return made


def own_objects(tensors: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Makes tensors over the same memory, by their numbers, because a holder of the first ones may replace it.

    Args:
        tensors: Tensors of a state.
        kept: Tensors that are looked at after the copy, and stay as they are. So do sharded ones.

    Raises:
        UncopiedError: A tensor has attributes, or hooks.
    """
    same = set(map(id, kept))
    numbers = [number for number, each in enumerate(tensors) if id(each) not in same and type(each) in WHOLE]
    some = [tensors[number] for number in numbers]
    if any(map(attrgetter("__dict__"), some)) or any(map(attrgetter("_backward_hooks"), some)):
        raise UncopiedError("a tensor has attributes or hooks, which may change")
    own = dict(zip(numbers, map(torch.Tensor.detach, some), strict=True))
    for number, each in zip(numbers, some, strict=True):
        if each.requires_grad:
            own[number].requires_grad_()
    return own
