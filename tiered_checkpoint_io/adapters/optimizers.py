"""Optimizers' states put into sharded models, and the tensors of models and optimizers."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies import model_parallel
from torch.distributed.checkpoint import state_dict as sharded_state
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, StateDictType

from tiered_checkpoint_io.errors import RestoreError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_COMPILED = "_orig_mod."
_OTHERS = "configure the optimizers as in the run that saved it, or load its weights and fit without ckpt_path"


def optimizer_state(
    module: torch.nn.Module, optimizer: Optimizer, full: Callable[[Optimizer], dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Returns an optimizer's state by names, or the result of ``full`` on it; the optimizer stays as it is.

    Torch has an optimizer without a state make a step, after which the first step of training is another.
    """
    if _is_fsdp1(module):
        # Neither FSDP's own nor Lightning's does that; and a rank may hold no part of an optimizer's parameters.
        return in_order(module, optimizer, full(optimizer)) if full else _fsdp1_state(module, optimizer)
    has_begun = bool(optimizer.state)
    if full is None:
        state: dict[str, Any] = sharded_state.get_optimizer_state_dict(module, optimizer)
    else:
        state = in_order(module, optimizer, full(optimizer))
    if not has_begun:
        optimizer.state.clear()
        state.update({"state": {}} if state else {})
    return state


def set_optimizer_state(
    module: torch.nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    unchanged: Collection[str],
    options: sharded_state.StateDictOptions | None = None,
) -> None:
    """Sets an optimizer's state, by names, as torch's ``set_optimizer_state_dict`` does.

    torch's function needs a name for each parameter, and puts the saved values of a group without parameters into
    another group. ``unchanged`` names the parameters without a state: the optimizer had not changed them yet.
    """
    if _is_fsdp1(module):
        _set_fsdp1(module, optimizer, state)
        return
    groups, saved = optimizer.param_groups, state["param_groups"]
    given: dict[str, Any] = {
        "state": {**state["state"], **{name: {} for name in unchanged}},
        "param_groups": [each for each in saved if each["params"]],
    }
    optimizer.param_groups = [each for each in groups if each["params"]]
    try:
        sharded_state.set_optimizer_state_dict(module, optimizer, given, options=options)
    finally:
        loaded = iter(optimizer.param_groups)
        optimizer.param_groups = [next(loaded) if each["params"] else each for each in groups]
    empty = (each for each in saved if not each["params"])
    for group in optimizer.param_groups:
        if not group["params"]:
            group.update({**next(empty, {}), "params": group["params"]})
    # A new optimizer has no entry for a parameter.
    for parameter in [each for each, of_it in optimizer.state.items() if not of_it]:
        del optimizer.state[parameter]


