"""The command that makes checkpoints of others committed ones: each kind is loaded again, bytes unchanged."""

import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from support import sagemaker_writer
from support.documented import document_of
from support.launch import free_port
from support.supporting import build
from torch.distributed.checkpoint.metadata import Metadata
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp, find_latest
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError
from tiered_checkpoint_io.imports import importing

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def command(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def imported(*arguments):
    done = command("import", *arguments, "--json")
    document = document_of("import", done)
    assert document["imported"] == (done.exit_code == 0)
    return done.exit_code, {row["name"]: row for row in document["checkpoints"]}


def fit(folder, max_steps, **options):
    trainer = Trainer(
        default_root_dir=folder,
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{key: value for key, value in options.items() if key == "plugins"},
    )
    trainer.fit(BoringModel(), ckpt_path=options.get("ckpt_path"))
    return trainer


@dataclass
class _SageMakerStorageInfo:
    rank: int
    offset: int
    length: int


#: Where the library has it.
_SageMakerStorageInfo.__module__ = "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info"


def as_sagemaker_writes(state, base, step, monkeypatch):
    """A step of one rank: DCP's items in ``checkpoint.pt``, and metadata with the library's own class in it."""
    name = _SageMakerStorageInfo.__module__
    plain = base / "plain"
    torch_dcp.save(state, checkpoint_id=plain)
    metadata: Metadata = pickle.loads((plain / ".metadata").read_bytes())
    metadata.storage_data = {
        index: _SageMakerStorageInfo(0, info.offset, info.length) for index, info in metadata.storage_data.items()
    }
    folder = base / "ns" / "rank_0" / f"step_{step}"
    folder.mkdir(parents=True)
    (plain / "__0_0.distcp").rename(folder / "checkpoint.pt")
    with monkeypatch.context() as patch:
        for length in range(1, 5):
            patch.setitem(sys.modules, ".".join(name.split(".")[:length]), module := types.ModuleType("library"))
        module._SageMakerStorageInfo = _SageMakerStorageInfo
        (folder / "metadata.metadata").write_bytes(pickle.dumps(metadata))
    (plain / ".metadata").unlink()
    return folder


def test_a_training_goes_on_from_lightnings_own_checkpoints(tmp_path, memory_dir):
    for steps in (2, 4):
        fit(tmp_path, steps).save_checkpoint(tmp_path / "old" / f"epoch=0-step={steps}.ckpt")
    fit(tmp_path, 1).save_checkpoint(tmp_path / "old" / "weights.ckpt", weights_only=True)
    run = tmp_path / "run"
    status, rows = imported(tmp_path / "old", run)
    assert status == 0
    assert {name: (row["step"], row["resumable"]) for name, row in rows.items()} == {
        "weights.ckpt": (1, False),
        "epoch=0-step=2.ckpt": (2, True),
        "epoch=0-step=4.ckpt": (4, True),
    }
    name = "epoch=0-step=4.ckpt"
    assert (run / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    assert command("verify", run, "--memory-dir", memory_dir).exit_code == 0
    io = TieredCheckpointIO(dirpath=str(run), memory_dir=memory_dir)
    assert fit(tmp_path, 6, plugins=[io], ckpt_path="tiered:latest").global_step == 6
    assert io.checkpointer.restored.name == name
    # Once more: there is nothing to do, and that is no error.
    status, rows = imported(tmp_path / "old", run)
    assert (status, {(row["state"], row["earlier"]) for row in rows.values()}) == (0, {("imported", True)})
    # Nothing is overwritten unless that is asked for.
    for file in (tmp_path / "old").iterdir():
        os.utime(file, (1, 1))
    status, rows = imported(tmp_path / "old", run)
    assert (status, {row["state"] for row in rows.values()}) == (1, {"exists"})
    (run / "other.ckpt").write_text("somebody's file")
    status, rows = imported(tmp_path / "old" / name, run, "--name", "other.ckpt")
    assert (status, rows["other.ckpt"]["state"]) == (1, "exists")
    assert imported(tmp_path / "old" / name, run, "--name", "other.ckpt", "--force")[0] == 0
    assert command("verify", run, "other.ckpt", "--tier", "durable").exit_code == 0


def files_in(folder):
    folder.mkdir()
    for step in (1, 2, 3):
        torch.save({"global_step": step, "optimizer_states": []}, folder / f"step={step}.ckpt")
    return folder


def test_the_latest_is_that_of_the_highest_step_whatever_its_name(tmp_path):
    """As Lightning's ModelCheckpoint leaves them with save_last, beside weights, and what is no checkpoint."""
    source = tmp_path / "old"
    source.mkdir()
    names = {"last.ckpt": 9, "epoch=0-step=5.ckpt": 5, "epoch=1-step=7.ckpt": 7, "best.ckpt": 6}
    for age, (name, step) in enumerate(names.items()):
        torch.save({"global_step": step, "optimizer_states": [], "state_dict": {}}, source / name)
        os.utime(source / name, (1e9 - age, 1e9 - age))
    torch.save({"weight": torch.ones(2)}, source / "weights.pt")
    (source / "damaged.ckpt").write_bytes(b"nothing")
    status, rows = imported(source, tmp_path / "run")
    assert (status, rows.pop("damaged.ckpt")["state"]) == (1, "failed")
    assert list(rows) == ["weights.pt", "epoch=0-step=5.ckpt", "best.ckpt", "epoch=1-step=7.ckpt", "last.ckpt"]
    latest = find_latest(tmp_path / "run")
    assert (latest.name, latest.step) == ("last.ckpt", 9)


def test_a_pipe_that_nothing_reads_does_not_stop_it(tmp_path):
    source, run = files_in(tmp_path / "old"), tmp_path / "run"
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "tiered_checkpoint_io", "import", source, run]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert sorted(path.name for path in run.glob("*.ckpt")) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]


