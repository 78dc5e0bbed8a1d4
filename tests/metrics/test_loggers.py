"""A logger of Lightning's gets the metrics of saves and uploads."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_csv(runs, tmp_path, asynchronous):
    callback = TieredModelCheckpoint(s3_every_n_train_steps=10, save_top_k=-1)
    runs.fit(callback, logger=CSVLogger(tmp_path / "logs"), asynchronous=asynchronous)
    (path,) = Path(tmp_path, "logs").rglob("metrics.csv")
    rows = [*csv.DictReader(path.read_text().splitlines())]
    assert [float(row["checkpoint/durable_step"]) for row in rows if row["checkpoint/durable_step"]] == [10, 20]
    assert all(float(row["checkpoint/capture_s"]) > 0 for row in rows if row["checkpoint/stall_s"])
