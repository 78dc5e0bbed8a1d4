"""Planners of sharded saves: they keep the plan of a state that is saved again and again, and check its tensors.

A kind of tensor that could not be loaded from a sharded checkpoint is refused at the save.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.tensor import DTensor
from torch.masked import MaskedTensor

from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

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
        """Takes a state, and DCP's plan of it; raises if a state of the same structure may have another plan."""
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


#: Upstream's memory, on the coordinator, of the plans that the ranks have.
_SENT = ("_cached_all_plans", "_cached_global_plan", "_cached_metadata")
_ELSEWHERE = "save it as other tensors that hold the same; local and full checkpoints hold whatever torch.save can save"


class KindsCheck:
    """Looks at the tensors of one save."""

    def __init__(self, config: TieredCheckpointConfig) -> None:
        self._config = config
        self._known: set[type] = set()

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ConfigError for a tensor that could not be loaded; names the tensor and the remedy."""
        kind = _lost(tensor)
        if kind is not None:
            raise _refusal(name, kind, "can't come back from a sharded checkpoint", _ELSEWHERE)
        if type(tensor) in _TENSORS or type(tensor) in self._known:
            return
        trust = Trust.of(self._config)
        try:
            lacking = [] if trust.is_full else trust.lacking_in(plan(tensor.detach()))
        except Exception as error:
            raise _refusal(name, _kind_of(tensor), f"can't be saved: {error}", _ELSEWHERE) from error
        if lacking:
            raise _refusal(name, _kind_of(tensor), "the configuration would refuse to load", trust.advice(lacking))
        self._known.add(type(tensor))


class CheckingSavePlanner(DefaultSavePlanner):
    """Plans as DCP's own planner; an error names its tensor.

    With ``enable_plan_caching``, a state of the same structure is not planned again from the third save on.
    """

    #: Structures by upstream's key of the plan.
    _structures: ClassVar[dict[str, Structure]] = {}
    #: On the coordinator, upstream's memory before a plan that the ranks may not have got, by the same key.
    _before: ClassVar[dict[str, dict[str, Any]]] = {}

    #: The structure of the state that is saved, if it is known.
    structure: Structure | None = None
    _given: Any = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Does upstream's set-up, or takes the known structure."""
        known = self._structures.get(self._cached_plans_key) if self._enable_plan_caching else None
        if known is not None and known.plan is not SavePlanner._cached_save_plan.get(self._cached_plans_key):
            known = None
        flat = known.flat(state_dict) if known is not None else None
        if known is None or flat is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.structure, self._given = None, state_dict
            return
        self.structure, self._given = known, None
        self.state_dict, self.mappings, self.is_coordinator = flat, known.mappings, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plans as upstream; raises ConfigError for a tensor of a kind that DCP can't plan."""
        if self.structure is not None:
            self.plan = self.structure.plan
            return SavePlan([], usable=False)
        planned = self._create_local_plan()
        given, self._given = self._given, None
        if planned.usable:
            return planned
        kept = SavePlanner._cached_save_plan[self._cached_plans_key]
        if self.plan != kept:
            # Upstream compares only names and shapes, and would write the earlier dtypes and nesting to `.metadata`.
            self._pending_local_plan = self.plan
            return self.plan
        # A structure that is not understood is not kept.
        self._structures.pop(self._cached_plans_key, None)
        with contextlib.suppress(Exception):
            structure = Structure(given, self.state_dict, self.mappings, kept)
            self._structures[self._cached_plans_key] = structure
        return planned

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plans as upstream, which keeps this plan; drops a kept plan that the ranks never got, as the save failed."""
        if self._enable_plan_caching:
            key = self._cached_plans_key
            for name, value in self._before.pop(key, {}).items():
                kept = getattr(SavePlanner, name)
                kept.pop(key, None)
                kept.update({key: value} if value is not None else {})
            self._before[key] = {name: getattr(SavePlanner, name).get(key) for name in _SENT}
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Finishes as upstream; on the coordinator, all ranks have got the plan by now."""
        self._before.pop(self._cached_plans_key, None)
        return super().finish_plan(new_plan)

    def _create_local_plan(self) -> SavePlan:
        try:
            planned = super().create_local_plan()
            # The coordinator asks this of each tensor, and its error would not say which.
            _size_of(planned)
        except Exception:
            for name, value in self.state_dict.items():
                try:
                    if isinstance(value, torch.Tensor):
                        _size_of(create_default_local_save_plan({name: value}, is_coordinator=True))
                except Exception as error:
                    kind = _lost(value) or _kind_of(value)
                    raise _refusal(name, kind, f"can't be saved by DCP: {error}", _ELSEWHERE) from error
            raise
        return planned


def _size_of(plan: SavePlan) -> int:
    return sum(item.tensor_storage_size() or 1 for item in plan.items)


def _refusal(name: str, kind: str, why: str, hint: str) -> ConfigError:
    return ConfigError(f"{name!r} is {kind}, which {why}", operation="save", key=name, hint=hint)


def _lost(tensor: torch.Tensor) -> str | None:
    """Names a tensor that a sharded checkpoint would lose; None for all others."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if isinstance(tensor, MaskedTensor):
        return "a masked tensor"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, without data"
    return None


def _kind_of(tensor: Any) -> str:
    kind = type(tensor)
    return f"a {kind.__module__}.{kind.__qualname__} of {tensor.dtype}"
