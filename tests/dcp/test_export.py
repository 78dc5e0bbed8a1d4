"""Exports of sharded checkpoints: against torch's own conversion, and under a bound of memory."""

import errno
import itertools
import json
import mmap
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    ExportError,
    RestoreError,
)
from tiered_checkpoint_io.export import blocks, export_checkpoint
from tiered_checkpoint_io.export.blocks import Box, TargetBlock, pour
from tiered_checkpoint_io.export.files import to_safetensors, to_torch_file
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.export.items import Items
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.stores.directory import DirectoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state():
    torch.manual_seed(0)
    model = {
        "wide": torch.randn(40, 70),
        "transposed": torch.randn(7, 5).t(),
        "bf16": torch.randn(3, 4, 5).bfloat16(),
        "f8": torch.arange(6.0).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }
    return {
        "state_dict": model,
        "optimizer_0": {"state": {0: {"step": torch.tensor(2.0), "m": torch.randn(9)}}, "param_groups": [{"lr": 0.1}]},
        "epoch": 3,
        "names": ["a", "b"],
    }


def folder_of(root, name="sharded"):
    """A folder that plain DCP wrote."""
    return Folder(DirectoryStore(root), name)


@pytest.fixture
def folder(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "sharded", no_dist=True)
    return folder_of(tmp_path)


def same(one, two):
    if isinstance(one, dict):
        return set(one) == set(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one.float(), two.float())
    return one == two


def test_a_torch_file_like_the_one_that_torch_makes(folder, tmp_path):
    to_torch_file(folder, tmp_path / "ours.pt")
    dcp_to_torch_save(folder.where, tmp_path / "theirs.pt")
    ours, theirs = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "theirs.pt", weights_only=False)
    assert same(ours, theirs)
    assert torch.equal(ours["state_dict"]["wide"], state()["state_dict"]["wide"])
    assert sorted(os.listdir(tmp_path)) == ["ours.pt", "sharded", "theirs.pt"]


def test_the_model_as_safetensors(folder, tmp_path):
    written = to_safetensors(Items(folder), tmp_path / "hf")
    assert [file.name for file in written] == ["model.safetensors"]
    assert same(load_file(written[0]), state()["state_dict"])
    # Everything, in shards that an index leads to.
    to_safetensors(Items(folder), tmp_path / "all", prefix="", max_shard_size=3000)
    index = json.loads((tmp_path / "all" / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        content = load_file(tmp_path / "all" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == set(content)
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= 3000
        found.update(content)
    assert len(set(index["weight_map"].values())) > 1
    assert torch.equal(found["optimizer_0.state.0.m"], state()["optimizer_0"]["state"][0]["m"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_safetensors_are_not_mixed_with_those_of_an_earlier_export(folder, tmp_path, monkeypatch):
    to_safetensors(Items(folder), tmp_path / "hf")
    # Hugging Face's libraries would go on reading model.safetensors.
    with pytest.raises(ExportError, match=r"model\.safetensors can't be written: it exists already"):
        to_safetensors(Items(folder), tmp_path / "hf", max_shard_size=3000)
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    # Of one that fails amid its shards, nothing is left either.
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    free = iter((True, False))

    def allocate(*_):
        if not next(free):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(ExportError, match="No space left"):
        patch.setattr(os, "posix_fallocate", lambda fd, start, size: (allocate(), os.truncate(fd, size)))
        to_safetensors(Items(folder), tmp_path / "full", max_shard_size=3000)
    assert os.listdir(tmp_path / "full") == ["config.json"]
    assert len(to_safetensors(Items(folder), tmp_path / "full", max_shard_size=3000)) > 2


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_blocks_come_to_their_places(data):
    """An array cut into blocks by one grid, cut by another through windows of a few bytes."""
    whole = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    window = data.draw(st.integers(1, 60))
    array = np.random.default_rng(0).integers(0, 256, (*whole, itemsize), dtype=np.uint8)
    cuts, other_cuts = (
        [sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=2))}) for count in whole]
        for _ in range(2)
    )
    file = mmap.mmap(-1, max(1, array.nbytes))
    grid = lambda cuts: itertools.product(*(itertools.pairwise(cut) for cut in cuts))  # noqa: E731
    slices = lambda place: tuple(slice(*ends) for ends in place)  # noqa: E731
    read_from = lambda content: lambda start, count: memoryview(content)[start : start + count]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "WINDOW", window)
        # Blocks of another grid, one behind the other in a file, are filled from those of this one.
        places, end = [], 0
        for place in grid(other_cuts):
            box = Box(tuple(low for low, _ in place), tuple(high - low for low, high in place))
            places.append((place, TargetBlock(box, file, end)))
            end += box.numel * itemsize
        for place in grid(cuts):
            box = Box(tuple(low for low, _ in place), tuple(high - low for low, high in place))
            if box.numel:
                pour(box, itemsize, read_from(array[slices(place)].tobytes()), [each for _, each in places])
    for place, each in places:
        expected = array[slices(place)].tobytes()
        assert file[each.base : each.base + len(expected)] == expected


