"""Shows saves and uploads: to loggers, and in a summary at the end of a training."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Sequence
from weakref import WeakSet, proxy

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.status import SaveReport, drain_command, tier_label
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.logs import GIB, names_text

#: Loggers of which a failure was warned.
_warned: WeakSet[Logger] = WeakSet()


def log_save(trainer: Trainer, session: Session, report: SaveReport | None) -> None:
    """Logs a save that has just returned; without a report, one that failed."""
    metrics = {
        "checkpoint/pending": float(session.pending()),
        "checkpoint/saved_total": float(session.counts["saved"]),
        "checkpoint/failed_total": float(session.counts["failed"]),
    }
    if report is not None:
        metrics["checkpoint/stall_s"] = report.stall_s
        metrics["checkpoint/capture_s"] = report.capture_s
        metrics["checkpoint/size_GiB"] = report.size / GIB
        metrics["checkpoint/staged_GiB_per_s"] = report.size / GIB / max(report.stall_s, 1e-9)
    log(trainer, metrics)
    if report is not None and "durable" in report.tiers and not report.queued:
        log(trainer, {"checkpoint/durable_step": float(report.step)})


def notify_loggers(trainer: Trainer, callback: ModelCheckpoint) -> None:
    """Tells the loggers that the files of a callback are there."""
    _say(trainer, lambda logger: logger.after_save_checkpoint(proxy(callback)))


def _say(trainer: Trainer, say: Callable[[Logger], object]) -> None:
    """Says something to each logger; one that fails gets one warning, and does not end training on this rank only."""
    for logger in trainer.loggers:
        try:
            say(logger)
        except Exception as error:
            if logger not in _warned:
                _warned.add(logger)
                rank_zero_warn(
                    f"{type(logger).__name__} failed to log a checkpoint, and may lack others; training continues:"
                    f" {type(error).__name__}: {error}"
                )


def log(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Logs metrics to all loggers of the trainer."""
    _say(trainer, lambda logger: logger.log_metrics(metrics, step=trainer.global_step))


def log_drain(trainer: Trainer, outcomes: Sequence[Outcome]) -> None:
    """Logs of each save that became durable its step, and how long the drain took for it, seconds."""
    for outcome in outcomes:
        if outcome.action == "save" and outcome.state == "committed":
            log(trainer, {"checkpoint/drain_s": outcome.seconds, "checkpoint/durable_step": float(outcome.step)})


def summary(session: Session) -> list[str]:
    """Returns the lines that a training ends with, after a last look at the durable tier; none without a save."""
    config, standing = session.config, session.standing()
    where, uploaded = tier_label(config.dirpath), standing.uploaded
    if standing.memory is None and not uploaded and not standing.pending:
        return []
    memory = f"{standing.memory} in node memory" if standing.memory else "none in node memory"
    try:
        there = session.newest_of(uploaded)
        durable = f"{there or 'none'} on {where}" if uploaded else f"none uploaded to {where} from this node"
    except TieredCheckpointError as error:
        there, durable = uploaded[0], f"{uploaded[0]} was uploaded to {where}, which can't be asked now: {error}"
    lines = [f"newest checkpoints: {memory}; {durable}"]
    if uploaded and there != uploaded[0]:
        again = f"{drain_command(config)} {uploaded[0].name}"
        lines.append(f"{uploaded[0]} was deleted from {where}; if it is in node memory, upload it again by: {again}")
    if standing.pending:
        count, names = len(standing.pending), names_text([each.name for each in standing.pending])
        what = "checkpoints are" if count > 1 else "checkpoint is"
        lines.append(
            f"{count} {what} not on {where} yet ({names}): uploaded by a drain that"
            f" runs, or by the next start on this node, or by: {drain_command(config)}"
        )
    if standing.resumable:
        return [*lines, 'to resume: trainer.fit(..., ckpt_path="tiered:latest")']
    return [*lines, "these are weights alone, which training can't resume from"]


def _io_that_trained(trainer: Trainer) -> TieredCheckpointIO | None:
    # An exception that ends a training must not be replaced by one of its summary.
    with contextlib.suppress(ConfigError):
        return tiered_io_of(trainer.strategy.checkpoint_io)
    return None


def say_summary(trainer: Trainer) -> None:
    """Logs the lines on rank 0, when a training with our checkpoint IO ends."""
    if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and (io := _io_that_trained(trainer)):
        session = io.checkpointer.session
        for line in summary(session):
            session.log.info("%s", line)


def say_summary_last(trainer: Trainer, callback: Callback, exception: BaseException) -> None:
    """Says the summary from the last of the callbacks that call this: earlier callbacks may still save."""
    if callback is [each for each in trainer.callbacks if getattr(each, "says_summary", False)][-1]:  # type: ignore[attr-defined]
        say_summary(trainer)
        number = {KeyboardInterrupt: signal.SIGINT, SIGTERMException: signal.SIGTERM}.get(type(exception))
        if number is not None and (io := _io_that_trained(trainer)):
            _offer_to_leave(io.checkpointer.session, number)


def _offer_to_leave(session: Session, number: signal.Signals) -> None:
    """Lets a further such signal end the wait for uploads; Lightning ignores all signals after the first."""
    pending = session.standing().pending
    if not pending or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(number, lambda *_: session.leave_by(session.clock.monotonic()))
    session.log.info(
        "waiting for the upload of %s, %d s at most; %s ends the wait, and leaves %s in node memory",
        "the checkpoint" if len(pending) == 1 else f"the {len(pending)} checkpoints",
        session.config.support.wait_timeout_s,
        "Ctrl-C" if number == signal.SIGINT else "a further SIGTERM",
        "it" if len(pending) == 1 else "them",
    )
