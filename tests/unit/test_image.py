"""The image of a state is the file that torch.save would write, judged by torch.load."""

import argparse
import io
import mmap
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tiered_checkpoint_io.image import plan
from tiered_checkpoint_io.manifest import chunk_ranges, hash_bytes

Pair = namedtuple("Pair", "left right")


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
        )
        + (torch.bool, torch.int8, torch.uint8, torch.uint16, torch.int64, torch.float64)
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


class NeedsItsData:
    """Reads tensor bytes while it is pickled, as some tensor wrappers do; skip_data can't plan it."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        if torch.serialization._serialization_tls.skip_data:
            raise RuntimeError("needs the data")
        return (NeedsItsData, (self.value,))


def test_what_cannot_be_planned_is_written_by_torch_save():
    image, data = file_of({"x": NeedsItsData(7), "w": torch.ones(5)})
    assert not image.planned
    assert load(data)["x"].value == 7


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_go_straight_into_the_buffer():
    state = {"a": torch.randn(1 << 22, device="cuda"), "b": torch.arange(7, device="cuda"), "c": torch.ones(3)}
    data = file_of(state)[1]
    loaded = torch.load(io.BytesIO(data), map_location="cpu")
    assert all(torch.equal(loaded[key], state[key].cpu()) for key in state)
