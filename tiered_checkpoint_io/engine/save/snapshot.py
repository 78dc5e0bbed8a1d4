"""A sharded state as it is now: what a capture that overlaps training leaves live, and what is copied at once.

DCP looks into mappings and lists, and pickles all else where it writes it, which is later. So whatever training may
change in place by then is copied: each tensor that is not the optimizers' alone, and each object that is not known to
stay as it is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
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

    def __init__(self, state: dict[str, Any], tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
        """Finds what is to be copied; copies all but tensors.

        Args:
            state: Dictionaries and lists of anything.
            tensors: What only the optimizers change, as this rank has it.
            addresses: Where these begin.

        Raises:
            UncopiedError: An object can't be copied.
        """
        self._live = set(map(id, tensors))
        # A state dict's tensors are new objects, which begin where the optimizers' do.
        self._addresses = set(addresses)
        self._others: list[tuple[Any, Any, torch.Tensor]] = []
        self._memo: dict[int, Any] = {}
        self.size = self.copied_size = 0
        self.state: dict[str, Any] = self._of(state)

    def copy(self) -> None:
        """Copies the tensors that others than the optimizers may change."""
        for holder, key, tensor in self._others:
            holder[key] = tensor.detach().clone()
        self._others.clear()

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind not in _MAPPINGS and kind is not list:
            return self._copied(value)
        made, items = (list(value), enumerate(value)) if kind is list else (kind(value), value.items())
        for key, each in items:
            if not isinstance(each, torch.Tensor):
                made[key] = self._of(each)
                continue
            # What this rank has of a DTensor.
            local = getattr(each, "_local_tensor", each)
            nbytes = local.nbytes
            self.size += nbytes
            if id(local) not in self._live and not self._is_live(local):
                self.copied_size += nbytes
                self._others.append((made, key, each))
        return made

    def _is_live(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.data_ptr() in self._addresses

    def _copied(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            kind = type(value)
            raise UncopiedError(f"a {kind.__module__}.{kind.__qualname__} can't be copied: {error}") from error
