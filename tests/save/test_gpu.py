"""Copies straight from a GPU into the slot. Skipped if there is no CUDA device."""

import io
import mmap

import pytest
import torch
from support.saving import save_full

from tiered_checkpoint_io.engine.staging import Capturer, HostPins
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import chunk_ranges, hash_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RUN = ids.new_run_id()


def cuda_state():
    base = torch.randn(20 << 20, device="cuda")
    return {
        "base": base,
        "view": base[100:200],
        "strided": base.view(-1, 1024).t()[::3],
        "half": torch.randn(3 << 20, device="cuda").bfloat16(),
        "empty": torch.empty(0, device="cuda"),
        "scalar": torch.tensor(3.0, device="cuda"),
        "host": torch.randn(5 << 20),
        "many": [torch.full((7,), float(number), device="cuda") for number in range(500)],
    }


def same(loaded, state):
    for key, value in state.items():
        values = zip(loaded[key], value, strict=True) if isinstance(value, list) else [(loaded[key], value)]
        assert all(torch.equal(mine, theirs.cpu()) for mine, theirs in values), key


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99, 1])
def test_cuda_tensors_go_straight_into_the_buffer_wherever_what_is_pinned_ends(share):
    state = cuda_state()
    image = plan(state)
    assert image.planned
    buffer = mmap.mmap(-1, image.size)
    pins = HostPins()
    with memoryview(buffer) as view:
        hashes = image.fill(view, pin=(lambda whole: pins.pin(whole[: int(len(whole) * share)])) if share else None)
        assert bool(pins._pinned) == bool(share)
        pins.unpin(view)
    data = bytes(buffer)
    buffer.close()
    assert hashes == tuple(hash_bytes(data[start : start + size]) for start, size in chunk_ranges(len(data), 16 << 20))
    same(torch.load(io.BytesIO(data), map_location="cpu"), state)


def test_memory_that_cannot_be_pinned_only_costs_speed():
    state = {"w": torch.randn(1 << 20, device="cuda")}
    image = plan(state)
    buffer = mmap.mmap(-1, image.size)
    pins, runtime = HostPins(), torch.cuda.cudart()
    with memoryview(buffer) as view:
        # CUDA refuses to register memory twice.
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        assert int(runtime.cudaHostRegister(address, len(view), 0)) == 0
        image.fill(view, pin=pins.pin)
        assert not pins._pinned
        assert (torch.ones(3, device="cuda") * 2).sum() == 6, "the refusal must not be raised by a kernel of training"
        runtime.cudaHostUnregister(address)
    same(torch.load(io.BytesIO(bytes(buffer)), map_location="cpu"), state)
    buffer.close()


def test_what_is_still_being_computed_is_waited_for():
    weight = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        weight = torch.tanh(weight @ weight)
    image = plan({"w": weight})
    buffer = bytearray(image.size)
    image.fill(memoryview(buffer))
    expected = weight.cpu()
    assert torch.equal(torch.load(io.BytesIO(buffer), map_location="cpu")["w"], expected)


@pytest.mark.parametrize("sizes", [[64] * 5, [64, 8, 64, 8, 64]], ids=["same", "smaller meanwhile"])
def test_later_kernels_change_nothing_and_a_slot_gets_all_bytes(memory_dir, sizes):
    pins = HostPins()
    tier = MemoryTier.open(memory_dir, "test", unmap=pins.unpin)
    capturer = Capturer(tier, pins)
    for step, size in enumerate(sizes, 1):
        weight = torch.full((size << 18,), float(step), device="cuda")
        stored = save_full(tier, capturer, {"w": weight}, f"{step}.ckpt", ids.save_id(RUN, step), step, keep_last=1)
        weight.fill_(-1)
        loaded = torch.load(stored.file(f"{step}.ckpt"), map_location="cpu", weights_only=True)
        assert (loaded["w"] == step).all()
    capturer.close()
    tier.close()
