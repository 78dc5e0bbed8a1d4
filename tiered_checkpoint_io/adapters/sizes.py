"""How large a checkpoint of a training will be, by what its model and optimizers hold."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch


def size_here(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Bytes of a checkpoint of these, as far as this process holds them."""
    storages: dict[int, int] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers(), tensors_of_optimizers(optimizers)):
        # Some are not initialised yet, or have no storage.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes() if storage.device.type != "meta" else 0
    return sum(storages.values())


def tensors_of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Their parameters that are trained, and the tensors of their states."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    found: list[Any] = [each for group in groups for each in group["params"] if each.requires_grad]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            found += state.values() if isinstance(state, dict) else ()
    # Asked at each overlapped save. Most optimizers hold nothing else.
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, found))):
        return found
    # LBFGS has lists.
    flat = itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in found)
    return [each for each in flat if isinstance(each, torch.Tensor)]
