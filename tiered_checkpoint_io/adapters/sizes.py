"""How large a checkpoint of a training will be, by what its model and optimizers hold."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

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


def tensors_of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Their parameters that are trained, and the tensors of their states."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (each for each in group["params"] if each.requires_grad and each.layout == torch.strided)
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else []
            for value in values:
                if isinstance(value, torch.Tensor):
                    if value.layout == torch.strided:
                        yield value
                elif isinstance(value, list):
                    # LBFGS has them.
                    yield from (
                        each for each in value if isinstance(each, torch.Tensor) and each.layout == torch.strided
                    )
