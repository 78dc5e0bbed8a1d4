"""Trainers that are not ours to serve: those of pytorch_lightning, and any that have nothing of ours."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.strategies import SingleDeviceStrategy

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.other_trainer import OtherTrainerGuard

ROOT = Path(__file__).parents[2]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning.*", "ignore:.*LeafSpec.*")


class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, _):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Installs the entry points that pyproject.toml declares."""
    declared = re.findall(r'\[project.entry-points."(.*)"\]\n(.*) = "(.*)"', (ROOT / "pyproject.toml").read_text())
    assert len(declared) == 2
    folder = tmp_path / "tiered_checkpoint_io-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tiered-checkpoint-io\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text("".join(f"[{group}]\n{name} = {at}\n" for group, name, at in declared))
    monkeypatch.syspath_prepend(tmp_path)


def io_at(tmp_path, memory_dir):
    return TieredCheckpointIO(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir, namespace="other")


@pytest.mark.parametrize("given", ["io", "wrapped", "callback", "checkpoint callback"])
def test_a_trainer_of_pytorch_lightning_with_ours_is_refused(tmp_path, memory_dir, given):
    strategy, callbacks = SingleDeviceStrategy(device="cpu"), []
    if given == "io":
        strategy.checkpoint_io = io_at(tmp_path, memory_dir)
    elif given == "wrapped":
        strategy.checkpoint_io = AsyncCheckpointIO(io_at(tmp_path, memory_dir))
    else:
        callbacks = [PreemptionCheckpoint() if given == "callback" else TieredModelCheckpoint()]
    trainer = pytorch_lightning.Trainer(strategy=strategy, callbacks=callbacks, max_steps=1, **QUIET)
    with pytest.raises(ConfigError, match=r"in a trainer of pytorch_lightning.*import Trainer from lightning\.pytorch"):
        trainer.fit(Model())


def test_a_trainer_of_pytorch_lightning_without_ours_trains(tmp_path):
    trainer = pytorch_lightning.Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **QUIET)
    (guard,) = [each for each in trainer.callbacks if isinstance(each, OtherTrainerGuard)]
    trainer.fit(Model())
    assert trainer.global_step == 1
    # Launchers that spawn do this.
    assert isinstance(pickle.loads(pickle.dumps(guard)), OtherTrainerGuard)


def test_trainers_without_ours_import_none_of_our_code_and_no_line_is_logged(tmp_path):
    code = """
import sys
import lightning.pytorch, pytorch_lightning
for package in (lightning.pytorch, pytorch_lightning):
    package.Trainer(accelerator="cpu", logger=False)
print(*sorted(name for name in sys.modules if name.startswith("tiered_checkpoint_io")))
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "tiered_checkpoint_io tiered_checkpoint_io.entry_points"
    assert (done.stdout + done.stderr).count("GPU available") == 2, "what Lightning says is seen here"
    assert "entry point" not in done.stdout + done.stderr
