"""Layout of a rank's file: each item is what torch.save writes for a single one; readers are in tests/dcp."""

import io
import mmap
import resource
from pathlib import Path

import pytest
import torch

from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.formats.shard_image import ALIGNMENT, TensorRow, plan_shard, skeleton_of
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.model.hashing import chunk_ranges, hash_bytes


class Tagged(torch.Tensor):
    """A tensor subclass."""


def tensors():
    base = torch.arange(5000, dtype=torch.float32)
    square = torch.randn(40, 30)
    return {
        "whole": torch.randn(3, 5),
        "view": base[7:107],
        "matrix of a view": base[:400].view(20, 20)[3:9],
        "transposed": square.t(),
        "scattered": square[::3, 1::2],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty of shape": torch.empty(3, 0, 2),
        "bf16": torch.randn(33).bfloat16(),
        "fp8": torch.randn(17).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(9),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(6, 2)),
        "odd strides": torch.randn(4)[None].as_strided((1, 4), (77, 1)),
        "large": torch.randn(5 << 20),
    }


def file_of(items):
    image, placed = plan_shard(items)
    buffer = mmap.mmap(-1, max(1, image.size))
    buffer[:] = b"\xaa" * len(buffer)
    hashes = image.fill(memoryview(buffer))
    data = bytes(buffer[: image.size])
    ranges = chunk_ranges(image.size, image.chunk_size)
    assert hashes == tuple(hash_bytes(data[offset : offset + length]) for offset, length in ranges)
    # No earlier byte of the buffer is left between the items.
    end = 0
    for each in placed:
        assert each.offset % ALIGNMENT == 0
        assert not any(data[end : each.offset])
        end = each.offset + each.length
    assert not any(data[end:])
    return data, placed


def raw(tensor):
    """Returns a tensor's elements, row by row, as bytes."""
    plain = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        data, (placed,) = file_of([torch.arange(77.0, device="cpu").view(7, 11)])
    assert torch.equal(torch.load(io.BytesIO(data[: placed.length])), torch.arange(77.0).view(7, 11))


def test_a_stand_in_takes_no_memory_where_algorithms_are_deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        skeleton_of(torch.float32, (4 << 30,))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 1 << 20, "KiB"
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_stand_in_may_be_larger_than_the_machine():
    """A tensor of a checkpoint of many ranks is exported on one node."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "0":
        pytest.skip("the kernel allows any size, or none")
    info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    nbytes = sum(int(info[key].split()[0]) for key in ("MemTotal", "SwapTotal")) * 1024 + (1 << 30)
    assert skeleton_of(torch.uint8, (nbytes,)).data_nbytes == nbytes


def test_a_limit_of_address_space_is_what_the_error_names():
    with pytest.raises(SaveError, match=r"no address space for a tensor of \d+ bytes.*ulimit -v"):
        skeleton_of(torch.uint8, (1 << 62,))


def test_where_torch_lays_out_its_file_otherwise_the_elements_are_there_all_the_same(monkeypatch):
    """A release of torch that is not known yet: its files are made by torch.save, at the cost of time and memory."""
    save = torch.serialization._save

    def with_one_more(value, file, *options):
        save(value, file, *options)
        file.write_record("more", b"1", 1)

    monkeypatch.setattr(torch.serialization, "_save", with_one_more)
    items = [torch.arange(103.0), torch.arange(34.0).view(2, 17).t(), torch.empty(0, 19)]
    data, placed = file_of(items)
    for item, each in zip(items, placed, strict=True):
        assert same(torch.load(io.BytesIO(data[each.offset : each.offset + each.length])), item)
    with pytest.raises(ValueError, match="not copied"):
        TensorRow(items)
    assert skeleton_of(torch.float32, (107,)).length == 0, "no item is taken for one of this layout"


@pytest.mark.parametrize("name", sorted(tensors()))
def test_an_item_alone_is_what_torch_save_writes(name):
    tensor = tensors()[name]
    data, (placed,) = file_of([tensor])
    clone = tensor.detach().clone()
    image, buffer = plan(clone), io.BytesIO()
    torch.save(clone, buffer)
    alone = bytearray(image.size)
    image.fill(memoryview(alone))
    assert name in ("conjugate", "odd strides") or data[: placed.length] == alone
    mine = torch.load(io.BytesIO(data[placed.offset : placed.offset + placed.length]))
    theirs = torch.load(io.BytesIO(buffer.getvalue()))
    assert type(mine) is type(theirs)
    assert not mine.requires_grad
    if name != "odd strides":
        assert mine.stride() == theirs.stride()
    assert same(mine, theirs)
    assert mine.untyped_storage().nbytes() == tensor.nbytes


def test_subclasses_and_sparse_tensors_are_saved_as_torch_saves_them():
    tagged = torch.arange(4.0).as_subclass(Tagged)
    sparse = torch.eye(4).to_sparse()
    data, placed = file_of([tagged, sparse, b"raw", torch.ones(3)])
    with torch.serialization.safe_globals([Tagged]):
        parts = [
            torch.load(io.BytesIO(data[each.offset : each.offset + each.length]), weights_only=False)
            for each in (placed[0], placed[1], placed[3])
        ]
    assert type(parts[0]) is Tagged
    assert torch.equal(parts[0].as_subclass(torch.Tensor), torch.arange(4.0))
    assert torch.equal(parts[1].to_dense(), torch.eye(4))
    assert torch.equal(parts[2], torch.ones(3))
    assert data[placed[2].offset :][:3] == b"raw"


def test_a_row_of_tensors_makes_the_same_file_as_planning_it():
    def tensors(fill):
        base = torch.full((1000,), fill)
        return [base[3:40].view(37), base.view(10, 100), torch.zeros(0), torch.full((3,), fill).half(), base[:1]]

    assert file_of([]) == (b"", [])
    row = TensorRow(tensors(1.0))
    for objects in ([], [b"short"], [b"x" * 1000, b"", b"y" * 64]):
        mine, places = row.plan(objects, tensors(2.0))
        theirs, expected = plan_shard([*objects, *tensors(2.0)])
        files = [bytearray(image.size) for image in (mine, theirs)]
        assert mine.fill(memoryview(files[0])) == theirs.fill(memoryview(files[1]))
        assert files[0] == files[1]
        assert places == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_tensors_of_a_gpu():
    state = {name: tensor.cuda() for name, tensor in tensors().items()}
    base = torch.randn(1 << 20, device="cuda")
    state["strided"] = base.view(1024, 1024).t()[::3]
    state["view of a large one"] = base[100:300]
    data, placed = file_of(list(state.values()))
    for (name, tensor), each in zip(state.items(), placed, strict=True):
        loaded = torch.load(io.BytesIO(data[each.offset : each.offset + each.length]))
        assert loaded.device.type == "cpu"
        assert same(loaded, tensor), name
