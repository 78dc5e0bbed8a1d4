"""Exports of full checkpoints: the verified file itself, or safetensors of its state."""

import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.supporting import build
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ExportError,
    RestoreError,
    StoreChangedError,
)
from tiered_checkpoint_io.export import checkpoint, export_checkpoint, find
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.directory import DirectoryStore


def model():
    torch.manual_seed(0)
    weight = torch.randn(40, 70)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": torch.randn(7, 5).t(),
        "part": torch.randn(9, 9)[2:5],
        "bf16": torch.randn(3, 4).bfloat16(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }


def state(step):
    return {
        "pytorch-lightning_version": "2.5.0",
        "global_step": step,
        "epoch": 0,
        "loops": {},
        "state_dict": model(),
        "optimizer_states": [{"state": {0: {"m": torch.randn(9)}}, "param_groups": [{"lr": 0.1}]}],
    }


@pytest.fixture
def dirpath(tmp_path, memory_dir):
    io = build(TieredCheckpointIO, tmp_path / "durable", memory_dir=memory_dir, drain="thread")
    for step in (500, 100):
        io.save_checkpoint(state(step), f"step={step}.ckpt")
    # Weights alone: later, but nothing to resume from.
    weights = {key: value for key, value in state(600).items() if key not in ("loops", "optimizer_states")}
    io.save_checkpoint(weights, "weights.ckpt")
    io.teardown()
    return str(tmp_path / "durable")


def exported(*arguments):
    return CliRunner().invoke(app, ["get", *map(str, arguments)])


def test_a_full_checkpoint_is_copied_and_becomes_safetensors(dirpath, tmp_path):
    """What went back to step 100 on purpose is the latest; a name may be a path below dirpath, as in ls."""
    assert exported(dirpath, "tiered:latest", tmp_path / "latest.pt").exit_code == 0
    assert (tmp_path / "latest.pt").read_bytes() == (tmp_path / "durable" / "step=100.ckpt").read_bytes()
    wanted = {key: (value.dtype, value.tolist()) for key, value in model().items()}

    def loaded(files):
        found = {key: value for file in files for key, value in load_file(file).items()}
        return {key: (value.dtype, value.tolist()) for key, value in found.items()}

    done = exported(dirpath, f"{dirpath}/step=100.ckpt", tmp_path / "hf", "--format", "safetensors")
    assert done.exit_code == 0, done.output
    assert exported(dirpath, "step=100.ckpt", tmp_path / "one.safetensors").exit_code == 0
    export_checkpoint(dirpath, "step=100.ckpt", tmp_path / "shards", format="safetensors", max_shard_size=12_000)
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"], "the copy on the way is gone"
    shards = [*(tmp_path / "shards").glob("*.safetensors")]
    assert (len(shards), len(os.listdir(tmp_path / "shards"))) == (2, 3)
    for files in ([tmp_path / "hf" / "model.safetensors"], [tmp_path / "one.safetensors"], shards):
        assert loaded(files) == wanted
    files = export_checkpoint(dirpath, "step=100.ckpt", tmp_path / "all", format="safetensors", prefix="")
    assert "optimizer_states.0.state.0.m" in load_file(files[0])


def test_a_kill_leaves_no_copy_of_the_checkpoint_behind(dirpath, tmp_path, monkeypatch):
    left, write = [], checkpoint.to_safetensors

    def written(items, target, **options):
        files = write(items, target, **options)
        left.extend(path for path in target.rglob("*") if path.is_file() and path not in files)
        return files

    monkeypatch.setattr(checkpoint, "to_safetensors", written)
    export_checkpoint(dirpath, "step=100.ckpt", tmp_path / "hf", format="safetensors")
    assert left == []


