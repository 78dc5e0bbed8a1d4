"""Huge pages of tmpfs: the same bytes and space as without them; pages of a slot that are registered as pinned."""

import ctypes
import gc
import itertools
import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import until

from tiered_checkpoint_io.engine.ranks.views import bytes_of, privately_mapped
from tiered_checkpoint_io.engine.staging import Capturer, HostPins
from tiered_checkpoint_io.formats.image import PINNED_PIECE, cuts_of
from tiered_checkpoint_io.memory.slots import HUGE, Mapped, make_huge, take_space
from tiered_checkpoint_io.memory.tier import MemoryTier

MIB = 1 << 20
SIZE = 16 * MIB + 5000
HOURS = itertools.count(1)


@pytest.fixture
def descriptor(memory_dir):
    with tempfile.TemporaryFile(dir=memory_dir) as file:
        yield file.fileno()


@pytest.fixture
def asked_again(monkeypatch):
    """Forgets earlier answers of the kernel, as an hour later."""
    shift, now = 3600.0 * next(HOURS), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + shift)


@pytest.fixture
def takes(monkeypatch, asked_again):
    """Sets how long the kernel takes for one call, seconds."""

    def takes(seconds):
        calls = itertools.count()
        monkeypatch.setattr(time, "thread_time", lambda: seconds * next(calls))

    return takes


@pytest.fixture(params=["as this kernel does", "none", "some", "slowly"])
def kernel(request, monkeypatch, takes):
    """Sets the kernel's huge pages: none at all, or none any more after the first few; or it takes its time."""
    if request.param in ("none", "some"):
        advise, left = Mapped.advise, iter([True, True, True] if request.param == "some" else [])
        monkeypatch.setattr(Mapped, "advise", lambda *args: next(left, False) and advise(*args))
    elif request.param == "slowly":
        takes(0.01)
    return request.param


@pytest.fixture
def huge_pages(takes, memory_dir):
    """Skips the test if the kernel gives no huge pages, even slowly."""
    takes(0.0)
    with tempfile.TemporaryFile(dir=memory_dir) as file:
        if not take_space(file.fileno(), 0, 8 * MIB, patient=True):
            pytest.skip("this kernel gives none")


def taken(descriptor):
    return os.fstat(descriptor).st_blocks * 512


def maps(address):
    """Returns the kernel's facts about the mapping that begins at an address; {} if there is none."""
    found = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = first.startswith(f"{address:x}-")
        elif inside:
            found[first[:-1]] = rest[0]
    return found


@pytest.mark.parametrize("start", [0, HUGE, 3 * MIB, 12_345])
def test_all_space_is_taken_and_no_more_and_bytes_that_are_there_stay(descriptor, kernel, start):
    kept = os.urandom(start + 3 * MIB)
    os.pwrite(descriptor, kept, 0)
    huge = take_space(descriptor, start, SIZE)
    assert start <= huge <= SIZE
    if kernel == "none":
        assert huge == start
    assert os.fstat(descriptor).st_size == SIZE
    assert taken(descriptor) == -(-SIZE // mmap.PAGESIZE) * mmap.PAGESIZE
    with open(descriptor, "rb", closefd=False) as file:
        assert file.read() == kept.ljust(SIZE, b"\0")


def test_what_is_taken_is_mapped_by_huge_pages_where_the_kernel_has_them(descriptor, huge_pages):
    assert take_space(descriptor, 0, SIZE, patient=True) == 16 * MIB
    mapped = Mapped(descriptor, SIZE, shared=True)
    assert mapped.address % HUGE == 0
    mapped.view[:] = b"x" * SIZE
    assert int(maps(mapped.address)["ShmemPmdMapped"]) * 1024 == 16 * MIB
    storage = privately_mapped(descriptor, SIZE)
    assert bytes_of(storage) == b"x" * SIZE
    assert int(maps(storage.data_ptr())["ShmemPmdMapped"]) * 1024 == 16 * MIB
    # A checkpoint is cut to its size like this.
    os.ftruncate(descriptor, 5 * MIB + 1)
    assert os.pread(descriptor, SIZE, 0) == b"x" * (5 * MIB + 1)
    assert taken(descriptor) < 8 * MIB


def test_a_private_mapping_never_changes_the_file_and_goes_with_the_last_tensor(descriptor):
    os.pwrite(descriptor, bytes(SIZE), 0)
    storage = privately_mapped(descriptor, SIZE)
    address = storage.data_ptr()
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)[7:]
    del storage
    gc.collect()
    tensor.fill_(3)
    assert os.pread(descriptor, SIZE, 0) == bytes(SIZE)
    assert int(tensor.sum(dtype=torch.int64)) == 3 * (SIZE - 7)
    assert maps(address)
    del tensor
    gc.collect()
    assert not maps(address)
    assert privately_mapped(descriptor, 0).nbytes() == 0


def test_a_forked_child_does_not_keep_what_is_shared_and_can_end_what_is_private(descriptor):
    os.pwrite(descriptor, bytes(SIZE), 0)
    shared, private = Mapped(descriptor, SIZE, shared=True), Mapped(descriptor, SIZE, shared=False)
    addresses = shared.address, private.address
    child = os.fork()
    if not child:
        before = [bool(maps(each)) for each in addresses]
        del shared, private
        gc.collect()
        os._exit(0 if (before, [bool(maps(each)) for each in addresses]) == ([False, True], [False, False]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(map(maps, addresses))


def test_a_save_takes_small_pages_while_huge_ones_take_long(descriptor, huge_pages, takes):
    takes(0.01)
    assert take_space(descriptor, 0, SIZE) == HUGE
    assert take_space(descriptor, HUGE, SIZE) == HUGE
    assert take_space(descriptor, 2 * SIZE, 3 * SIZE, patient=True) > 2 * SIZE, "preparation takes huge ones"
    assert taken(descriptor) >= 2 * SIZE


def test_small_pages_become_huge_and_keep_their_bytes(descriptor, huge_pages):
    content = os.urandom(SIZE)
    os.pwrite(descriptor, content, 0)
    mapped = Mapped(descriptor, SIZE, shared=True)
    assert make_huge(mapped, 0, 16 * MIB, patient=True) == 16 * MIB
    assert bytes(mapped.view) == content
    assert int(maps(mapped.address)["ShmemPmdMapped"]) * 1024 == 16 * MIB


PAGE = mmap.PAGESIZE


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
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda _: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(torch.cuda, "current_device", made.current_device)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    with made.device(3):
        yield made


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
    until(lambda: tier.pool.is_prepared(40 * MIB) and list(runtime.registered.values()) == wanted)
    # Too small for the next: it goes, and with it what was registered.
    with runtime.device(0):
        # On a thread of ours.
        capturer.prepare(90 * MIB)
    wanted = [26 * MIB, 40 * MIB, 64 * MIB] if has_gpu else []
    until(lambda: tier.pool.is_prepared(90 * MIB) and sorted(runtime.registered.values()) == wanted)
    capturer.close()
    with runtime.device(0):
        tier.close()
    assert not runtime.registered
