"""The image of a state is the file that torch.save would write, judged by torch.load."""

import argparse
import ctypes
import gc
import io
import mmap
import threading
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.model.hashing import chunk_ranges, hash_bytes


class Pair(NamedTuple):
    left: Any
    right: Any


class Tagged(torch.Tensor):
    """A tensor subclass."""


class Odd:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Odd and same(self.value, other.value)

    __hash__ = None


def file_of(state):
    image = plan(state)
    buffer = mmap.mmap(-1, image.size)
    hashes = image.fill(memoryview(buffer))
    data = bytes(buffer[: image.size])
    ranges = chunk_ranges(image.size, image.chunk_size)
    assert hashes == tuple(hash_bytes(data[offset : offset + length]) for offset, length in ranges)
    return image, data


def load(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def oracle(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout or a.requires_grad != b.requires_grad:
            return False
        if a.layout != torch.strided:
            return same(a.to_dense(), b.to_dense())
        if a.stride() != b.stride() or a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
            return False
        if a.is_quantized:
            return torch.equal(a.int_repr(), b.int_repr()) and a.q_scale() == b.q_scale()
        a, b = (
            a.detach().contiguous().resolve_conj().resolve_neg(),
            b.detach().contiguous().resolve_conj().resolve_neg(),
        )
        return a.untyped_storage().tolist() == b.untyped_storage().tolist() if a.numel() < 4096 else torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and a != a:
        return b != b
    return bool(a == b)


def optimizer_state():
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.BatchNorm1d(17), torch.nn.Linear(17, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(5, 33)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


BASE = torch.arange(600, dtype=torch.float32)
STATES = {
    "nested": {"a": [1, (2, {"b": torch.ones(3)}), None, True], "o": OrderedDict(x=1), "t": Pair(torch.zeros(2), "s")},
    "shared storage": {"a": BASE, "b": BASE[10:20], "c": BASE.view(20, 30).t(), "same": [BASE, BASE]},
    "strided": {"s": BASE[::7], "e": torch.ones(3, 1).expand(3, 5), "f": BASE.view(20, 30).flip(0)},
    "scalars and empties": {"z": torch.tensor(3.0), "e": torch.empty(0), "e2": torch.empty(0, 7), "i": torch.tensor(1)},
    "dtypes": {
        str(dtype): torch.arange(1, 9).to(dtype)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.complex64,
            torch.complex128,
            torch.bool,
            torch.int8,
            torch.uint8,
            torch.uint16,
            torch.int64,
            torch.float64,
        )
    },
    "conj and neg": {
        "c": torch.randn(4, dtype=torch.complex64).conj(),
        "n": torch.randn(4, dtype=torch.complex64).conj().imag,
    },
    "sparse": {"coo": torch.eye(5).to_sparse(), "csr": torch.eye(5).to_sparse_csr()},
    "parameters": {
        "p": torch.nn.Parameter(torch.randn(3)),
        "b": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    },
    "subclass": {"t": torch.randn(6).as_subclass(Tagged)},
    "objects": {
        "cfg": OmegaConf.create({"a": [1, 2], "b": {"c": "x"}}),
        "ns": argparse.Namespace(lr=0.1),
        "odd": Odd([1, BASE]),
    },
    "numpy": {"a": np.random.default_rng(0).normal(size=(3, 4)), "s": np.float32(2.5), "o": np.arange(3)},
    "numbers": {
        "huge": 1 << 400,
        "minus": -(1 << 70),
        "f": float("nan"),
        "inf": float("inf"),
        "b": b"\0" * 9,
        "u": "ü" * 5000,
    },
    "many": {f"p{i}": torch.full((i % 5,), float(i)) for i in range(5_000)},
    "optimizer": optimizer_state(),
    "big": {"w": torch.randn(11 << 20), "x": torch.randn(1 << 20), "tail": torch.ones(3)},
    "storage itself": {"u": torch.arange(9, dtype=torch.uint8).untyped_storage().tolist(), "t": torch.arange(4)},
    "plain number": 5,
}


@pytest.mark.parametrize("name", STATES)
def test_loads_as_torch_saves_file_does(name):
    image, data = file_of(STATES[name])
    assert image.planned
    assert same(load(data), oracle(STATES[name]))


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors():
    state = {"q": torch.quantize_per_tensor(torch.randn(20), 0.1, 3, torch.qint8)}
    assert same(load(file_of(state)[1]), oracle(state))


def test_sharing_survives():
    loaded = load(file_of(STATES["shared storage"])[1])
    loaded["a"][10] = -1
    assert loaded["b"][0] == -1
    assert loaded["same"][0] is loaded["same"][1]


def test_plain_torch_reads_it_mapped_and_weights_only(tmp_path):
    state = optimizer_state()
    path = tmp_path / "x.ckpt"
    path.write_bytes(file_of(state)[1])
    assert same(torch.load(path, mmap=True, weights_only=True), oracle(state))


def test_later_changes_are_not_in_the_file():
    state = {"w": torch.zeros(1000)}
    _, data = file_of(state)
    state["w"] += 1
    assert load(data)["w"].sum() == 0


class SavesItself:
    """Calls torch.save while it is pickled, as wrappers of modules and buffers do."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        buffer = io.BytesIO()
        torch.save(self.value, buffer)
        return (revive, (buffer.getvalue(),))


def revive(data):
    return SavesItself(torch.load(io.BytesIO(data)))


def test_an_object_that_saves_itself_keeps_its_data():
    state = {"before": torch.ones(3), "x": SavesItself(torch.arange(9.0)), "after": torch.full((4,), 2.0)}
    loaded = load(file_of(state)[1])
    assert torch.equal(loaded["x"].value, torch.arange(9.0))
    assert torch.equal(loaded["before"], torch.ones(3))
    assert torch.equal(loaded["after"], torch.full((4,), 2.0))


def test_what_cannot_be_planned_is_written_by_torch_save(monkeypatch):
    state = {"x": Odd(7), "w": torch.ones(5 << 20)}

    def refuse(*_, **__):
        raise RuntimeError("this release cannot skip data")

    monkeypatch.setattr(torch.serialization, "skip_data", refuse)
    image, data = file_of(state)
    assert not image.planned
    assert same(load(data), oracle(state))


def test_nothing_of_the_state_outlives_the_image():
    gc.disable()
    try:
        weight = torch.ones(100)
        storage = weakref.ref(weight.untyped_storage())
        state = {"w": weight, "temporary": Odd(torch.ones(3))}
        file_of(state)
        before = torch.ones(7)
        image = plan({"w": before})
        alive = weakref.ref(before)
        del before, state, weight
        assert alive() is None
        assert load(filled(image))["w"].sum() == 7, "the image keeps what it will copy"
        del image
        assert storage() is None
    finally:
        gc.enable()


def filled(image, **options):
    buffer = bytearray(image.size)
    with memoryview(buffer) as view:
        image.fill(view, **options)
    return bytes(buffer)


def test_the_number_of_threads_changes_nothing():
    image = plan(STATES["big"])
    whole = filled(image, threads=1)
    assert [filled(image, threads=count) for count in (2, 3, 8)] == [whole] * 3


def test_many_small_tensors_in_several_chunks():
    sizes = [1, 7, 4096, 5000, 300]
    image = plan({f"p{n}": torch.full((sizes[n % 5],), float(n)) for n in range(6000)})
    assert image.size > 2 * image.chunk_size
    wanted = bytearray(image.size)
    for region in image.regions:
        wanted[region.offset : region.offset + region.nbytes] = ctypes.string_at(
            region.storage.data_ptr(), region.nbytes
        )
    for segment in image.segments:
        wanted[segment.offset : segment.offset + segment.nbytes] = segment.data
    for count in (1, 2, 8):
        for hashed in (True, False):
            assert filled(image, threads=count, hashed=hashed) == wanted


def test_images_can_be_filled_by_several_threads_at_once():
    image = plan(STATES["big"])
    expected = filled(image, threads=1)
    results = []
    workers = [threading.Thread(target=lambda: results.append(filled(image) == expected)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [True] * 3


def test_a_tensor_that_shrank_meanwhile_is_an_error_and_no_crash():
    weight = torch.ones(1 << 20)
    image = plan({"w": weight})
    weight.untyped_storage().resize_(8)
    with pytest.raises(ConfigError, match="resized"):
        filled(image)


def test_a_buffer_that_is_too_small_is_refused_and_a_larger_one_left_alone_behind_the_file():
    image = plan({"w": torch.ones(9)})
    with pytest.raises(ValueError, match="bytes"):
        image.fill(memoryview(bytearray(image.size - 1)))
    buffer = bytearray(b"x" * (image.size + 5))
    image.fill(memoryview(buffer))
    assert buffer[image.size :] == b"xxxxx"
    buffer += b"the buffer is not held any more"


def test_what_torch_cannot_save_is_the_callers_error():
    with pytest.raises(Exception, match="pickle"):
        plan({"f": lambda: None})


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=8),
    st.builds(
        lambda shape, dtype, seed: (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64]),
        st.integers(0, 99),
    ),
    st.builds(lambda start, step: BASE[start::step], st.integers(0, 599), st.integers(1, 9)),
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4) | st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(states)
def test_any_state_loads_as_torch_saves_file_does(state):
    assert same(load(file_of(state)[1]), oracle(state))
