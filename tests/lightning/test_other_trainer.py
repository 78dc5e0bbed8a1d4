"""Trainers of pytorch_lightning, and any that have nothing of ours."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch
import pytest
from support.training import Model

from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.guard import StrategyGuard, ensure_guard
from tiered_checkpoint_io.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


@pytest.mark.parametrize("callback", [PreemptionCheckpoint, TieredModelCheckpoint])
def test_a_trainer_of_pytorch_lightning_with_our_callback_is_refused(callback):
    class Trainer:
        strategy = object()

    with pytest.raises(ConfigError, match=r"in a trainer of pytorch_lightning.*import Trainer from lightning\.pytorch"):
        callback().setup(Trainer(), Model(), "fit")


def test_a_trainer_with_our_io_gets_the_guard():
    trainer = lightning.pytorch.Trainer(accelerator="cpu", **QUIET)
    assert [type(each) for each in trainer.callbacks].count(StrategyGuard) == 1
    # NeMo's exp_manager does this: it may give its IO to a trainer that was made before.
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, StrategyGuard)]
    for _ in range(2):
        ensure_guard(trainer)
    assert [type(each) for each in trainer.callbacks].count(StrategyGuard) == 1


def test_trainers_without_ours_import_none_of_our_code_and_no_line_is_logged():
    code = """
import sys
import lightning.pytorch
lightning.pytorch.Trainer(accelerator="cpu", logger=False)
print(*sorted(name for name in sys.modules if name.startswith("tiered_checkpoint_io")))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "tiered_checkpoint_io tiered_checkpoint_io.entry_points"
    assert "GPU available" in done.stdout + done.stderr, "what Lightning says is seen here"
    assert "entry point" not in done.stdout + done.stderr
