"""At the end of a training: where the newest checkpoints are, what is still queued, and what to type."""

from __future__ import annotations

import contextlib
import signal
import threading

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from tiered_checkpoint_io.adapters.io_of import tiered_io_of
from tiered_checkpoint_io.engine.drain.messages import Standing, drain_command
from tiered_checkpoint_io.engine.drain.progress import tier_label
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: Names that a line lists.
_NAMED = 3


def summary(standing: Standing, config: TieredCheckpointConfig) -> list[str]:
    """The lines; none where nothing was saved."""
    where = tier_label(config.dirpath)
    if standing.memory is None and standing.durable is None and not standing.pending:
        return []
    memory = f"{standing.memory} in node memory" if standing.memory else "none in node memory"
    durable = f"{standing.durable} on {where}" if standing.durable else f"none uploaded to {where} from this node"
    lines = [f"newest checkpoints: {memory}; {durable}"]
    if standing.pending:
        count, names = len(standing.pending), ", ".join(each.name for each in standing.pending[:_NAMED])
        what = "checkpoints are" if count > 1 else "checkpoint is"
        lines.append(
            f"{count} {what} not on {where} yet ({names}{', ...' if count > _NAMED else ''}): uploaded by a drain that"
            f" runs, or by the next start on this node, or by: {drain_command(config)}"
        )
    if standing.resumable:
        return [*lines, 'to resume: trainer.fit(..., ckpt_path="tiered:latest")']
    return [*lines, "these are weights alone, which training can't resume from"]


def say_summary(trainer: Trainer) -> None:
    """Logs the lines on rank 0, where a training with our checkpoint IO ends."""
    if not trainer.is_global_zero or trainer.state.fn != TrainerFn.FITTING:
        return
    # An exception that ends a training must not be replaced by one of its summary.
    with contextlib.suppress(UsageError):
        io = tiered_io_of(trainer.strategy.checkpoint_io)
        if io is not None:
            session = io.checkpointer.session
            for line in summary(session.standing(), io.config):
                session.log.info("%s", line)


def say_summary_last(trainer: Trainer, callback: Callback, exception: BaseException) -> None:
    """As :func:`say_summary`, from the last of the callbacks that call this: those before may still save."""
    if callback is [each for each in trainer.callbacks if getattr(each, "says_summary", False)][-1]:  # type: ignore[attr-defined]
        say_summary(trainer)
        with contextlib.suppress(UsageError):
            io = tiered_io_of(trainer.strategy.checkpoint_io)
            if io is not None and isinstance(exception, KeyboardInterrupt):
                _offer_to_leave(io.checkpointer.session)


def _offer_to_leave(session: Session) -> None:
    """Has a further Ctrl-C end the wait for uploads that follows: Lightning ignores them all after the first."""
    pending = session.standing().pending
    is_main = threading.current_thread() is threading.main_thread()
    if not pending or not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        return
    signal.signal(signal.SIGINT, lambda *_: session.leave_by(session.clock.monotonic()))
    session.log.info(
        "waiting for the upload of %s, %d s at most; Ctrl-C ends the wait, and leaves %s in node memory",
        "the checkpoint" if len(pending) == 1 else f"the {len(pending)} checkpoints",
        session.config.support.wait_timeout_s,
        "it" if len(pending) == 1 else "them",
    )