def test_an_import_goes_on_where_an_earlier_one_was_interrupted(tmp_path):
    source, run = files_in(tmp_path / "old"), tmp_path / "run"
    (source / "step=3.ckpt").rename(tmp_path / "later")
    assert imported(source, run)[0] == 0
    (tmp_path / "later").rename(source / "step=3.ckpt")
    status, rows = imported(source, run)
    assert (status, [row["earlier"] for row in rows.values()]) == (0, [True, True, False])
    # Between those that are there, one more would be the newest.
    torch.save({"global_step": 2, "optimizer_states": []}, source / "step=2-v1.ckpt")
    (run / "step=2.ckpt").unlink()
    (run / ".tiered" / "manifests" / "step=2.ckpt.json").unlink()
    status, rows = imported(source, run)
    assert (status, rows["step=1.ckpt"]["earlier"], rows["step=3.ckpt"]["state"]) == (1, True, "exists")


def test_an_import_goes_on_where_an_earlier_one_was_killed(tmp_path, monkeypatch):
    """Its files are there, and no manifest; a file of the same size that is another's stays as it is."""
    source, run = files_in(tmp_path / "old"), tmp_path / "run"
    torch_dcp.save({"weights": torch.arange(1000.0)}, checkpoint_id=source / "step_4")
    (run / "step_4").mkdir(parents=True)
    for name in ("step=1.ckpt", "step_4/__0_0.distcp", "step_4/.metadata"):
        shutil.copyfile(source / name, run / name)
    others = b"?" * (source / "step=2.ckpt").stat().st_size
    (run / "step=2.ckpt").write_bytes(others)

    def fails(*_, **options):
        raise CorruptCheckpointError("amid the upload")

    with monkeypatch.context() as patch:
        patch.setattr(importing.commit, "commit", fails)
        assert imported(source, run)[0] == 1
    # They may be others' all the same: an import that fails removes none.
    assert (run / "step=1.ckpt").exists()
    status, rows = imported(source, run)
    assert {name: row["state"] for name, row in rows.items()} == {
        "step=1.ckpt": "imported",
        "step=2.ckpt": "exists",
        "step=3.ckpt": "imported",
        "step_4": "imported",
    }
    assert (status, (run / "step=2.ckpt").read_bytes()) == (1, others)
    assert command("verify", run, "--tier", "durable").exit_code == 0


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_what_is_written_to_while_it_is_imported_is_not_imported(force, tmp_path, monkeypatch):
    source, run = files_in(tmp_path / "old"), tmp_path / "run"
    hashed = importing.hashed

    def late(path, *arguments, **options):
        found = hashed(path, *arguments, **options)
        if path == "step=2.ckpt":
            torch.save({"global_step": 3, "optimizer_states": []}, source / path)
        return found

    monkeypatch.setattr(importing, "hashed", late)
    status, rows = imported(source, run, *force)
    assert (status, [row["state"] for row in rows.values()]) == (1, ["imported", "failed", "imported"])
    assert "it was written to while it was imported" in rows["step=2.ckpt"]["error"]
    assert command("verify", run, "--tier", "durable").exit_code == 0
    assert not (run / "step=2.ckpt").exists()