def test_damage_is_found_and_nothing_is_left_of_it(dirpath, tmp_path):
    path = tmp_path / "durable" / "step=100.ckpt"
    good = path.read_bytes()
    for damaged in (good[:-1], good + b"x", good[:3000] + b"?" + good[3001:]):
        path.write_bytes(damaged)
        for arguments in ({}, {"format": "safetensors"}):
            with pytest.raises(CorruptCheckpointError):
                export_checkpoint(dirpath, "step=100.ckpt", tmp_path / "bad", **arguments)
    path.write_bytes(good)
    with pytest.raises(ExportError, match="no tensor's name begins with 'other'"):
        export_checkpoint(dirpath, "step=100.ckpt", tmp_path / "bad", format="safetensors", prefix="other")
    assert sorted(os.listdir(tmp_path)) == ["durable"]
    (tmp_path / "there.pt").touch()
    with pytest.raises(ExportError, match="exists already"):
        export_checkpoint(dirpath, "step=100.ckpt", tmp_path / "there.pt")
    with pytest.raises(CheckpointNotFoundError, match="never"):
        export_checkpoint(dirpath, "never.ckpt", tmp_path / "never.pt")
    assert exported(dirpath, "step=100.ckpt", tmp_path / "zip.pt", "--format", "zip").exit_code == 2


@pytest.mark.parametrize("file_format", ["torch", "safetensors"])
def test_beside_a_run_that_removes_what_is_read(file_format, dirpath, tmp_path, memory_dir, monkeypatch):
    """The latest is then another one, and nothing is damaged."""
    fetch, turns, noise = find.fetch_chunk, [], torch.Generator()
    io = build(TieredCheckpointIO, dirpath, memory_dir=memory_dir, drain="thread")

    def late(*arguments):
        if turns:
            turns.pop()()
        fetch(*arguments)

    def replace_latest():
        io.save_checkpoint(state(700), "step=700.ckpt")
        io.remove_checkpoint("step=100.ckpt")
        io.checkpointer.session.wait()

    def overwrite():
        io.save_checkpoint({**state(501), "noise": torch.randn(9, generator=noise)}, "step=500.ckpt")

    monkeypatch.setattr(find, "fetch_chunk", late)
    turns[:] = [replace_latest]
    export_checkpoint(dirpath, "tiered:latest", tmp_path / "latest", format=file_format)
    if file_format == "torch":
        assert torch.load(tmp_path / "latest")["global_step"] == 700
    turns[:] = [overwrite] * 3
    with pytest.raises(StoreChangedError, match="step=500.ckpt was removed or overwritten while it was read"):
        export_checkpoint(dirpath, "step=500.ckpt", tmp_path / "bad", format=file_format)
    io.teardown()
    assert not (tmp_path / "bad").exists()


def test_the_content_before_while_an_overwrite_is_under_way(dirpath, tmp_path):
    """The manifest already names the new content, whose file has not come yet."""
    store = DirectoryStore(dirpath)
    old, new = (read_manifest(store, name).content for name in ("step=500.ckpt", "step=100.ckpt"))
    (entry,) = new.files
    coming = replace(new, files=(replace(entry, path="step=500.ckpt", hashes=("0" * 32,) * len(entry.hashes)),))
    store.put(manifest_key("step=500.ckpt"), Manifest("step=500.ckpt", coming, previous=(old,)).to_json())
    export_checkpoint(dirpath, "step=500.ckpt", tmp_path / "old.pt")
    assert torch.load(tmp_path / "old.pt")["global_step"] == 500


def test_a_file_of_others_and_what_torch_refuses(tmp_path, caplog):
    torch.save({"w": torch.ones(2), "what": Ellipsis.__class__}, tmp_path / "plain.ckpt")
    assert export_checkpoint(tmp_path, "plain.ckpt", tmp_path / "copy.pt") == [tmp_path / "copy.pt"]
    assert "nothing verifies it" in caplog.text
    with pytest.raises(RestoreError, match="weights_only"):
        export_checkpoint(tmp_path, "plain.ckpt", tmp_path / "hf", format="safetensors")
    trusted = exported(tmp_path, "plain.ckpt", tmp_path / "hf", "--format", "safetensors", "--trust")
    assert trusted.exit_code == 0, trusted.output
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == [1, 1]
