"""Whether tensors are what others were in all but their storages and bytes: asked of many of them in one call.

The guards of torch's compiler tell, which compare thousands of tensors in the time in which Python asks a tensor three
questions. They are no public part of torch, so they are tried before they are trusted; without them, Python asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Alike:
    """Of some tensors: types, layouts, dtypes, devices, shapes, strides and ``requires_grad``; none of the tensors."""

    def __init__(self, guards: Any) -> None:
        self._guards = guards

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many other tensors have the same, in the same order."""
        return bool(self._guards.check(*tensors))


def alike(tensors: Sequence[torch.Tensor]) -> Alike | None:
    """What tells later tensors from these; None where this release of torch has nothing that does."""
    kind = _trusted()
    return Alike(_made(kind, tensors)) if kind is not None and tensors else None


def _made(kind: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    shapes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    return kind(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


@functools.lru_cache(1)
def _trusted() -> Callable[..., Any] | None:
    """The guards' class, if it tells apart what it has to."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        kind: Callable[..., Any] = TensorGuards
        with torch.device("cpu"):
            return kind if _tells_apart(kind) else None
    except Exception:
        # Whatever another release of torch makes of it.
        return None


def _tells_apart(kind: Callable[..., Any]) -> bool:
    plain = torch.zeros(2, 3)
    complex_one = torch.zeros(2, 3, dtype=torch.complex64)
    others = [
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(3, 2).t(),
        torch.zeros(1, 2, 3),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
        torch._neg_view(plain),
    ]
    with torch.enable_grad():
        guards = _made(kind, [plain, complex_one])
        return (
            guards.check(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.complex64))
            and not guards.check(plain, complex_one.conj())
            and not any(guards.check(other, complex_one) for other in others)
        )
