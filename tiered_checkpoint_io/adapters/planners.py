"""DCP's planner for saves, which plans once what stays the same from save to save."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tiered_checkpoint_io.adapters.groups import world
from tiered_checkpoint_io.engine.ranks.local_run import current_run

#: Earlier releases keep a rank's plan also where the save then fails, and lose its items from the next one.
_KEEPS_WHAT_SUCCEEDED = "_pending_local_plan" in DefaultSavePlanner.finish_plan.__code__.co_names


def save_planner(what: str, process_group: Any = None, *, alone: bool = False) -> DefaultSavePlanner:
    """A planner that keeps its plans, apart from those of other jobs and groups of this process.

    What a rank keeps and what its coordinator keeps have to be of the same saves. Upstream tells them by
    the planner's class alone: two groups of ranks, or the same processes started anew as other ranks,
    would take each other's plans, and save less than there is.

    Args:
        what: Which saves belong together.
        process_group: The ranks that save; all by default.
        alone: Whether this process saves by itself.
    """
    if not _KEEPS_WHAT_SUCCEEDED:
        return DefaultSavePlanner()
    planner = DefaultSavePlanner(enable_plan_caching=True)
    together = "alone"
    if not alone and world() is not None:
        together = ",".join(map(str, dist.get_process_group_ranks(process_group or world())))
    planner._cached_plans_key = f"tiered/{current_run().number}/{what}/{together}"
    return planner
