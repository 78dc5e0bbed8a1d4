"""Every kind and layout of tensor, with torch's own DCP and torch.save as the oracles: it comes back, or is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TYPES = """
    float64 float32 float16 bfloat16 complex32 complex64 complex128 int8 int16 int32 int64 uint8 uint16 uint32
    uint64 bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
"""


class Tagged(torch.Tensor):
    """A subclass that a program defines."""


class NoStorage(TwoTensor):
    """Asked for its storage, it raises, as quantized weights may."""

    def untyped_storage(self):
        raise ValueError("it has no storage")


def matrix():
    return torch.arange(24.0).reshape(4, 6)


def quantized(scale=0.1, factor=1.0):
    return torch.quantize_per_tensor(matrix() * factor, scale, 3, torch.qint8)


def quantized_by_channel(scale=0.1, factor=1.0):
    scales, zeros = torch.full((4,), scale), torch.zeros(4, dtype=torch.long)
    return torch.quantize_per_channel(matrix() * factor, scales, zeros, 0, torch.quint8)


def ordinary():
    """Returns kinds that torch's DCP restores, with tensors to load them into."""
    raw = torch.arange(64, dtype=torch.uint8) % 2
    of_types = {name: raw.clone().view(getattr(torch, name)) for name in TYPES.split() if hasattr(torch, name)}
    numbers = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(matrix())
    kinds = {
        **of_types,
        "scalar": torch.tensor(3.5),
        "no rows": torch.zeros(0, 5),
        "empty": torch.zeros(0),
        "view": matrix()[1:3],
        "behind an offset": matrix().flatten()[5:],
        "every second": matrix()[:, ::2],
        "transposed": matrix().t(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "overlapping": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        "channels last": torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": numbers.clone().conj(),
        "negative": numbers.clone().conj().imag,
        "part of complex": numbers.clone().imag,
        "parameter": weight,
        "tied": weight,
        "with gradient": matrix().requires_grad_(),
        "buffer": torch.nn.Buffer(matrix()),
    }
    return kinds, {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in kinds.items()}


REFUSED = {
    "sparse coo": lambda: matrix().to_sparse(),
    "sparse csr": lambda: matrix().to_sparse_csr(),
    "sparse csc": lambda: matrix().to_sparse_csc(),
    "sparse bsr": lambda: matrix().to_sparse_bsr((2, 2)),
    "sparse bsc": lambda: matrix().to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "masked": lambda: masked_tensor(matrix(), matrix() > 3),
    "mkldnn": lambda: matrix().to_mkldnn(),
    "bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "subclass": lambda: matrix().as_subclass(Tagged),
    "subclass of two": lambda: TwoTensor(matrix(), matrix() * 2),
    "without storage": lambda: NoStorage(matrix(), matrix() * 2),
    "lazy": lambda: torch.nn.LazyLinear(7).weight,
    "lazy buffer": lambda: torch.nn.LazyBatchNorm1d().running_mean,
}
#: Kinds that torch.save refuses itself.
NEVER = ("mkldnn",)


def content(tensor):
    """Returns all that makes a tensor, as bytes and words."""
    if torch.nn.parameter.is_lazy(tensor):
        return type(tensor).__name__
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return content(tensor.to_local())
    if isinstance(tensor, TwoTensor):
        return content(tensor.a), content(tensor.b)
    if isinstance(tensor, torch.masked.MaskedTensor):
        return content(tensor.get_data()), content(tensor.get_mask())
    if tensor.is_quantized:
        by_channel = tensor.qscheme() == torch.per_channel_affine
        scales = tensor.q_per_channel_scales().tolist() if by_channel else tensor.q_scale()
        return str(tensor.dtype), scales, content(tensor.int_repr())
    if tensor.is_nested:
        return tuple(content(each) for each in tensor.unbind())
    if tensor.layout != torch.strided:
        return str(tensor.layout), content(tensor.to_dense())
    if tensor.device.type == "meta":
        return str(tensor.dtype), tuple(tensor.shape)
    plain = tensor.resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
    return (
        str(plain.dtype),
        tuple(plain.shape),
        bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b"",
    )


def all_content(state):
    return {name: content(tensor) for name, tensor in state.items()}


@pytest.fixture
def tiers(tmp_path, memory_dir):
    return {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "on_save_error": "raise"}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def by_stock(tmp_path, state, target):
    stock.save(state, checkpoint_id=str(tmp_path / "stock"))
    stock.load(target, checkpoint_id=str(tmp_path / "stock"))
    return target


def by_ours(tiers, state, target, kind, **trust):
    ours.save(state, checkpoint_id="step_1", kind=kind, save_to_s3=False, **tiers, **trust)
    ours.load(target, kind=kind, **tiers, **trust)
    return target


def by_full(tiers, state, **trust):
    io = TieredCheckpointIO(**tiers, **trust)
    try:
        io.save_checkpoint(state, "step=1.ckpt", {"tiers": ["memory"]})
        return io.load_checkpoint("step=1.ckpt")
    finally:
        io.teardown()


def error_of(failing, *arguments, **options):
    with pytest.raises(BaseException) as caught:
        failing(*arguments, **options)
    error = caught.value
    return str(next(iter(error.failures.values()))[0]) if isinstance(error, CheckpointException) else str(error)


def test_what_stock_brings_back_comes_back_bit_for_bit(tmp_path, tiers):
    state, target = ordinary()
    expected = all_content(state)
    assert all_content(by_stock(tmp_path, state, copy.deepcopy(target))) == expected
    assert all_content(by_ours(tiers, state, copy.deepcopy(target), "sharded")) == expected
    assert all_content(by_ours({**tiers, "namespace": "local"}, state, copy.deepcopy(target), "local")) == expected
    loaded = by_full({**tiers, "namespace": "full"}, state)
    assert all_content(loaded) == expected
    assert loaded["parameter"].data_ptr() == loaded["tied"].data_ptr()


def test_tensors_are_loaded_into_other_strides_and_types_as_by_stock_from_each_tier(tmp_path, tiers):
    state = {"turned": torch.randn(300, 1000), "converted": torch.randn(70, 11).bfloat16(), "spread": matrix() > 9}
    state["straight"] = torch.randn(300, 1000)

    def targets():
        into = torch.zeros(1000, 300).t(), torch.zeros(70, 11, dtype=torch.float64), torch.zeros(4, 12).bool()[:, ::2]
        return dict(zip(state, (*into, torch.nn.Parameter(torch.zeros(300, 1000))), strict=True))

    expected = all_content(by_stock(tmp_path, state, targets()))
    ours.save(state, checkpoint_id="step_1", **tiers)
    for tier, namespace in (("memory", None), ("durable", "another-node")):
        loaded = targets()
        before = {name: each._version for name, each in loaded.items()}
        reader = ours.load(loaded, **tiers, namespace=namespace)
        assert reader.opened.tier == tier
        assert all_content(loaded) == expected
        assert all(loaded[name]._version > before[name] for name in loaded), "autograd must notice the change"
        reader.close()


@pytest.mark.parametrize("make", [quantized, quantized_by_channel])
def test_quantized_tensors_come_back_with_their_scales(tmp_path, tiers, make):
    expected = content(make())
    for kind in ("sharded", "local"):
        target = {"x": make(scale=0.5, factor=0.0)}
        assert content(by_ours({**tiers, "namespace": kind}, {"x": make()}, target, kind)["x"]) == expected
    assert content(by_full({**tiers, "namespace": "full"}, {"x": make()})["x"]) == expected
    assert content(by_stock(tmp_path, {"x": make()}, {"x": make(factor=0.0)})["x"]) == expected


@pytest.mark.parametrize("kind", REFUSED)
def test_what_stock_loses_is_refused_at_the_save_by_its_name(tmp_path, tiers, kind):
    state = {"w": torch.ones(3), "x": REFUSED[kind]()}
    error_of(by_stock, tmp_path, state, {"w": torch.zeros(3), "x": REFUSED[kind]()})
    said = error_of(ours.save, state, checkpoint_id="step_1", save_to_s3=False, **tiers)
    assert "'x' is a" in said
    writer = TieredStorageWriter(step=2, save_to_s3=False, **tiers)
    error_of(stock.save, state, storage_writer=writer)


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in NEVER])
def test_full_and_local_checkpoints_hold_whatever_torch_save_does(tiers, kind):
    state, expected = {"x": REFUSED[kind]()}, content(REFUSED[kind]())
    parameter = torch.nn.parameter
    made = (Tagged, TwoTensor, NoStorage, torch.masked.MaskedTensor)
    made += (parameter.UninitializedParameter, parameter.UninitializedBuffer)
    names = [f"{each.__module__}.{each.__name__}" for each in made]
    for staging in ("eager", "overlapped"):
        loaded = by_full({**tiers, "namespace": staging}, state, safe_globals=names, staging=staging)["x"]
        assert type(loaded) is type(state["x"])
        assert content(loaded) == expected
    if kind not in ("masked", "lazy", "lazy buffer"):
        # Into which torch itself copies nothing.
        target = {"x": REFUSED[kind]()}
        local = by_ours({**tiers, "namespace": "local"}, state, target, "local", safe_globals=names)
        assert content(local["x"]) == expected


