"""Bytes of a view as torch takes them, without a copy."""

from __future__ import annotations

import ctypes

import numpy as np


def address_of(view: memoryview) -> int:
    """Where the bytes of a view lie, read-only ones as well."""
    address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return address


def at(view: memoryview, offset: int, length: int) -> ctypes.Array[ctypes.c_char]:
    """Bytes of a view as an object that torch maps without a copy, and without asking whether it may write."""
    return (ctypes.c_char * length).from_address(address_of(view) + offset)
