"""Bytes of a view as torch takes them, without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from tiered_checkpoint_io.memory.slots import Mapped

if TYPE_CHECKING:
    import torch


def privately_mapped(descriptor: int, size: int) -> torch.UntypedStorage:
    """Returns a file's bytes as ``torch.load`` maps them: writes there never get into the file."""
    import torch

    if not size:
        # An empty file can't be mapped.
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    # Not by torch, which may map huge pages of the file as small ones.
    content = Mapped(descriptor, size, shared=False).content
    return torch.frombuffer(content, dtype=torch.uint8).untyped_storage()


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Returns all bytes of a storage on the CPU; the view does not keep them alive."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