def test_a_subclass_that_the_configuration_allows_comes_back_from_a_sharded_checkpoint(tiers):
    for number, make in enumerate((REFUSED["subclass"], REFUSED["subclass of two"])):
        name = f"{type(make()).__module__}.{type(make()).__name__}"
        target = {"x": make() * 0}
        tier = {**tiers, "namespace": str(number)}
        assert content(by_ours(tier, {"x": make()}, target, "sharded", safe_globals=[name])["x"]) == content(make())


def test_dtensors(tmp_path, tiers, group):
    numbers = torch.complex(matrix(), matrix() + 1)
    state = {
        "shard": distribute_tensor(matrix(), group, [Shard(0)]),
        "copy": distribute_tensor(matrix(), group, [Replicate()]),
        "transposed": distribute_tensor(matrix(), group, [Shard(0)]).t(),
        "conjugate": distribute_tensor(numbers, group, [Shard(0)]).conj(),
    }
    target = {name: torch.zeros_like(each.resolve_conj()) for name, each in state.items()}
    expected = all_content(state)
    assert all_content(by_stock(tmp_path, state, copy.deepcopy(target))) == expected
    assert all_content(by_ours(tiers, state, copy.deepcopy(target), "sharded")) == expected
    assert all_content(by_ours({**tiers, "namespace": "local"}, state, copy.deepcopy(target), "local")) == expected
    full = by_full({**tiers, "namespace": "full"}, state)
    assert all_content(full) == expected
    assert isinstance(full["shard"], DTensor)
    partial = {"x": DTensor.from_local(matrix(), group, [Partial()])}
    said = error_of(ours.save, partial, checkpoint_id="step_2", save_to_s3=False, **tiers)
    assert "'x' is a" in said
    assert "partial placements" in said
