"""Room for a load that node memory cannot take: the spill, or a private temporary folder."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from pathlib import Path

from tiered_checkpoint_io.errors import MemoryTierError, RestoreError
from tiered_checkpoint_io.memory.node import private_folder
from tiered_checkpoint_io.memory.tier import MemoryTier

#: Folder of slots, as in a memory tier: files that a living process has locked.
SLOTS = "slots"


def aside_root(memory: MemoryTier, size: int = 0) -> Path:
    """Returns the root of room for a load, with a folder of slots in it.

    Args:
        memory: The node's memory.
        size: Bytes for which the spill must have room, if known; without it, all ranks of a node get the same place.

    Raises:
        RestoreError: The root is not safe to use.
    """
    spill = memory.open_spill()
    if spill is not None and (not size or spill.room() >= size):
        return spill.root
    # The folder may be a file server's: other nodes see neither our locks nor, at once, our writes to a mapping.
    node = hashlib.sha256(f"{socket.gethostname()}\0{memory.root}".encode()).hexdigest()[:16]
    root = Path(tempfile.gettempdir(), f"tiered-reads-{os.getuid()}-{node}")
    try:
        private_folder(root)
        private_folder(root / SLOTS)
    except MemoryTierError as error:
        if error.reason != "unsafe":
            raise
        hint = "remove it, or set TMPDIR to another folder"
        text = error.message.replace("the memory tier's folder", "the folder for what is read")
        raise RestoreError(text, operation="restore", key=str(error.key), hint=hint) from error
    return root
