"""Slots as pinned memory, and threads that use a GPU during training."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch

from tiered_checkpoint_io.formats.image import PINNED_PIECE

#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


class HostPins:
    """Registers slots as pinned memory, once each, so that a GPU copies into them at full speed.

    Attributes:
        device: GPU of the last call's context: a thread's own is that of the first GPU, in which most ranks have
            none, and would get one, of hundreds of megabytes.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self._lock = threading.Lock()
        #: Bytes and context of each piece, by its address.
        self._pinned: dict[int, tuple[int, int]] = {}

    def pin(self, view: memoryview) -> int:
        """Registers the whole pages of ``view``, a :data:`PINNED_PIECE` at a time, as far as they are not yet.

        Returns:
            Number of bytes, from the first on, that are registered. A refusal only costs speed.
        """
        return self._pin(view, len(view))[0]

    def pin_piece(self, view: memoryview) -> bool:
        """Registers one more piece; returns whether there is another."""
        done, made = self._pin(view, 1)
        return made > 0 and len(view) - done >= mmap.PAGESIZE

    def _pin(self, view: memoryview, most: int) -> tuple[int, int]:
        address, made = torch.frombuffer(view, dtype=torch.uint8).data_ptr(), 0
        whole = len(view) - len(view) % mmap.PAGESIZE
        with self._lock:
            self.device = torch.cuda.current_device()
            for start in range(0, whole, PINNED_PIECE):
                wanted = min(PINNED_PIECE, whole - start)
                before, _ = self._pinned.get(address + start, (0, 0))
                if before >= wanted:
                    continue
                if made == most:
                    return start, made
                if before:
                    self._end(address + start)
                if int(_runtime().cudaHostRegister(address + start, wanted, 0)) != 0:
                    # CUDA remembers the error for this thread, and torch would raise it after the next kernel that
                    # training launches here. torch has no cudaGetLastError; its own check of a kernel takes it as well.
                    with contextlib.suppress(RuntimeError):
                        torch.ones(1, device="cuda").neg_()
                    return start, 0
                self._pinned[address + start] = wanted, self.device
                made += 1
        return whole, made

    def unpin(self, view: memoryview, left: int = 0) -> None:
        """Ends the registration of the pages of a mapping of which only the first bytes keep theirs."""
        if not self._pinned:
            return
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        with self._lock:
            for start in range(0, len(view), PINNED_PIECE):
                nbytes, _ = self._pinned.get(address + start, (0, 0))
                if nbytes and start + nbytes > left:
                    self._end(address + start)

    def _end(self, address: int) -> None:
        _, device = self._pinned.pop(address)
        with torch.cuda.device(device):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return cast("Any", torch.cuda).cudart()


@contextlib.contextmanager
def beside_graphs() -> Iterator[bool]:
    """Lets this thread use a GPU while another one captures a CUDA graph; yields whether that is possible.

    By default, a capture forbids all threads of the process calls that might wait for it, such as to register memory or
    to wait for an event, and fails itself if one tries to.
    """
    mode, driver = ctypes.c_int(_RELAXED), None
    # There is no such library if torch's GPUs are not NVIDIA's.
    with contextlib.suppress(OSError, AttributeError):
        found = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        if found(ctypes.byref(mode)) == 0:
            driver = found
    try:
        yield driver is not None
    finally:
        if driver is not None:
            # The call has left the former mode there.
            driver(ctypes.byref(mode))
