"""``tiered-ckpt get`` as a torch file and as safetensors: against torch's own conversion."""

import itertools
import json
import os
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.launch import scripts
from support.supporting import build, supported
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import CorruptCheckpointError, RestoreError, TieredCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/evil-was-here",)


def get(*arguments):
    return CliRunner().invoke(app, ["get", *map(str, arguments)])


def got(*arguments):
    done = get(*arguments, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return [each["path"] for each in json.loads(done.stdout)["files"]]


def tensors():
    torch.manual_seed(0)
    weight = torch.randn(40, 70)
    numbers = torch.randn(60, 70, dtype=torch.complex64)
    return {
        "wide": weight,
        "tied": weight,
        "transposed": torch.randn(7, 5).t(),
        "part": torch.randn(9, 9)[2:5],
        "bf16": torch.randn(3, 4, 5).bfloat16(),
        "f8": torch.arange(6.0).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "conjugate": numbers.conj(),
        "negative": torch._neg_view(numbers.real.clone()),
    }


def state(step=1):
    return {
        "pytorch-lightning_version": "2.5.0",
        "global_step": step,
        "epoch": step,
        "loops": {},
        "state_dict": tensors(),
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(2.0), "m": torch.randn(9)}}, "param_groups": [{"lr": 1}]}
        ],
        "names": ["a", "b"],
    }


def same(one, two):
    if isinstance(one, dict):
        return set(one) == set(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        plain = (lambda each: each) if one.is_complex() else lambda each: each.float()
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(plain(one), plain(two))
    return one == two


def saved(kind, dirpath, memory_dir, name, state):
    if kind == "full":
        io = build(TieredCheckpointIO, dirpath, memory_dir=memory_dir, drain="thread")
        io.save_checkpoint(state, name)
        io.teardown()
        return
    writer = build(TieredStorageWriter, dirpath=dirpath, memory_dir=memory_dir, wait=True, drain="thread")
    dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True)
    writer.close()


@pytest.fixture
def run(tmp_path, memory_dir):
    """Returns a dirpath with one state, saved as ``full`` and as ``sharded``."""
    dirpath = str(tmp_path / "run")
    saved("full", dirpath, memory_dir, "full", state(2))
    saved("sharded", dirpath, memory_dir, "step_1", state(1))
    return dirpath


def test_one_torch_file(run, tmp_path):
    assert got(run, "full", tmp_path / "new" / "full.pt") == [str(tmp_path / "new" / "full.pt")]
    assert (tmp_path / "new" / "full.pt").read_bytes() == (tmp_path / "run" / "full").read_bytes()
    got(run, f"{run}/step_1", tmp_path / "ours.pt")
    dcp_to_torch_save(f"{run}/step_1", tmp_path / "theirs.pt")
    ours, theirs = torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "theirs.pt", weights_only=False)
    assert same(ours, theirs)
    assert same(ours["state_dict"], tensors())
    assert sorted(os.listdir(tmp_path)) == ["new", "ours.pt", "run", "theirs.pt"]


@pytest.mark.parametrize("name", ["full", "step_1"])
def test_safetensors(name, run, tmp_path):
    assert same(load_file(*got(run, name, tmp_path / "one.safetensors")), tensors())
    found = load_file(*got(run, name, tmp_path / "all.safetensors", "--prefix", ""))
    assert same(
        {key: value for key, value in found.items() if key.startswith("state_dict.")},
        {f"state_dict.{key}": value for key, value in tensors().items()},
    )
    assert any("optimizer_states" in key for key in found)


def test_shards_of_several_ranks_along_each_dimension(tmp_path, memory_dir):
    script = f"""
        import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard
        from tiered_checkpoint_io import TieredStorageWriter
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=int(sys.argv[1]), world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(35.0 * 12).reshape(35, 12)
        state = {{str(dim): distribute_tensor(whole, mesh, [Shard(dim)]) for dim in (0, 1)}}
        writer = TieredStorageWriter(dirpath="{tmp_path}/run", memory_dir="{memory_dir}", wait=True)
        dcp.save({{"state_dict": state}}, checkpoint_id="step_1", storage_writer=writer)
        writer.close()
    """
    (tmp_path / "save.py").write_text(textwrap.dedent(script))
    with supported(drain="thread"):
        ranks = scripts(tmp_path, tmp_path / "save.py", *(([str(rank)], dict(os.environ)) for rank in (0, 1)))
    assert [each.returncode for each in ranks] == [0, 0], ranks
    whole = torch.arange(35.0 * 12).reshape(35, 12)
    got(f"{tmp_path}/run", "step_1", tmp_path / "ours.pt")
    assert same(torch.load(tmp_path / "ours.pt"), {"state_dict": {"0": whole, "1": whole}})
    assert same(load_file(*got(f"{tmp_path}/run", "step_1", tmp_path / "x.safetensors")), {"0": whole, "1": whole})


@pytest.mark.parametrize(("name", "to"), [*itertools.product(["full", "step_1"], ["bad.pt", "bad.safetensors", "bad"])])
def test_damage_is_found_and_nothing_is_left_of_it(name, to, run, tmp_path):
    line = [run, name, tmp_path / to]
    (path,) = (tmp_path / "run").glob("full" if name == "full" else "step_1/*.distcp")
    good = path.read_bytes()
    for damaged in (
        good[:-1],
        good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :],
        b"",
        *([good + b"x"] if name == "full" else []),
    ):
        path.write_bytes(damaged)
        assert isinstance(get(*line).exception, CorruptCheckpointError)
    path.unlink()
    assert isinstance(get(*line).exception, TieredCheckpointError)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_what_can_not_be_written(run, tmp_path):
    wrong = get(run, "step_1", tmp_path / "x.safetensors", "--prefix", "model.")
    assert "names begin with" in wrong.exception.hint
    assert "optimizer_states, state_dict" in wrong.exception.hint
    (tmp_path / "file").touch()
    for to in ("file/x.pt", "file/x.safetensors"):
        assert "can't be written" in str(get(run, "full", tmp_path / to).exception)
    # If one file exists, none is made.
    (tmp_path / "to" / "step_1").mkdir(parents=True)
    (tmp_path / "to" / "step_1" / ".metadata").touch()
    assert "exists already" in str(get(run, "step_1", tmp_path / "to").exception)
    assert os.listdir(tmp_path / "to" / "step_1") == [".metadata"]
    assert sorted(os.listdir(tmp_path)) == ["file", "run", "to"]


def test_what_is_stored_runs_no_code(tmp_path, memory_dir):
    run = str(tmp_path / "run")
    for kind in ("full", "sharded"):
        saved(
            kind,
            run,
            memory_dir,
            "full" if kind == "full" else "step_1",
            {"x": torch.ones(2), "evil": Ellipsis.__class__},
        )
    assert isinstance(get(run, "step_1", tmp_path / "a.pt").exception, RestoreError)
    for name in ("full", "step_1"):
        to = tmp_path / f"{name}.safetensors"
        if name == "full":
            assert isinstance(get(run, name, to).exception, RestoreError)
        assert get(run, name, to, "--trust").exit_code == 0
        assert load_file(to)["x"].tolist() == [1, 1]
    assert get(run, "step_1", tmp_path / "a.pt", "--trust").exit_code == 0
    assert torch.load(tmp_path / "a.pt", weights_only=False)["evil"] is type(...)
    saved("full", run, memory_dir, "evil", {"x": torch.ones(2), "evil": Evil()})
    assert isinstance(get(run, "evil", tmp_path / "b.safetensors").exception, RestoreError)
    assert not os.path.exists("/tmp/evil-was-here")
