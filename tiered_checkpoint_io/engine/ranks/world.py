"""Which rank this process is, as torch.distributed knows it now."""

from __future__ import annotations


def current_rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def current_world_size() -> int:
    """The number of ranks; 1 without torch.distributed."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
