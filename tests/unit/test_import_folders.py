"""Imports of the folders that Lightning's sharded strategies write, and imports that end amid their work."""

import os
import shutil
import subprocess
import sys
import tarfile
from contextlib import closing

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.documented import document_of
from typer.testing import CliRunner

from tiered_checkpoint_io import find_latest
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.manifests import Manifests, read_manifest
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.imports.importing import import_checkpoints
from tiered_checkpoint_io.imports.layouts import find
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores.directory import DirectoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def imported(*arguments):
    done = CliRunner().invoke(app, ["import", *map(str, arguments), "--json"])
    return done.exit_code, {row["name"]: row for row in document_of("import", done)["checkpoints"]}


def as_lightning_saves(folder, step, *, weights_only=False, rest_name="meta.pt"):
    """What FSDPStrategy and ModelParallelStrategy write: shards, and ``meta.pt`` with all else of the state."""
    shards = {"model": {"w": torch.full((9,), float(step))}}
    rest = {"pytorch-lightning_version": "2.5.0", "global_step": step, "epoch": step // 4, "loops": {}}
    if not weights_only:
        shards["optimizer_0"] = {"state": {"w": {"exp_avg": torch.ones(9)}}}
        rest["lr_schedulers"] = []
    torch_dcp.save(shards, checkpoint_id=folder, no_dist=True)
    torch.save(rest, folder / rest_name)


def test_the_last_of_lightnings_sharded_checkpoints_is_the_latest(tmp_path):
    """As ModelCheckpoint leaves them with save_last: the folder's name tells no step, and the weights no optimizer."""
    source, run = tmp_path / "old", tmp_path / "run"
    as_lightning_saves(source / "last.ckpt", 9)
    as_lightning_saves(source / "weights.ckpt", 11, weights_only=True)
    as_lightning_saves(source / "epoch=0-step=5.ckpt", 5)
    # As our own strategies name it where runs share a name.
    as_lightning_saves(source / "preempted.ckpt", 7, rest_name="meta-0123abcd.pt")
    torch_dcp.save({"w": torch.ones(9)}, checkpoint_id=source / "plain", no_dist=True)
    (source / "plain" / "meta-info.pt").write_text("of somebody's own")
    status, rows = imported(source, run)
    assert (status, [(name, row["step"], row["resumable"]) for name, row in rows.items()]) == (
        0,
        [
            ("plain", None, True),
            ("epoch=0-step=5.ckpt", 5, True),
            ("preempted.ckpt", 7, True),
            ("last.ckpt", 9, True),
            ("weights.ckpt", 11, False),
        ],
    )
    latest = find_latest(run)
    assert (latest.name, latest.step) == ("last.ckpt", 9)
    assert read_manifest(DirectoryStore(run), "last.ckpt").content.epoch == 2
    # What Lightning itself could not resume from is not made a checkpoint.
    (source / "last.ckpt" / "meta.pt").write_bytes(b"cut off")
    status, rows = imported(source / "last.ckpt", tmp_path / "other")
    assert (status, rows["last.ckpt"]["state"]) == (1, "failed")
    assert "meta.pt" in rows["last.ckpt"]["error"]


TRAINING = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed._composable.fsdp import fully_shard
from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.strategies import TieredModelParallelStrategy

class Model(BoringModel):
    def configure_model(self):
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

old, run, memory_dir = sys.argv[1:]
quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "limit_val_batches": 0, "enable_progress_bar": False}
saves = [
    ModelCheckpoint(dirpath=old, every_n_train_steps=2, save_top_k=-1, save_last=True),
    ModelCheckpoint(dirpath=old, every_n_train_steps=4, filename="weights", save_weights_only=True),
]
if not run:
    Trainer(strategy=ModelParallelStrategy(), callbacks=saves, max_steps=4, **quiet).fit(Model())
