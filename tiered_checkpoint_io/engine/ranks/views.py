"""Bytes of a view as torch takes them, without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from tiered_checkpoint_io.memory.slots import Mapped

if TYPE_CHECKING:
    import torch


def address_of(view: bytearray | memoryview) -> int:
    """Returns the address of a view's bytes, also of a read-only view."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


def at(view: bytearray | memoryview, offset: int, length: int) -> ctypes.Array[ctypes.c_char]:
    """Returns bytes of a view as an object that torch maps without a copy, and without asking whether it may write."""
    return (ctypes.c_char * length).from_address(address_of(view) + offset)


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
