"""Structured log lines: ``[time] [namespace] [logger] [LEVEL] [file:line] [Rank r] Step s: text``."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

GIB = 1 << 30
_FORMAT = (
    "[%(asctime)s] [%(namespace)s] [%(name)s] [%(levelname)s] [%(filename)s:%(lineno)d] [Rank %(rank)s] %(message)s"
)
_NAME = "tiered_checkpoint_io"

Logger = logging.Logger | logging.LoggerAdapter[Any]


class CheckpointLogger(logging.LoggerAdapter[Any]):
    """Adds namespace, rank and step to each record; ``file:line`` stays the caller's."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        context = dict(self.extra or {})
        kwargs["extra"] = {**context, **(kwargs.get("extra") or {})}
        step = context.get("step")
        return (f"Step {step}: {msg}" if step is not None else msg), kwargs

    def at_step(self, step: int) -> CheckpointLogger:
        """The same logger for messages about one training step; a step below 0 is unknown."""
        return CheckpointLogger(self.logger, {**(self.extra or {}), "step": step if step >= 0 else None})


def get_logger(
    namespace: str, *, rank: int = 0, log_dir: str | None = None, logger: Logger | None = None
) -> CheckpointLogger:
    """A logger for one job and rank.

    Args:
        namespace: The job's namespace.
        rank: The global rank.
        log_dir: Where to append to ``{namespace}_checkpointing.log`` as well; made if absent.
        logger: The user's own logger to send everything to, in place of ours.
    """
    target: Any = logger if logger is not None else _own_logger()
    while isinstance(target, logging.LoggerAdapter):
        target = target.logger
    if log_dir is not None:
        _add_file(target, namespace, os.path.abspath(log_dir))
    return CheckpointLogger(target, {"namespace": namespace, "rank": rank, "step": None})


def gib(size: int) -> str:
    """``1.50 GiB``."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"


def rate(size: int, seconds: float) -> str:
    """``1.50 GiB in 0.75 s (2.00 GiB/s)``."""
    return f"{gib(size)} in {seconds:.3f} s ({size / GIB / max(seconds, 1e-9):.2f} GiB/s)"


def _own_logger() -> logging.Logger:
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_formatter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def _add_file(logger: logging.Logger, namespace: str, log_dir: str) -> None:
    path = os.path.join(log_dir, f"{namespace}_checkpointing.log")
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == path:
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(_formatter())
    # Other jobs of this process have files of their own.
    handler.addFilter(lambda record: getattr(record, "namespace", namespace) == namespace)
    logger.addHandler(handler)


def _formatter() -> logging.Formatter:
    # Records of libraries that share the handler carry neither rank nor namespace.
    return logging.Formatter(_FORMAT, defaults={"namespace": "-", "rank": "-"})
