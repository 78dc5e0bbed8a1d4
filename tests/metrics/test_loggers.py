"""Each of Lightning's loggers gets the metrics, and where a checkpoint is, once it is durable."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.urls import notify


def train(runs, logger, **options):
    runs.fit(TieredModelCheckpoint(s3_every_n_train_steps=10, save_top_k=-1), logger=logger, **options)
    return [f"{runs.dirpath}/epoch=0-step={step}.ckpt" for step in (10, 20)]


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_csv(runs, tmp_path, asynchronous):
    urls = train(runs, CSVLogger(tmp_path / "logs"), asynchronous=asynchronous)
    (path,) = Path(tmp_path, "logs").rglob("metrics.csv")
    rows = [*csv.DictReader(path.read_text().splitlines())]
    assert [row["checkpoint/url"] for row in rows if row.get("checkpoint/url")] == urls
    assert [float(row["checkpoint/durable_step"]) for row in rows if row["checkpoint/durable_step"]] == [10, 20]
    assert all(float(row["checkpoint/capture_s"]) > 0 for row in rows if row["checkpoint/stall_s"])


@pytest.mark.matrix
def test_tensorboard(runs, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    urls = train(runs, TensorBoardLogger(tmp_path / "logs"))
    (path,) = Path(tmp_path, "logs").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(path)).Reload()
    texts = events.Tensors("checkpoint/url/text_summary")
    assert [(each.step, each.tensor_proto.string_val[0].decode()) for each in texts] == [(10, urls[0]), (20, urls[1])]
    assert [each.value for each in events.Scalars("checkpoint/durable_step")] == [10, 20]


def test_wandb_uploads_no_file_of_a_directory(monkeypatch):
    """Its own hook would; the artifact refers to the URL."""
    uploaded = []
    monkeypatch.setattr(WandbLogger, "_scan_and_log_checkpoints", uploaded.append)
    logger = object.__new__(WandbLogger)
    logger._log_model, logger._checkpoint_callback = "all", None
    for log_model in ("all", True):
        logger._log_model = log_model
        notify(logger, TieredModelCheckpoint())
    assert not uploaded
    # It would be looked at when the logger ends.
    assert logger._checkpoint_callback is None


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_mlflow(runs, tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    logger = MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    urls = train(runs, logger)
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.tags["checkpoint/url"] == urls[-1]
    assert run.data.metrics["checkpoint/durable_step"] == 20


@pytest.mark.matrix
@pytest.mark.parametrize("log_model", [False, "all"])
def test_wandb(runs, tmp_path, monkeypatch, log_model):
    """A run that W&B keeps on this disk alone; what it would send is seen where its library is called."""
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = []

    def note(_, artifact, **options):
        logged.append((artifact, options))

    logger = WandbLogger(save_dir=tmp_path, log_model=False)
    logger._log_model = log_model
    monkeypatch.setattr(type(logger.experiment), "log_artifact", note)
    try:
        urls = train(runs, logger)
        assert logger.experiment.summary["checkpoint/url"] == urls[-1]
        assert len(logged) == (2 if log_model else 0)
        for (artifact, options), url, step in zip(logged, urls, (10, 20), strict=False):
            (entry,) = artifact.manifest.entries.values()
            assert (entry.ref, artifact.metadata["step"]) == (f"file://{url}", step)
            assert options["aliases"] == ["latest", f"step-{step}"]
    finally:
        wandb.finish()
        # Ends its process.
        wandb.teardown()
