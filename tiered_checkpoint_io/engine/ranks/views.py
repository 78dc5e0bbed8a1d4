"""Bytes of a view as torch takes them, without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def address_of(view: bytearray | memoryview) -> int:
    """Where the bytes of a view lie, read-only ones as well."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def at(view: bytearray | memoryview, offset: int, length: int) -> ctypes.Array[ctypes.c_char]:
    """Bytes of a view as an object that torch maps without a copy, and without asking whether it may write."""
    return (ctypes.c_char * length).from_address(address_of(view) + offset)


def tensor_of(view: bytearray | memoryview) -> torch.Tensor:
    """All bytes of a view; the tensor does not keep them alive."""
    import torch

    return torch.frombuffer(at(view, 0, len(view)), dtype=torch.uint8)
