"""Trainings whose metrics are looked at."""

import pytest
from support.training import Runs

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint


@pytest.fixture
def runs(tmp_path, memory_dir):
    return Runs(str(tmp_path / "durable"), memory_dir, tmp_path)


@pytest.fixture
def dead(runs):
    """A job that died at step 17, after a durable checkpoint of step 10 and one of step 15 in memory."""
    checkpoints = TieredModelCheckpoint(memory_every_n_train_steps=5, s3_every_n_train_steps=10)
    runs.fit(checkpoints, stop_at=17, max_steps=20)
    return runs