else:
    io = TieredCheckpointIO(dirpath=run, memory_dir=memory_dir)
    trainer = Trainer(strategy=TieredModelParallelStrategy(), plugins=[io], max_steps=6, **quiet)
    trainer.fit(Model(), ckpt_path="tiered:latest")
    print("went on from", io.checkpointer.restored.name, "to", trainer.global_step)
"""


@pytest.mark.matrix
def test_a_training_goes_on_from_lightnings_own_sharded_checkpoints(tmp_path, memory_dir):
    old, run = tmp_path / "old", tmp_path / "run"

    def train(*arguments):
        line = [sys.executable, "-W", "ignore", "-c", TRAINING, *map(str, arguments)]
        return subprocess.run(line, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=100).stdout

    train(old, "", "")
    status, rows = imported(old, run)
    assert (status, {name: (row["step"], row["resumable"]) for name, row in rows.items()}) == (
        0,
        {
            "epoch=0-step=2.ckpt": (2, True),
            "epoch=0-step=4.ckpt": (4, True),
            "last.ckpt": (4, True),
            "weights.ckpt": (4, False),
        },
    )
    assert "went on from last.ckpt to 6" in train(old, run, memory_dir)


def test_weights_are_the_latest_though_nemo_writes_their_averages_later(tmp_path):
    source = tmp_path / "old"
    source.mkdir()
    for at, step in enumerate((5, 9)):
        for late, name in enumerate((f"step={step}.ckpt", f"step={step}-EMA.ckpt")):
            torch.save({"global_step": step, "optimizer_states": []}, source / name)
            os.utime(source / name, (1e9 + 2 * at + late,) * 2)
    status, rows = imported(source, tmp_path / "run")
    assert (status, list(rows)) == (0, ["step=5-EMA.ckpt", "step=5.ckpt", "step=9-EMA.ckpt", "step=9.ckpt"])
    assert find_latest(tmp_path / "run").name == "step=9.ckpt"


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("late", ["x.ckpt", "x.nemo"])
def test_of_two_that_would_get_one_name_the_file_gets_it_that_has_it(late, force, tmp_path):
    source, run = tmp_path / "old", tmp_path / "run"
    source.mkdir()
    torch.save({"w": torch.ones(9)}, tmp_path / "model_weights.ckpt")
    torch.save({"global_step": 3, "optimizer_states": []}, source / "x.ckpt")
    with tarfile.open(source / "x.nemo", "w") as archive:
        archive.add(tmp_path / "model_weights.ckpt", arcname="./model_weights.ckpt")
    os.utime(source / late, (2e9, 2e9))
    done = CliRunner().invoke(app, ["import", str(source), str(run), "--json", *force])
    rows = [(row["state"], row["resumable"]) for row in document_of("import", done)["checkpoints"]]
    assert (done.exit_code, rows) == (1, [("exists", False), ("imported", True)])
    assert (run / "x.ckpt").read_bytes() == (source / "x.ckpt").read_bytes()
    said = CliRunner().invoke(app, ["import", str(source), str(run), *force]).stdout
    assert "x.nemo would get the name of x.ckpt; import it alone, with another --name" in said
    assert imported(source / "x.nemo", run, "--name", "weights.ckpt")[0] == 0
    assert find_latest(run).name == "x.ckpt"


def test_what_can_never_be_imported_is_in_no_ones_way(tmp_path):
    """The same call again: what an earlier one made is left as it is, and the damaged file named once more."""
    source, run = tmp_path / "old", tmp_path / "run"
    source.mkdir()
    for step in (1, 2, 3):
        torch.save({"global_step": step, "optimizer_states": []}, source / f"step={step}.ckpt")
    (source / "damaged.ckpt").write_bytes(b"nothing")
    for is_second in (False, True):
        status, rows = imported(source, run)
        assert status == 1
        assert [(name, row["state"], row["earlier"]) for name, row in rows.items()] == [
            ("damaged.ckpt", "failed", False),
            *((f"step={step}.ckpt", "imported", is_second) for step in (1, 2, 3)),
        ]


@pytest.fixture(params=["full", "sharded"])
def source(request, tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    if request.param == "full":
        torch.save({"global_step": 1, "optimizer_states": [], "w": torch.ones(999)}, folder / "new.ckpt")
    else:
        torch_dcp.save({"w": torch.ones(999)}, checkpoint_id=folder / "new.ckpt", no_dist=True)
    return folder


def bring(source, run, **options):
    with closing(DirectoryStore(source)) as others, closing(DirectoryStore(run)) as store:
        found = find([(entry.key, entry.modified) for entry in others.list("")], base="")
        return import_checkpoints(others, found, store, Place(str(run)), **options)


def files_of(run):
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("force", [False, True])
def test_an_import_that_is_interrupted_leaves_nothing(force, source, tmp_path, monkeypatch):
    """Of many chunks it has an index, which is written before its file is."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "others.txt").write_text("somebody's file")
    before = files_of(run)
    monkeypatch.setattr(commit, "_MAX_INLINE", 0)

    def stop(_):
        if (run / ".tiered" / "saves").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring(source, run, force=force, progress=stop)
    assert files_of(run) == before

    def refused(*_):
        raise StoreError("refused", operation="put")

    with monkeypatch.context() as patch:
        patch.setattr(Manifests, "put", refused)
        with pytest.raises(StoreError, match="refused"):
            bring(source, run, force=force)
    assert files_of(run) == before
    assert [each.state for each in bring(source, run)] == ["imported"]


