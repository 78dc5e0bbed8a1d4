"""Sharded checkpoints into tensors on a GPU, by two buffers: the right bytes, each read once, or an error.

Without a GPU, tensors of the CPU replace those on a GPU: see ``device``. With a GPU, the same is tried on it.
"""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.losing import lose_memory
from support.restoring import flip

from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.adapters import dcp_reader
from tiered_checkpoint_io.engine.restore import shards
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.formats.image import default_threads
from tiered_checkpoint_io.model import documents
from tiered_checkpoint_io.model.manifest import FileEntry

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

#: The smallest that a save may have: as much is copied at once.
CHUNK = 512 << 10
#: Bytes of a buffer, if four threads read node memory, a chunk each.
BUFFER = 4 * CHUNK
#: Type of the tensors that are on the CPU in any case.
ON_HOST = torch.float16
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)


class Late(dcp_reader.PinnedReads):
    """A device that copies at the last moment: once it is waited for."""

    under_way = 0

    def begin(self, copies):
        waiting = [copies]
        Late.under_way += 1

        def wait():
            while waiting:
                super(Late, self).begin(waiting.pop())()
                Late.under_way -= 1

        return wait


@pytest.fixture(params=["late", GPU])
def device(request, monkeypatch):
    """Returns the device of the tensors; tensors on the CPU count as on a device that copies late."""
    monkeypatch.setattr(documents, "MIN_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(Late, "under_way", 0)
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(dcp_reader, "is_on_device", lambda tensor: tensor.dtype != ON_HOST)
    monkeypatch.setattr(dcp_reader, "PinnedReads", Late)
    return "cpu"


@pytest.fixture
def read(monkeypatch):
    """Counts the reads of each chunk in node memory, by basename and index."""
    found, before = Counter(), shards.fetch_targets

    def fetch_targets(store, entry, index, targets):
        found[entry.basename, index] += 1
        before(store, entry, index, targets)

    monkeypatch.setattr(shards, "fetch_targets", fetch_targets)
    return found


@pytest.fixture
def config(memory_dir, tmp_path):
    return {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}


def save(state, config, step=1, **more):
    writer = TieredStorageWriter(**config, wait=True, **more)
    dcp.save(state, checkpoint_id=f"step_{step}", storage_writer=writer)
    writer.close()


def newest_in_memory(config):
    return max(Path(config["memory_dir"]).glob("tiered-*/*/saves/*/rank-*/__*"))


def content(step=1):
    """Returns tensors that go to a device as they are, and tensors that do not."""
    generator = torch.Generator().manual_seed(step)
    many = {f"small.{number}": torch.randn(number % 7 + 1, generator=generator) for number in range(400)}
    return {
        "large": torch.randn(3 * BUFFER // 4 + 1001, generator=generator),
        "exact": torch.randn(BUFFER // 4, generator=generator),
        "bfloat": torch.randn(70_000, 11, generator=generator).to(torch.bfloat16),
        "bool": torch.rand(100_001, generator=generator) > 0.5,
        "complex": torch.randn(13, 5, dtype=torch.complex64, generator=generator),
        "scalar": torch.tensor(7.25 + step),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.randn(300, 300, generator=generator)),
        "transposed": torch.randn(400, 300, generator=generator),
        "converted": torch.randn(50_000, generator=generator),
        "on_host": torch.randn(400_000, generator=generator).to(ON_HOST),
        "note": {"step": step},
        **many,
    }


def blank(device):
    state = {
        key: torch.zeros_like(value, device=device) if isinstance(value, torch.Tensor) else value
        for key, value in content().items()
    }
    state["note"] = {"step": 0}
    state["parameter"] = torch.nn.Parameter(state["parameter"])
    state["transposed"] = torch.zeros(300, 400, device=device).t()
    state["converted"] = torch.zeros(50_000, dtype=torch.float64, device=device)
    state["on_host"] = torch.zeros(400_000, dtype=ON_HOST)
    return state


def is_step(loaded, step):
    for key, value in content(step).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[key].detach().cpu().to(value.dtype), value.detach()), key
        else:
            assert loaded[key] == value
    return True


# ----------------------------------------------------------------------------------- whole loads
@pytest.mark.parametrize("tier", ["memory", "durable"])
def test_any_tensor_on_a_device_is_loaded_and_each_byte_is_read_once(config, device, read, tier):
    save(content(), config)
    size = newest_in_memory(config).stat().st_size
    if tier == "durable":
        lose_memory(config["memory_dir"])
        os.mkdir(config["memory_dir"])
    loaded = blank(device)
    before = {key: value._version for key, value in loaded.items() if isinstance(value, torch.Tensor)}
    reader = ours.load(loaded, **config)
    assert reader.opened.tier == tier
    assert is_step(loaded, 1)
    for key, version in before.items():
        assert loaded[key]._version > version or not loaded[key].numel(), f"autograd must notice that {key} changed"
    if tier == "memory":
        # Bytes that are converted are read from the mapping.
        assert len(read) >= 20
        assert set(read.values()) == {1}
    else:
        assert reader.session.asked["bytes.down"] < 1.05 * size
    assert Late.under_way == 0
    reader.close()


def test_tensors_of_several_files_that_others_saved_as_parts(config, device, ranks):
    """Rows are copied as they lie, columns are not; the buffers of one file are taken for the next."""
    ranks(3, ["save", 4, {"rows": 60_000}], ["close"], save_to_s3=True)
    weight, columns = torch.zeros(60_000, 24, device=device), torch.zeros(10, 9, device=device)
    reader = TieredStorageReader(**config, step=4, no_dist=True)
    dcp.load({"model": {"weight": weight, "columns": columns}}, storage_reader=reader, no_dist=True)
    generator = torch.Generator().manual_seed(4)
    assert torch.equal(weight.cpu(), torch.randn(60_000, 24, generator=generator))
    assert torch.equal(columns.cpu(), torch.randn(10, 9, generator=generator))
    reader.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_copies_from_pinned_memory(config, monkeypatch):
    made, before = [], dcp_reader.PinnedReads.buffer
    monkeypatch.setattr(dcp_reader.PinnedReads, "buffer", lambda self, n: made.append(before(self, n)) or made[-1])
    weight = torch.nn.Parameter(torch.randn(100 << 20, device="cuda"))
    saved = weight.detach().clone()
    save({"w": weight}, config, save_to_s3=False)
    with torch.no_grad():
        for _ in range(50):
            # Still under way when the load begins, and must not come after it.
            weight.mul_(1.01)
    ours.load({"w": weight}, **config).close()
    with torch.cuda.stream(torch.cuda.Stream()):
        # Another stream sees it, too, without a wait.
        assert torch.equal(weight, saved)
    assert [len(buffer) for buffer in made] == [default_threads() * (16 << 20)] * 2
    assert all(buffer.is_pinned() for buffer in made)


# ---------------------------------------------------------------------------------------- damage
def test_damage_between_two_batches_leads_to_the_durable_copy(config, device):
    save(content(), config)
    path = newest_in_memory(config)
    flip(path, at=path.stat().st_size // 2)
    loaded = blank(device)
    reader = ours.load(loaded, **config)
    assert is_step(loaded, 1)
    assert reader.session.asked["bytes.down"] > 0
    assert list(Path(config["memory_dir"]).glob("tiered-*/*/quarantine/*"))
    reader.close()


def test_nothing_goes_to_a_device_that_differs_from_its_hash(config, device):
    saved = torch.randn(3 * BUFFER // 4)
    save({"a": saved}, config, save_to_s3=False)
    path = newest_in_memory(config)
    flip(path, at=path.stat().st_size // 2)
    loaded = torch.zeros(3 * BUFFER // 4, device=device)
    with pytest.raises(RestoreError, match="no sharded checkpoint is intact"):
        ours.load({"a": loaded}, **config)
    assert ((loaded.cpu() == saved) | (loaded.cpu() == 0)).all()


# --------------------------------------------------------------------------------------- batches
@given(
    cuts=st.sets(st.integers(0, 1000), min_size=2, max_size=30).map(sorted),
    kinds=st.lists(st.sampled_from(["host", "device", "gap"]), min_size=29, max_size=29),
    most=st.integers(100, 400),
)
def test_batches_hold_each_byte_once_each_chunk_whole_and_no_more_than_a_buffer(cuts, kinds, most):
    spans = list(zip(cuts, cuts[1:], kinds, strict=False))
    host = [(low, memoryview(bytearray(high - low))) for low, high, kind in spans if kind == "host"]
    device = [(low, torch.zeros(high - low, dtype=torch.uint8)) for low, high, kind in spans if kind == "device"]
    seen = []
    for batch in dcp_reader.batches_of(FileEntry("file", 1000, 100, ()), host, device, most):
        assert batch.nbytes == sum(len(each) for _, each in batch.on_device) <= most
        pieces = [*batch.targets, *batch.on_device]
        seen.append({offset // 100 for offset, _ in pieces})
        for offset, into in pieces:
            for at in range(len(into)):
                into[at] = (offset + at) % 251
    assert sum(map(len, seen)) == len(set().union(*seen)), "no chunk is in two batches"
    for offset, into in (*host, *device):
        assert bytes(into.tolist()) == bytes(at % 251 for at in range(offset, offset + len(into)))
