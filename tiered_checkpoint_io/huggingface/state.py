"""What the Trainer and Accelerate have in common: what is refused, random states."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather_object

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.errors import UsageError

#: Where every process has the whole state.
_WHOLE = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def refuse_sharded(kind: DistributedType, what: str) -> None:
    """Refuses a launch in which no process has the whole state.

    Raises:
        UsageError: It is one of FSDP, DeepSpeed, XLA and the like.
    """
    if kind not in _WHOLE:
        raise UsageError(
            f"{what} with {kind.value}: it saves full checkpoints, which one process with the whole state writes",
            operation="setup",
            hint="use DDP or one device; or save the sharded state by tiered_checkpoint_io.dcp (docs/sharded.md)",
        )


def on_rank_0(engine: Checkpointer, work: Callable[[], object]) -> None:
    """Does work on rank 0; its error is raised on all ranks, all of which call this."""
    session, error = engine.session, None
    group = coordination.current_group(
        session.open().tier.root, session.clock, timeout_s=float(engine.config.wait_timeout_s)
    )
    try:
        with group.failing_together():
            if group.rank == 0:
                try:
                    work()
                except Exception as failed:
                    error = failed
            coordination.agree(group, error)
    finally:
        group.close()


def random_states() -> list[dict[str, Any]]:
    """The random states of all ranks, as plain data and tensors; every rank calls this."""
    kind, keys, position, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())  # noqa: NPY002 - what is used
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        is_alone = PartialState().distributed_type == DistributedType.NO
        state["cuda"] = torch.cuda.get_rng_state() if is_alone else torch.cuda.get_rng_state_all()
    gathered: list[dict[str, Any]] = gather_object([state])
    return gathered


def as_taken(state: Mapping[str, Any]) -> dict[str, Any]:
    """One of :func:`random_states` with NumPy's as NumPy takes it."""
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": (kind, keys.numpy().astype(np.uint32), *rest)}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Puts back the random state of this rank."""
    taken = as_taken(state)
    random.setstate(taken["python"])
    np.random.set_state(taken["numpy"])  # noqa: NPY002
    torch.set_rng_state(taken["cpu"])
    if "cuda" in taken and torch.cuda.is_available():
        cuda = taken["cuda"]
        torch.cuda.set_rng_state_all(cuda) if isinstance(cuda, list) else torch.cuda.set_rng_state(cuda)