def _set_fsdp1(module: torch.nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    # torch's function finds no state for an FSDP module that another one wraps, such as for activation checkpointing.
    groups = _fsdp1_groups(module, optimizer)
    names = {_plain(name): name for group in groups for name in group["params"]}
    saved = {names[name]: group for group in state["param_groups"] for name in group["params"] if name in names}
    empty = (group for group in state["param_groups"] if not group["params"])
    for group in groups:
        of_it = (saved[name] for name in group["params"] if name in saved)
        group.update({**next(of_it if group["params"] else empty, {}), "params": group["params"]})
    given = {names[name]: of_it for name, of_it in state["state"].items() if name in names}
    with _fsdp1_shards(module):
        loaded = FullyShardedDataParallel.optim_state_dict_to_load(
            module, optimizer, {"state": given, "param_groups": groups}
        )
    optimizer.load_state_dict(loaded)


def in_order(module: torch.nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Puts the numbers of each group of a full state in the order of its parameters; Lightning sorts them."""
    numbers = {parameter: number for number, parameter in enumerate(module.parameters())}
    for group, own in zip(state.get("param_groups", ()), optimizer.param_groups, strict=False):
        ordered = [numbers[each] for each in own["params"] if each in numbers]
        if sorted(ordered) == group["params"]:
            group["params"] = ordered
    return state


def _fsdp1_state(module: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    with _fsdp1_shards(module):
        state: dict[str, Any] = FullyShardedDataParallel.optim_state_dict(module, optimizer)
    named = {_plain(name): each for name, each in state["state"].items()}
    return {"state": named, "param_groups": list(map(_plainly_named, state["param_groups"]))}


def _fsdp1_groups(module: torch.nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns an optimizer's groups, with FSDP's names of their parameters; no state is gathered."""
    with _fsdp1_shards(module):
        groups: list[dict[str, Any]] = FullyShardedDataParallel.optim_state_dict(
            module, optimizer, {**optimizer.state_dict(), "state": {}}
        )["param_groups"]
    return groups


@contextlib.contextmanager
def _fsdp1_shards(module: torch.nn.Module) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            yield


def by_name(module: torch.nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state by the names of its parameters, if it is by their numbers.

    An optimizer numbers the parameters of its groups, one group after the other; Lightning would take the numbers for
    the numbers of the model's parameters.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if not all(isinstance(each, int) for each in numbers):
        return dict(state)
    if any(isinstance(each, FlatParameter) for group in optimizer.param_groups for each in group["params"]):
        # FSDP1's flat parameters begin with the outermost module's, which has another number.
        raise RestoreError(
            "the checkpoint's optimizer states are by numbers, and FSDP with use_orig_params=False counts otherwise",
            operation="load",
            hint="give FSDPStrategy use_orig_params=True, which is its default, or fit without ckpt_path",
        )
    own = _groups(module, optimizer)
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (groups, own))
    if sizes != own_sizes:
        raise RestoreError(
            f"the optimizer has groups of {own_sizes} parameters, the checkpoint's of {sizes}",
            operation="load",
            hint=_OTHERS,
        )
    names = dict(zip(numbers, (name for group in own for name in group["params"]), strict=True))
    return {
        "state": {names[number]: each for number, each in state["state"].items()},
        "param_groups": [{**group, "params": [names[each] for each in group["params"]]} for group in groups],
    }


def take_full(module: torch.nn.Module, optimizers: Sequence[Optimizer], state: dict[str, Any], *, strict: bool) -> None:
    """Puts a full checkpoint, whose optimizer states are by names, into sharded model and optimizers.

    Lightning's own way fails for an optimizer that has no state, such as plain SGD, and for wrapped modules.
    """
    states = state.get("optimizer_states", ()) if optimizers else ()
    if len(states) != len(optimizers):
        raise RestoreError(
            f"the run has {len(optimizers)} optimizers, the checkpoint the states of {len(states)}",
            operation="load",
            hint=_OTHERS,
        )
    options = sharded_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    devices = {each.device for each in chain(module.parameters(), module.buffers()) if each.dim()}
    is_fsdp1 = _is_fsdp1(module)
    if is_fsdp1 or len(devices) > 1:
        # torch's function takes only one device, and DTensors.
        world_size = dist.get_world_size()
        model_parallel._load_raw_module_state(state.pop("state_dict"), module, world_size, strict=strict)
    else:
        # All ranks have read the state, and torch changes only rank 0's names to the names in compiled layers.
        read = state.pop("state_dict")
        sharded_state.set_model_state_dict(module, read if dist.get_rank() == 0 else {}, options=options)
    for optimizer, each in zip(optimizers, states, strict=True):
        if is_fsdp1:
            _set_fsdp1(module, optimizer, each)
            continue
        names = [name for group in _groups(module, optimizer) for name in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unchanged = {name: of_it for name, of_it in zip(names, parameters, strict=True) if name not in each["state"]}
        # torch can't find the device in a state without tensors.
        is_empty = not each["state"]
        set_optimizer_state(module, optimizer, each, () if is_empty else unchanged, None if is_empty else options)
        for parameter in unchanged.values():
            # torch has made one.
            optimizer.state.pop(parameter, None)


def _groups(module: torch.nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    if _is_fsdp1(module):
        return list(map(_plainly_named, _fsdp1_groups(module, optimizer)))
    groups: Any = sharded_state.get_optimizer_state_dict(module, optimizer)["param_groups"]
    return list(groups)


def _plainly_named(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one of FSDP1's groups with the names of a checkpoint, without torch.compile's additions."""
    return {**group, "params": [_plain(name) for name in group["params"]]}


def _plain(name: str) -> str:
    return name.replace(_COMPILED, "")


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return bool(FullyShardedDataParallel.fsdp_modules(module))


def size_here(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Returns the size of a checkpoint of these in bytes, as far as this process holds them."""
    storages: dict[int, int] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers(), tensors_of_optimizers(optimizers)):
        # Some are not initialised yet, or have no storage.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes() if storage.device.type != "meta" else 0
    return sum(storages.values())


def tensors_of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Returns the optimizers' trained parameters, and the tensors of their states."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    found: list[Any] = [each for group in groups for each in group["params"] if each.requires_grad]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            found += state.values() if isinstance(state, dict) else ()
    # Asked at each overlapped save. Most optimizers hold only such values.
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, found))):
        return found
    # LBFGS has lists.
    flat = itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in found)
    return [each for each in flat if isinstance(each, torch.Tensor)]