def test_large_items_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "WINDOW", 4096)
    large = {"rows": torch.randn(300, 100), "line": torch.randn(50_000), "turned": torch.randn(100, 300).t()}
    dcp.save(large, checkpoint_id=tmp_path / "sharded", no_dist=True)
    read = []

    class Watched(Folder):
        def read(self, path, offset, length):
            read.append(length)
            return super().read(path, offset, length)

    folder = Watched(DirectoryStore(tmp_path), "sharded")
    to_torch_file(folder, tmp_path / "ours.pt")
    assert same(torch.load(tmp_path / "ours.pt"), large)
    # All but the one whose elements lie in another order, and .metadata.
    assert sum(length > 70_000 for length in read) == 1


def test_conjugate_and_negative_views_are_exported_as_what_they_are(tmp_path, monkeypatch):
    numbers = torch.randn(60, 70, dtype=torch.complex64)
    views = {"conjugate": numbers.conj(), "negative": torch._neg_view(numbers.real.clone())}
    dcp.save(views, checkpoint_id=tmp_path / "sharded", no_dist=True)
    # In one piece, and read piece by piece.
    for window in (blocks.WINDOW, 4096):
        monkeypatch.setattr(blocks, "WINDOW", window)
        to_torch_file(folder_of(tmp_path), tmp_path / f"{window}.pt")
        found = torch.load(tmp_path / f"{window}.pt")
        assert all(torch.equal(found[name], views[name]) for name in views), window


@pytest.mark.matrix
def test_memory_stays_bounded(tmp_path):
    """A process that exports 512 MiB, in tensors of 256 MiB, grows by less than 200 MiB."""
    script = f"""
        import resource, sys, torch, torch.distributed.checkpoint as dcp, warnings
        from tiered_checkpoint_io.export.files import to_torch_file, to_safetensors
        from tiered_checkpoint_io.export.items import Items
        from tiered_checkpoint_io.export.folder import Folder
        from tiered_checkpoint_io.stores.directory import DirectoryStore
        folder = Folder(DirectoryStore({str(tmp_path)!r}), "sharded")
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = peak()
        to_torch_file(folder, {str(tmp_path / "ours.pt")!r})
        to_safetensors(Items(folder), {str(tmp_path / "hf")!r})
        print((peak() - before) >> 10)
    """
    large = {"a": torch.zeros(1 << 14, 1 << 12), "b": {"c": torch.arange(float(1 << 26))}}
    dcp.save(large, checkpoint_id=tmp_path / "sharded", no_dist=True)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 200
    assert same(torch.load(tmp_path / "ours.pt", mmap=True), large)