def test_sharded_checkpoints_of_torch_and_of_the_sagemaker_library(tmp_path, memory_dir, monkeypatch):
    state = {"weights": torch.arange(1000.0), "step": 7}
    torch_dcp.save(state, checkpoint_id=tmp_path / "dcp" / "step_6")
    as_sagemaker_writes(state, tmp_path / "smp", 7, monkeypatch)
    run = tmp_path / "run"
    assert imported(tmp_path / "dcp" / "step_6", run)[1]["step_6"]["kind"] == "sharded"
    status, rows = imported(tmp_path / "smp" / "ns", run)
    assert (status, list(rows), rows["step_7"]["step"]) == (0, ["step_7"], 7)
    for options in ({"checkpoint_id": "step_6"}, {}):
        loaded = {"weights": torch.zeros(1000), "step": 0}
        dcp.load(loaded, dirpath=str(run), memory_dir=memory_dir, **options)
        assert torch.equal(loaded["weights"], state["weights"])
        assert loaded["step"] == 7
    # Plain DCP reads it, too.
    loaded = {"weights": torch.zeros(1000)}
    torch_dcp.load(loaded, checkpoint_id=run / "step_7")
    assert torch.equal(loaded["weights"], state["weights"])


def test_what_is_there_is_replaced_as_it_is_advised(tmp_path, memory_dir, s3_url):
    """A sharded one has files of the same names, which its bytes tell: only another name is left for it."""
    torch.save({"global_step": 1, "optimizer_states": []}, tmp_path / "step=1.ckpt")
    torch_dcp.save({"weights": torch.zeros(9)}, checkpoint_id=tmp_path / "step_1")
    run, advice = s3_url, {"step=1.ckpt": ["--force"], "step_1": ["--name", "another"]}
    for name, given in advice.items():
        assert imported(tmp_path / name, run)[0] == 0
        if name == "step_1":
            torch_dcp.save({"weights": torch.ones(9)}, checkpoint_id=tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
        for forced in ([], ["--force"] if name == "step_1" else []):
            done = command("import", tmp_path / name, run, *forced)
            assert done.exit_code == 1 and done.stdout.startswith("exists"), done.output
            assert given[0] in done.stdout and ("--force" in done.stdout) == (given == ["--force"]), done.stdout
        assert command("import", tmp_path / name, run, *given).exit_code == 0
    assert command("verify", run, "--tier", "durable").exit_code == 0
    for name, value in {"step_1": 0.0, "another": 1.0}.items():
        loaded = {"weights": torch.full((9,), 5.0)}
        dcp.load(loaded, checkpoint_id=name, dirpath=run, memory_dir=memory_dir)
        assert torch.equal(loaded["weights"], torch.full((9,), value))


@pytest.mark.parametrize("now", [False, pytest.param(True, marks=pytest.mark.matrix)], ids=["kept", "written now"])
def test_what_three_ranks_saved_by_the_sagemaker_library_itself(now, tmp_path, memory_dir):
    source = Path(__file__).parents[1] / "data" / "sagemaker"
    if now:
        pytest.importorskip("amzn_sagemaker_checkpointing")
        pytest.importorskip("s3torchconnector")
        source, script = tmp_path / "ns", sagemaker_writer.__file__
        port = str(free_port())
        ranks = [subprocess.Popen([sys.executable, script, source, str(rank), "3", port]) for rank in range(3)]
        assert [each.wait(100) for each in ranks] == [0, 0, 0]
    status, rows = imported(source, tmp_path / "run")
    assert (status, rows["step_5"]["step"], rows["step_5"]["kind"]) == (0, 5, "sharded")
    for load, options in (
        (torch_dcp.load, {"checkpoint_id": tmp_path / "run" / "step_5"}),
        (dcp.load, {"dirpath": str(tmp_path / "run"), "memory_dir": memory_dir}),
    ):
        loaded = {
            "model": {name: torch.zeros_like(value) for name, value in sagemaker_writer.model().items()},
            "step": 0,
        }
        load(loaded, **options)
        assert all(torch.equal(loaded["model"][name], value) for name, value in sagemaker_writer.model().items())
        assert loaded["step"] == 5


def test_what_is_damaged_or_hostile_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    run, source = tmp_path / "run", tmp_path / "smp"
    folder = as_sagemaker_writes({"weights": torch.arange(1000.0)}, source, 7, monkeypatch)
    (folder / "checkpoint.pt").write_bytes((folder / "checkpoint.pt").read_bytes()[:-1])
    status, rows = imported(source / "ns", run)
    assert (status, rows["step_7"]["state"]) == (1, "failed")
    assert "__0_0.distcp has" in rows["step_7"]["error"]

    class Runs:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (folder / "metadata.metadata").write_bytes(pickle.dumps(Runs()))
    torch.save({"global_step": 1, "it": Runs()}, tmp_path / "hostile.ckpt")
    (tmp_path / "text.ckpt").write_text("text")
    status, rows = imported(source / "ns", run)
    assert "which torch.distributed.checkpoint does not write" in rows["step_7"]["error"]
    assert "not a file that torch.save writes" in imported(tmp_path / "text.ckpt", run)[1]["text.ckpt"]["error"]
    # Its bytes may be kept: nothing in them is run.
    assert imported(tmp_path / "hostile.ckpt", run)[1]["hostile.ckpt"]["step"] == 1
    assert not (tmp_path / "ran").exists()
    assert sorted(path.name for path in run.iterdir() if path.is_file()) == ["hostile.ckpt"]
    for missing in (tmp_path / "nowhere", tmp_path / "ran", run / ".tiered"):
        assert isinstance(command("import", missing, run).exception, CheckpointNotFoundError)
    assert command("import", tmp_path / "hostile.ckpt", run, "--name", "../x").exit_code == 2


@pytest.mark.matrix
def test_from_s3_and_nemos_archive(tmp_path, memory_dir, s3_server, s3_bucket):
    torch.save({"weights": torch.ones(10)}, tmp_path / "model_weights.ckpt")
    with tarfile.open(tmp_path / "m.nemo", "w") as archive:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            (tmp_path / "model_config.yaml").write_text("{}")
            archive.add(tmp_path / name, arcname=f"./{name}")
    url = f"s3://{s3_bucket}/run"
    status, rows = imported(tmp_path / "m.nemo", url)
    assert (status, rows["m.ckpt"]["resumable"]) == (0, False)
    # A folder there, and files that lie where they are imported to.
    s3_server.client.put_object(
        Bucket=s3_bucket, Key="plain/step=3.ckpt", Body=(tmp_path / "model_weights.ckpt").read_bytes()
    )
    back = imported(f"s3://{s3_bucket}/plain/step=3.ckpt", tmp_path / "back", "--name", "n.ckpt")
    assert (back[0], torch.equal(torch.load(tmp_path / "back" / "n.ckpt")["weights"], torch.ones(10))) == (0, True)
    assert list(imported(f"s3://{s3_bucket}/plain", f"s3://{s3_bucket}/plain")[1]) == ["step=3.ckpt"]
    assert isinstance(command("import", f"{url}/m.ckpt", tmp_path / "ours").exception, UsageError)
    assert command("verify", f"s3://{s3_bucket}/plain", "--memory-dir", memory_dir).exit_code == 0


def test_a_checkpoint_of_this_package_is_not_made_one_anew_without_what_its_manifest_tells(tmp_path, memory_dir):
    run, other = tmp_path / "run", tmp_path / "other"
    io = build(TieredCheckpointIO, dirpath=str(run), memory_dir=memory_dir, drain="thread")
    io.save_checkpoint({"global_step": 5, "optimizer_states": []}, f"{run}/sub/a.ckpt")
    io.teardown()
    writer = build(TieredStorageWriter, str(run), memory_dir=memory_dir, drain="thread")
    torch_dcp.save({"weight": torch.ones(3)}, storage_writer=writer, checkpoint_id="step_7")
    writer.close()
    torch.save({"global_step": 3, "optimizer_states": []}, run / "sub" / "plain.ckpt")
    for source, ours in ((run, "step_7"), (run / "step_7", "step_7"), (run / "sub", "sub/a.ckpt")):
        done = command("import", source, other)
        assert isinstance(done.exception, UsageError), done.output
        assert f"{ours} is a checkpoint of this package already" in str(done.exception)
    assert not other.exists()
    assert imported(run / "sub" / "plain.ckpt", other)[0] == 0, "beside them, others may lie"
    status, rows = imported(run, run)
    assert (status, {name: row["state"] for name, row in rows.items()}) == (
        1,
        {"sub/plain.ckpt": "imported", "sub/a.ckpt": "exists", "step_7": "exists"},
    )
    # As the error says.
    shutil.copytree(run, tmp_path / "copied")
    assert command("verify", tmp_path / "copied", "--tier", "durable").exit_code == 0
    assert find_latest(tmp_path / "copied").name == "sub/plain.ckpt"
