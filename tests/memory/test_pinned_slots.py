"""Bytes of a slot that are registered as pinned memory, and when; a mock of CUDA's runtime notes its calls."""

import contextlib
import mmap
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from tiered_checkpoint_io.engine.staging import capture
from tiered_checkpoint_io.engine.staging.capture import Capturer
from tiered_checkpoint_io.engine.staging.host_pins import HostPins
from tiered_checkpoint_io.formats.image import PINNED_PIECE, cuts_of
from tiered_checkpoint_io.memory.tier import MemoryTier

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class Runtime:
    """CUDA refuses to register what overlaps with what is registered, and to end what is not.

    Each thread has a current device, at first device 0, of which this process, a rank with another, uses nothing.
    """

    def __init__(self):
        self.registered, self.calls, self.current = {}, 0, threading.local()

    def current_device(self):
        return getattr(self.current, "device", 0)

    def device(runtime, number):
        class Entered:
            def __enter__(self):
                self.before, runtime.current.device = runtime.current_device(), number

            def __exit__(self, *_):
                runtime.current.device = self.before

        return Entered()

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls += 1
        assert self.current_device() == 3
        assert address % PAGE == nbytes % PAGE == 0
        if any(each < address + nbytes and address < each + size for each, size in self.registered.items()):
            return 1
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        assert self.current_device() == 3
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(capture, "beside_graphs", lambda: contextlib.nullcontext(True))
    monkeypatch.setattr(torch.cuda, "current_device", made.current_device)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    with made.device(3):
        yield made


def test_what_grows_or_shrinks_is_registered_as_far_as_it_has_changed(runtime):
    buffer = mmap.mmap(-1, 3 * PINNED_PIECE)
    with memoryview(buffer) as view:
        pins = HostPins()
        assert pins.pin(view[: 2 * PINNED_PIECE + PAGE + 5]) == 2 * PINNED_PIECE + PAGE, "whole pages"
        assert pins.pin(view[: 2 * PINNED_PIECE + PAGE]) == 2 * PINNED_PIECE + PAGE
        assert runtime.calls == 3
        assert pins.pin(view[: 2 * PINNED_PIECE + 3 * PAGE]) == 2 * PINNED_PIECE + 3 * PAGE
        assert runtime.calls == 4
        # The file was cut, and these pages are gone.
        pins.unpin(view, 2 * PINNED_PIECE + 2 * PAGE)
        assert list(runtime.registered.values()) == [PINNED_PIECE] * 2
        pins.unpin(view, PINNED_PIECE)
        assert list(runtime.registered.values()) == [PINNED_PIECE]
        pins.unpin(view)
        assert not runtime.registered
        assert pins.pin(view[:100]) == 0
    buffer.close()


@given(st.integers(0, 5 * PINNED_PIECE), st.integers(1, 3 * PINNED_PIECE), st.integers(0, 5 * PINNED_PIECE))
def test_no_copy_goes_to_two_registrations_or_beyond_them(start, nbytes, pinned):
    cuts = cuts_of(start, start + nbytes, pinned)
    assert [low for low, _ in cuts] + [start + nbytes] == [start] + [high for _, high in cuts]
    for low, high in cuts:
        assert low < high
        assert low >= pinned or (high <= pinned and low // PINNED_PIECE == (high - 1) // PINNED_PIECE)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_slot_is_pinned_once_it_is_touched_where_a_gpu_is_used(runtime, monkeypatch, memory_dir, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    pins = HostPins()
    tier = MemoryTier.open(memory_dir, "test", unmap=pins.unpin)
    capturer = Capturer(tier, pins)
    capturer.prepare(40 * MIB, first=True)
    wanted = [40 * MIB] if has_gpu else []
    until(lambda: tier.is_prepared(40 * MIB) and list(runtime.registered.values()) == wanted)
    # Too small for the next: it goes, and with it what was registered.
    with runtime.device(0):
        # On a thread of ours.
        capturer.prepare(90 * MIB)
    wanted = [26 * MIB, 40 * MIB, 64 * MIB] if has_gpu else []
    until(lambda: tier.is_prepared(90 * MIB) and sorted(runtime.registered.values()) == wanted)
    capturer.close()
    with runtime.device(0):
        tier.close()
    assert not runtime.registered