@pytest.mark.parametrize("force", [False, True])
def test_an_import_that_is_interrupted_keeps_what_was_there(force, source, tmp_path, monkeypatch):
    """Files that lie where they are imported to, or that an import that was killed has left."""
    monkeypatch.setattr(commit, "_MAX_INLINE", 0)

    def refused(*_):
        raise StoreError("refused", operation="put")

    monkeypatch.setattr(Manifests, "put", refused)
    shutil.copytree(source, tmp_path / "copied")
    for run in (source, tmp_path / "copied"):
        before = files_of(run)
        with pytest.raises(StoreError, match="refused"):
            bring(source, run, force=force)
        left = files_of(run)
        # What marks that the file under this name was about to change is in no one's way.
        left.pop(manifest_key("new.ckpt"))
        assert left == before


def test_an_import_by_force_that_is_interrupted_leaves_the_old_one(tmp_path, monkeypatch):
    source, run = tmp_path / "source", tmp_path / "run"
    monkeypatch.setattr(commit, "_MAX_INLINE", 0)
    source.mkdir()
    torch.save({"global_step": 1, "optimizer_states": []}, source / "new.ckpt")
    assert [each.state for each in bring(source, run)] == ["imported"]
    before = files_of(run)
    torch.save({"global_step": 2, "optimizer_states": []}, source / "new.ckpt")
    os.utime(source / "new.ckpt", (1, 1))

    def stop(_):
        if len(list((run / ".tiered" / "saves").iterdir())) > 1:
            raise KeyboardInterrupt

    # Once it is noted that the file may be either one, an interrupt leaves the note; before, nothing.
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_hold_both", lambda *_, **__: stop(0))
        with pytest.raises(KeyboardInterrupt):
            bring(source, run, force=True)
    assert files_of(run) == before
    with pytest.raises(KeyboardInterrupt):
        bring(source, run, force=True, progress=stop)
    assert CliRunner().invoke(app, ["verify", str(run), "--tier", "durable"]).exit_code == 0
    assert find_latest(run).name == "new.ckpt"
    assert (run / "new.ckpt").read_bytes() == before["new.ckpt"]
    assert [each.state for each in bring(source, run, force=True)] == ["imported"]
    assert torch.load(run / "new.ckpt")["global_step"] == 2
