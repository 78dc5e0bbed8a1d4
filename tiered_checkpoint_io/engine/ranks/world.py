"""Rank of this process, as torch.distributed knows it now."""

from __future__ import annotations

import os
import sys
from typing import Any

#: Variables of launchers without LOCAL_RANK: a process's rank, and its rank within its node.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
)


def current_rank() -> int:
    """Returns this process's rank; 0 without torch.distributed."""
    group = _initialized()
    return 0 if group is None else int(group.get_rank())


def current_world_size() -> int:
    """Returns the number of ranks; 1 without torch.distributed."""
    group = _initialized()
    return 1 if group is None else int(group.get_world_size())


def leads_node() -> bool:
    """Returns True for the first rank of a node, as its launcher says; without a launcher, only for rank 0."""
    said = os.environ.get("LOCAL_RANK")
    if said is not None:
        return said == "0"
    rank = current_rank()
    # A task's own child processes have its variables, but other ranks.
    names = [local for of_all, local in _LAUNCHERS if os.environ.get(of_all) == str(rank)]
    return rank == 0 or any(os.environ.get(local) == "0" for local in names)


def may_lead_node() -> bool:
    """Returns :func:`leads_node`, or True if no launcher says which ranks are on this node."""
    rank = str(current_rank())
    told = "LOCAL_RANK" in os.environ or any(os.environ.get(of_all) == rank for of_all, _ in _LAUNCHERS)
    return leads_node() or not told


def _initialized() -> Any:
    # Asked several times at each save. A process that has not imported it has no ranks.
    found: Any = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None
