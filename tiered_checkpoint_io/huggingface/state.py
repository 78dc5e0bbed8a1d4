"""What the Trainer and Accelerate have in common: what is refused, random states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather_object
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.errors import UsageError

#: Where every process has the whole state.
_WHOLE = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def refuse_sharded(kind: DistributedType, models: Iterable[torch.nn.Module], what: str) -> None:
    """Refuses a training in which no process has the whole state.

    Args:
        kind: How it was launched.
        models: What is trained, wrapped or not.
        what: Who refuses.

    Raises:
        UsageError: It is one of FSDP, DeepSpeed, XLA and the like; or of tensor parallelism or FSDP2, which the launch
            does not show.
    """
    sharding = "" if kind in _WHOLE else kind.value
    if not sharding and any(_is_sharded(each) for each in models):
        sharding = "a model whose parameters are sharded (tensor parallelism, FSDP2)"
    if sharding:
        raise UsageError(
            f"{what} with {sharding}: it saves full checkpoints, which one process with the whole state writes",
            operation="setup",
            hint="use DDP or one device; or save the sharded state by tiered_checkpoint_io.dcp (docs/sharded.md)",
        )


def _is_sharded(model: torch.nn.Module) -> bool:
    # Some releases of transformers keep the shards of tensor parallelism as plain tensors, and note it at the model.
    return any(isinstance(each, DTensor) for each in model.parameters()) or any(
        (getattr(each, "_tp_size", None) or 1) > 1 for each in model.modules()
    )


def on_rank_0(engine: Checkpointer, work: Callable[[], object]) -> None:
    """Does work on rank 0, as training begins; its error is raised on all ranks, all of which call this.

    So is that of a rank that can't open its memory tier.
    """
    session, timeout_s = engine.session, float(engine.config.support.wait_timeout_s)
    with coordination.ready_together(
        lambda: session.open().tier.root, session.clock, timeout_s=timeout_s, what="Trainer.train"
    ) as group:
        if group.rank == 0:
            work()


def random_states() -> list[dict[str, Any]]:
    """Each rank's :func:`random_state`, by rank; every rank calls this."""
    gathered: list[dict[str, Any]] = gather_object([random_state()])
    return gathered


def random_state() -> dict[str, Any]:
    """The random state of this rank, as plain data and tensors."""
    kind, keys, position, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002 - what is used
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        is_alone = PartialState().distributed_type == DistributedType.NO
        state["cuda"] = torch.cuda.get_rng_state() if is_alone else torch.cuda.get_rng_state_all()
    return state


def as_taken(state: Mapping[str, Any]) -> dict[str, Any]:
    """A :func:`random_state` with NumPy's as NumPy takes it."""
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": (kind, keys.numpy().astype(np.uint32), *rest)}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back a :func:`random_state`; of GPUs that this node does not have, nothing."""
    taken = as_taken(state)
    random.setstate(taken["python"])
    np.random.set_state(taken["numpy"])  # noqa: NPY002
    torch.set_rng_state(taken["cpu"])
    if "cuda" in taken and torch.cuda.is_available():
        if isinstance(taken["cuda"], list):
            for device, each in enumerate(taken["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(each, device)
        else:
            torch.cuda.set_rng_state(taken["cuda"])