def test_what_torch_cannot_lay_out_beforehand_is_exported_too(folder, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("this release cannot skip data")

    monkeypatch.setattr(torch.serialization, "skip_data", refuse)
    to_torch_file(folder, tmp_path / "ours.pt")
    assert same(torch.load(tmp_path / "ours.pt")["state_dict"], state()["state_dict"])


def test_nothing_is_left_of_an_export_that_fails(folder, tmp_path):
    (tmp_path / "there.pt").write_bytes(b"mine")
    with pytest.raises(ExportError, match="exists"):
        to_torch_file(folder, tmp_path / "there.pt")
    with pytest.raises(ExportError, match="No such file"):
        to_torch_file(folder, tmp_path / "nowhere" / "ours.pt")
    with pytest.raises(ExportError, match="names begin with: optimizer_0, state_dict"):
        to_safetensors(Items(folder), tmp_path / "hf", prefix="model.")
    with pytest.raises(ExportError, match="max_shard_size"):
        to_safetensors(Items(folder), tmp_path / "hf", max_shard_size=0)
    with pytest.raises(FileNotFoundError, match=".metadata"):
        to_torch_file(folder_of(tmp_path, ""), tmp_path / "ours.pt")
    (data,) = (tmp_path / "sharded").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 3000)
    with pytest.raises(CorruptCheckpointError, match="ends at byte"):
        to_torch_file(folder_of(tmp_path), tmp_path / "ours.pt")
    assert (tmp_path / "there.pt").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["sharded", "there.pt"]


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/evil-was-here",)


def test_what_is_stored_runs_no_code(tmp_path):
    dcp.save({"evil": Evil(), "x": torch.ones(2)}, checkpoint_id=tmp_path / "sharded", no_dist=True)
    with pytest.raises(RestoreError, match="weights_only"):
        to_torch_file(folder_of(tmp_path), tmp_path / "ours.pt")
    (tmp_path / "sharded" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CorruptCheckpointError, match="it names posix.mkdir"):
        to_torch_file(folder_of(tmp_path), tmp_path / "ours.pt")
    assert not os.path.exists("/tmp/evil-was-here")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", ""])
def test_metadata_names_no_file_outside(path, folder):
    with open(f"{folder.where}/.metadata", "rb") as file:
        raw = file.read()
    found = pickle.loads(raw)
    next(iter(found.storage_data.values())).relative_path = path
    with pytest.raises(CorruptCheckpointError, match="not a file of its folder"):
        parse_metadata(pickle.dumps(found), tier="durable", where="there")
    for cut in range(0, len(raw), 97):
        with pytest.raises(CorruptCheckpointError):
            parse_metadata(raw[:cut], tier="durable", where="there")


# ------------------------------------------------------------------------- from both kinds of folders
def test_the_command_exports_what_our_writer_saved_and_finds_damage(s3_url, memory_dir, tmp_path):
    from tiered_checkpoint_io import TieredStorageWriter

    writer = TieredStorageWriter(dirpath=s3_url, memory_dir=memory_dir, wait=True)
    for step in (1, 2):
        dcp.save({**state(), "epoch": step}, checkpoint_id=f"step_{step}", storage_writer=writer)
    store = writer.session.durable()
    exported = export_checkpoint(s3_url, "tiered:latest", tmp_path / "newest.pt")
    assert exported == [tmp_path / "newest.pt"]
    assert same(torch.load(tmp_path / "newest.pt"), {**torch.load(tmp_path / "newest.pt"), "epoch": 2})
    for arguments in (
        ["step_1", str(tmp_path / "one.pt")],
        ["step_1", str(tmp_path / "hf"), "--format", "safetensors"],
    ):
        assert CliRunner().invoke(app, ["get", s3_url, *arguments]).exit_code == 0
    assert torch.load(tmp_path / "one.pt")["epoch"] == 1
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), state()["state_dict"])
    key = next(info.key for info in store.list("step_1/") if info.key.endswith(".distcp"))
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(CorruptCheckpointError, match="differ from their hash"):
        export_checkpoint(s3_url, "step_1", tmp_path / "bad.pt")
    with pytest.raises(CheckpointNotFoundError, match="step_7"):
        export_checkpoint(s3_url, "step_7", tmp_path / "bad.pt")
    with pytest.raises(ConfigError, match="allowed: torch, safetensors"):
        export_checkpoint(s3_url, "step_2", tmp_path / "bad.pt", format="zip")
    assert not (tmp_path / "bad.pt").exists()
    writer.close()


def test_folders_that_plain_dcp_wrote(folder, tmp_path):
    assert export_checkpoint(tmp_path, "sharded", tmp_path / "ours.pt") == [tmp_path / "ours.pt"]
