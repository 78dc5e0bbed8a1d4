"""States put into sharded models and optimizers, where torch's or Lightning's own way does not do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import model_parallel
from torch.distributed.checkpoint import state_dict as sharded_state

from tiered_checkpoint_io.errors import RestoreError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_OTHERS = "configure the optimizers as in the run that saved it, or load its weights and fit without ckpt_path"


def set_optimizer_state(
    module: torch.nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    unchanged: Collection[str],
    options: sharded_state.StateDictOptions | None = None,
) -> None:
    """As torch's ``set_optimizer_state_dict``, which has each parameter named, and each group hold some.

    It gives what was saved of a group without parameters to another one, and the next step fails.

    Args:
        module: The model, as the strategy has wrapped it.
        optimizer: One of its optimizers.
        state: The optimizer's, by names.
        unchanged: The parameters of which there is no state: the optimizer had not changed them yet.
        options: As torch takes them.
    """
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
    # An optimizer begins where there is nothing.
    for parameter in [each for each, of_it in optimizer.state.items() if not of_it]:
        del optimizer.state[parameter]


def by_name(module: torch.nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the names of its parameters, where it is by their numbers.

    An optimizer numbers the parameters of its groups, one group after the other. Lightning takes the numbers for those
    of the model's parameters: with groups, or with weights that are not trained, each would get the state of another.

    Raises:
        RestoreError: The optimizer's groups are of other sizes.
    """
    groups = state["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if not all(isinstance(each, int) for each in numbers):
        return dict(state)
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
    """Puts a full checkpoint into model and optimizers whose tensors are DTensors.

    Lightning's own way fails for an optimizer that has no state, such as plain SGD, and for wrapped modules.

    Args:
        module: The model, as the strategy has wrapped it.
        optimizers: Its optimizers; none, where it is not trained.
        state: The checkpoint, whose optimizer states are by names; the model's is taken out.
        strict: Whether the model has to hold what the checkpoint holds, and the reverse.

    Raises:
        RestoreError: It holds the states of other optimizers, or of none.
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
    if len(devices) > 1:
        # Torch's takes one alone.
        model_parallel._load_raw_module_state(state.pop("state_dict"), module, strict=strict)
    else:
        sharded_state.set_model_state_dict(module, state.pop("state_dict"), options=options)
    for optimizer, each in zip(optimizers, states, strict=True):
        names = [name for group in _groups(module, optimizer) for name in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        unchanged = {name: of_it for name, of_it in zip(names, parameters, strict=True) if name not in each["state"]}
        # Torch can't tell the device from a state without tensors.
        is_empty = not each["state"]
        set_optimizer_state(module, optimizer, each, () if is_empty else unchanged, None if is_empty else options)
        for parameter in unchanged.values():
            # Torch has made one.
            optimizer.state.pop(parameter, None)


def _groups(module: torch.nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """An optimizer's groups, with the names of their parameters."""
    groups: Any = sharded_state.get_optimizer_state_dict(module, optimizer)["param_groups"]
    return list(groups)
