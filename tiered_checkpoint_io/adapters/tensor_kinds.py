"""Refuses, at the save, kinds of tensors that could not be loaded from a sharded checkpoint."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.masked import MaskedTensor

from tiered_checkpoint_io.adapters.structure import Structure
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.torch_file import plan

_ORDINARY = (torch.Tensor, torch.nn.Parameter)
#: Upstream's memory, on the coordinator, of the plans that the ranks have.
_SENT = ("_cached_all_plans", "_cached_global_plan", "_cached_metadata")
_ELSEWHERE = "save it as other tensors that hold the same; local and full checkpoints hold whatever torch.save can save"


class KindsCheck:
    """Looks at the tensors of one save."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._known: set[type] = set()

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ConfigError for a tensor that could not be loaded; names the tensor and the remedy."""
        kind = _lost(tensor)
        if kind is not None:
            raise _refusal(name, kind, "can't come back from a sharded checkpoint", _ELSEWHERE)
        if type(tensor) in _ORDINARY or type(tensor) in self._known or self._trust.is_full:
            return
        try:
            lacking = self._trust.lacking_in(plan(tensor.detach()))
        except Exception as error:
            raise _refusal(name, _kind_of(tensor), f"can't be saved: {error}", _ELSEWHERE) from error
        if lacking:
            raise _refusal(
                name, _kind_of(tensor), "the configuration would refuse to load", self._trust.advice(lacking)
            )
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
