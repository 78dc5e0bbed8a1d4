"""Which rank this process is, as torch.distributed knows it now."""

from __future__ import annotations

import sys
from typing import Any


def current_rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    group = _initialized()
    return 0 if group is None else int(group.get_rank())


def current_world_size() -> int:
    """The number of ranks; 1 without torch.distributed."""
    group = _initialized()
    return 1 if group is None else int(group.get_world_size())


def _initialized() -> Any:
    # Asked several times at each save. Who has not imported it has no ranks.
    found: Any = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None
