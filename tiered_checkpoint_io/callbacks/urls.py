"""The URL of a checkpoint that has become durable, given to each logger in its own way."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

#: What loggers call it.
KEY = "checkpoint/url"


def log_url(logger: Logger, url: str, step: int) -> None:
    """Tells a logger of a checkpoint: as a reference to where it is, for nothing of it is uploaded again.

    W&B: the summary of the run, and, where ``log_model`` is set, an artifact that refers to the URL. MLflow: a tag of
    the run. TensorBoard: a text. CSV: a column. Other loggers are not told.

    Args:
        logger: One of the trainer's.
        url: Of the checkpoint.
        step: Its training step.
    """
    # Each needs its own package, and there is no logger of a class whose package is missing.
    if isinstance(logger, WandbLogger):
        logger.experiment.summary[KEY] = url
        if logger._log_model:
            logger.experiment.log_artifact(_artifact(logger, url, step), aliases=["latest", f"step-{step}"])
    elif isinstance(logger, MLFlowLogger):
        assert logger.run_id is not None
        logger.experiment.set_tag(logger.run_id, KEY, url)
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(KEY, url, step)
    elif isinstance(logger, CSVLogger):
        columns: dict[str, Any] = {KEY: url}
        logger.log_metrics(columns, step=step)


def notify(logger: Logger, callback: ModelCheckpoint) -> None:
    """Calls a logger's own hook for a callback whose checkpoints are durable.

    W&B's own would upload each in full where dirpath is a directory: :func:`log_url` has given it a reference.
    """
    if getattr(type(logger), "after_save_checkpoint", None) is not WandbLogger.after_save_checkpoint:
        logger.after_save_checkpoint(callback)


def _artifact(logger: WandbLogger, url: str, step: int) -> Any:
    import wandb

    artifact = wandb.Artifact(f"checkpoint-{logger.experiment.id}", type="model", metadata={"step": step, "url": url})
    # Without a checksum of W&B's own, which would ask the server.
    artifact.add_reference(url if "://" in url else f"file://{url}", checksum=False)
    return artifact
