"""The structure of a state that is saved again and again, so that its plan is not made at each save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

_MAPPINGS = (dict, OrderedDict)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class UnknownStructureError(Exception):
    """The state holds values that DCP may plan by more facts than are looked at here."""


class _Container:
    """A mapping or list of a state: its keys, and which of its values are containers in turn."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)
        self.keys = _keys(value)
        children = [_Container(each) if _is_container(each) else None for each in _values(value)]
        #: None if all values are leaves.
        self.children = children if any(children) else None

    def collect(self, value: Any, leaves: list[Any]) -> bool:
        """Adds the leaves of another container, in DCP's order; returns whether all their keys are the same."""
        if type(value) is not self.kind or _keys(value) != self.keys:
            return False
        values = _values(value)
        if self.children is None:
            leaves.extend(values)
            return True
        for child, each in zip(self.children, values, strict=True):
            if child is None:
                leaves.append(each)
            elif not child.collect(each, leaves):
                return False
        return True


class Structure:
    """A state's keys, the types of its values, and all of its tensors but their storages and bytes."""

    def __init__(self, state: Any, flat: Mapping[str, Any], mappings: Any, plan: SavePlan) -> None:
        """Takes a state, and DCP's plan of it.

        Args:
            state: The state.
            flat: The flattened state.
            mappings: The path of each key.
            plan: Plan of this rank's save of the state.

        Raises:
            UnknownStructureError: A state of the same structure may have another plan.
        """
        self.mappings = mappings
        self.plan = plan
        #: Layout that the writer keeps for it.
        self.layout: Any = None
        self._top = _Container(state)
        leaves: list[Any] = []
        self._top.collect(state, leaves)
        same = [*map(id, leaves)] == [*map(id, flat.values())] and list(flat) == list(mappings)
        self._facts = _facts_of(leaves)
        if not same or self._facts is None or not all(map(_is_known, leaves)):
            raise UnknownStructureError
        self._kinds = list(map(type, leaves))
        self._specs = [leaf._spec for leaf in leaves if type(leaf) is DTensor]

    def flat(self, state: Any) -> dict[str, Any] | None:
        """Returns the state as DCP flattens it; None if its structure is another one."""
        leaves: list[Any] = []
        if not self._top.collect(state, leaves) or list(map(type, leaves)) != self._kinds:
            return None
        specs = [leaf._spec for leaf in leaves if type(leaf) is DTensor]
        lists = [leaf for leaf in leaves if type(leaf) is list]
        if specs != self._specs or any(map(_is_container, lists)) or _facts_of(leaves) != self._facts:
            return None
        return dict(zip(self.mappings, leaves, strict=True))


def local_of(value: Any) -> Any:
    """Returns a rank's own part of a tensor."""
    return value._local_tensor if type(value) is DTensor else value


def _facts_of(leaves: Sequence[Any]) -> list[tuple[Any, ...]] | None:
    """Returns all of the tensors but their storages and bytes; None if there are none, or one has no strides."""

    def facts(tensor: torch.Tensor) -> tuple[Any, ...]:
        kind = type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
        return *kind, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()

    try:
        return [facts(local_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)] or None
    except (RuntimeError, NotImplementedError):
        return None


def _is_container(value: object) -> bool:
    """Returns whether DCP looks into a value."""
    if isinstance(value, list):
        return any(isinstance(each, torch.Tensor) or _is_container(each) for each in value)
    return isinstance(value, Mapping)


def _is_known(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return type(local_of(leaf)) in _TENSORS
    return not hasattr(leaf, "__create_write_items__")


def _keys(value: Any) -> Any:
    if type(value) is list:
        return len(value)
    if type(value) not in _MAPPINGS:
        raise UnknownStructureError
    # 1 and True are equal, and have different names.
    return tuple(value), tuple(map(type, value))


def _values(value: Any) -> Sequence[Any]:
    return value if type(value) is list else list(value.values())
