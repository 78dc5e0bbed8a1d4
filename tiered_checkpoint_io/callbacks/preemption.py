"""One last checkpoint, and a clean stop of all ranks at the same batch, when the job is preempted.

The signal handler only notes the signal. All ranks exchange their notes at the same boundaries, by one small
all-reduce over gloo that runs during the next batch, and has ended by the next boundary.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, require_tiered_io
from tiered_checkpoint_io.callbacks.trainer import trained_weights
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks.run import current_rank, current_world_size
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, DrainError, RestoreError, TieredCheckpointError, seconds
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids

#: Part of the grace time that is left for the end of the interpreter and of the launcher.
_MARGIN = 0.1


class Notice:
    """Takes note of signals that ask a job to end."""

    def __init__(self, signals: Iterable[str | int], grace_seconds: float) -> None:
        self.signals = tuple(map(_signal, signals))
        if not self.signals:
            raise ConfigError("signals is empty", hint="name those that tell the job to end, such as SIGTERM")
        self.grace_seconds = seconds("grace_seconds", grace_seconds, above=0)
        #: The first signal; None before.
        self.received: signal.Signals | None = None
        #: Time at which this process should have ended, by the monotonic clock, seconds; None before.
        self.leave_by: float | None = None
        #: Session of the job that is handled; None while none is.
        self._session: Session | None = None
        self._earlier: dict[signal.Signals, Any] = {}

    def install(self, session: Session) -> None:
        """Handles the signals from now on; on other threads than the main one, use :meth:`notify`."""
        # Notices of an earlier fit are over.
        self._session, self.received, self.leave_by = session, None, None
        for number in self.signals if handles_signals() else ():
            if signal.getsignal(number) != self._handle:
                self._earlier[number] = _of_none_that_is_over(signal.signal(number, self._handle), number)

    def remove(self) -> signal.Signals | None:
        """Restores the earlier handlers; returns the received signal, once."""
        self._session = None
        for number in self.signals if handles_signals() else ():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._handler_before(number))
        received, self.received = self.received, None
        return received

    def notify(self, number: int) -> bool:
        """Notes that the job is to end, from any thread or signal handler; False if no training runs."""
        received, session = signal.Signals(number), self._session
        if session is None:
            return False
        if self.received is None:
            margin = max(session.clock.timing.preemption_margin_s, _MARGIN * self.grace_seconds)
            used = self.grace_seconds - min(self.grace_seconds / 2, margin)
            self.expect(session.clock.monotonic() + used, session)
            # Last, for another thread looks at it.
            self.received = received
        return True

    def left_s(self, session: Session) -> float:
        """Returns the seconds that are left; infinity without a notice."""
        return math.inf if self.leave_by is None else max(0.0, self.leave_by - session.clock.monotonic())

    def expect(self, leave_by: float, session: Session) -> None:
        """Takes over this rank's notice, or another's; waits for the durable tier end by its deadline."""
        if self.leave_by is None or leave_by < self.leave_by:
            self.leave_by = leave_by
            session.leave_by(leave_by)

    def _handler_before(self, number: signal.Signals) -> Any:
        earlier = self._earlier.get(number)
        # None: installed by other means than Python's.
        return signal.SIG_DFL if earlier is None else earlier

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.notify(number):
            # Another library that replaced this handler meanwhile has restored it since.
            earlier = self._handler_before(signal.Signals(number))
            signal.signal(number, earlier)
            if callable(earlier):
                earlier(number, frame)
            else:
                signal.raise_signal(number)


def handles_signals() -> bool:
    """Returns True if Python runs signal handlers in this thread, and lets it set them."""
    return threading.current_thread() is threading.main_thread()


def _of_none_that_is_over(handler: Any, number: signal.Signals) -> Any:
    """Skips handlers that Lightning has put back after the training they were for: two would call each other."""
    while isinstance(notice := getattr(handler, "__self__", None), Notice) and notice._session is None:
        handler = notice._handler_before(number)
    return handler


class Agreement:
    """Agrees with all ranks, at the same boundary, whether one has had notice; all ranks make one together."""

    def __init__(self, notice: Notice, session: Session) -> None:
        self.is_reached = False
        self._notice = notice
        self._session = session
        self._bound = timedelta(seconds=float(session.config.support.wait_timeout_s))
        self._group: Any = None
        #: This rank's message at the previous boundary, and its time.
        self._asked: tuple[torch.Tensor, Any, float] | None = None
        if current_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._bound)

    def at_boundary(self) -> bool:
        """Returns True to stop here; each rank asks as often as all others, and all get the same answer."""
        if self.is_reached:
            return True
        notice = self._notice
        if self._group is None:
            self.is_reached = notice.received is not None
            return self.is_reached
        if self._asked is not None:
            asked, work, since = self._asked
            try:
                work.wait(self._bound)
            except RuntimeError as error:
                raise RestoreError(
                    f"not all ranks have come to the end of the batch before: {error}",
                    operation="agree",
                    rank=dist.get_rank(),
                    hint="see the logs of the other ranks",
                ) from error
            left = -float(asked)
            if not math.isinf(left):
                notice.expect(since + left, self._session)
                self.is_reached = True
                return True
        mine = -math.inf if notice.received is None else -notice.left_s(self._session)
        tensor = torch.tensor([mine], dtype=torch.float64, device="cpu")
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = tensor, work, self._session.clock.monotonic()
        return False

    def least(self, count: float) -> float:
        """Returns the least of all ranks' numbers; all ranks call this together."""
        if self._group is None:
            return count
        numbers = torch.tensor([count], dtype=torch.float64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self._group)
        return float(numbers)

    def leave(self) -> None:
        """Waits until all ranks are about to leave: a launcher mostly kills the others once one has ended.

        A rank that does not come, or is dead, is not waited for beyond the time that is left.
        """
        if self._group is not None:
            left_s = self._notice.left_s(self._session)
            bound_s = self._session.clock.timing.preemption_margin_s + (0.0 if math.isinf(left_s) else left_s)
            # By messages: a collective under way after its bound would keep the group from closing.
            with contextlib.suppress(RuntimeError):
                dist.monitored_barrier(self._group, timedelta(seconds=max(0.001, bound_s)))

    def close(self) -> None:
        """Gives the process group up."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _signal(asked: str | int) -> signal.Signals:
    try:
        number = signal.Signals[asked.upper()] if isinstance(asked, str) else signal.Signals(asked)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"there is no signal {asked!r}", hint="such as SIGTERM or SIGUSR1") from error
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(
            f"{number.name} cannot be handled", hint="name a signal that comes before it, such as SIGTERM"
        )
    return number


class Preempted(SIGTERMException):
    """Ends the script: training has stopped because the job was preempted.

    The exit status is 128 plus the signal's number, as in a shell, so that the job does not count as finished.
    """


class PreemptionCheckpoint(Callback):
    """Saves once more, and stops, when a signal asks the job to end.

    A signal to any rank, or to several, stops all ranks at the same batch. The last checkpoint goes to memory, and is
    uploaded until the grace time ends; the drain, if it still lives, or the next start on this node uploads the rest.
    ``tiered:latest`` finds this checkpoint. A signal after the last batch ends the script on each rank that got it; the
    launcher has to end the other ranks.

    The callback replaces Lightning's own handler of SIGTERM, which hangs under DDP, and runs after a trainer's other
    callbacks. If a DataLoader has workers, give each a process group by ``worker_init_fn``: see docs/operations.md.
    """

    # Not derived from Lightning's Checkpoint: a trainer would then make no ModelCheckpoint by itself.

    def __init__(
        self,
        *,
        grace_seconds: float = 30.0,
        signals: Iterable[str | int] = ("SIGTERM", "SIGUSR1"),
        name: str = "preempted",
    ) -> None:
        """Validates the arguments.

        Args:
            grace_seconds: Seconds from the signal to the kill; 30 is the default of Kubernetes and Slurm.
            signals: Signals that ask the job to end.
            name: Name of the checkpoint below dirpath, without its ending. The next one overwrites it.

        Raises:
            ConfigError: A value or the name is not allowed.
        """
        self.notice = Notice(signals, grace_seconds)
        self.name = ids.validate_new_name(f"{name}.ckpt")
        self._io: TieredCheckpointIO | None = None
        self._agreement: Agreement | None = None
        self._validation_batches = 0.0
        #: True if this fit acts on the notice.
        self._is_stopping = False
        #: All of the trainer's, while it is without those whose teardown is over.
        self._callbacks: list[Callback] = []

    def notify(self, number: int = signal.SIGTERM) -> bool:
        """Asks the job to end, as a signal does; from any thread or signal handler.

        A training on another thread than the main one gets no signals, and needs this call.

        Args:
            number: The signal that was received; the exit status is 128 plus its number.

        Returns:
            True if training runs, so that it stops at the next batch.

        Raises:
            ValueError: There is no such signal; training continues.
        """
        return self.notice.notify(number)

    # ------------------------------------------------------------------------------------ hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Handles the signals from here on."""
        if stage != "fit":
            return
        self._io = require_tiered_io(trainer.strategy, type(self).__name__)
        # This callback saves after the others' work at the end of a batch, such as averaging weights.
        others = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
        self.notice.install(self._session)
        self._is_stopping = False
        if trainer.is_global_zero and not handles_signals():
            self._session.log.warning(
                "training runs on a thread other than the main one, where Python handles no signals: to stop with a"
                " last checkpoint, call PreemptionCheckpoint.notify() when the job has to end"
            )
        if signal.SIGTERM in self.notice.signals:
            # Trainer composes its handler with ours; its own part may hang, see the head of this class.
            trainer._signal_connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]

    def on_train_start(self, *_: Any) -> None:
        if self._agreement is None:
            self._agreement = Agreement(self.notice, self._session)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Raises Preempted if a rank had notice before the batch."""
        # Gradients that are accumulated already are not in a checkpoint.
        if self._agreement is not None and self._agreement.at_boundary() and not trainer.fit_loop._should_accumulate():
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if self._agreement is not None and not self._agreement.is_reached:
            # Ranks may validate different numbers of batches; they have to ask equally often.
            batches = float(sum(trainer.num_val_batches))
            self._validation_batches = self._agreement.least(0.0 if math.isinf(batches) else batches)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Does :meth:`on_train_batch_end` for a batch of a validation during training."""
        if self._agreement is not None and self._validation_batches >= 1:
            self._validation_batches -= 1
            if self._agreement.at_boundary():
                self._stop(trainer)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        if self._callbacks:
            trainer.callbacks, self._callbacks = self._callbacks, []  # type: ignore[attr-defined]
        if (number := self._end()) is not None:
            text = "received %s, but fit failed before it could make a last checkpoint"
            self._session.log.warning(text, number.name)

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Raises Preempted if notice came after the last batch."""
        number = self._end()
        if number is None:
            return
        if isinstance(sys.exc_info()[1], _TunerExitException):
            # So Lightning's tuner and NeMo's time limit end a fit; this hook's exception skips the rest of that end.
            try:
                trainer._teardown()
            except Exception as error:
                self._session.log.error("the end of training failed: %s", error)
        else:
            # Other ranks may have got no notice: a callback that saves on exceptions would hang. The fit is over.
            self._callbacks = trainer.callbacks  # type: ignore[attr-defined]
            trainer.callbacks = self._callbacks[self._callbacks.index(self) :]  # type: ignore[attr-defined]
        # The last upload has been waited for as long as there was time.
        self._session.log.warning("received %s after the last batch; the script ends here", number.name)
        self._leave(trainer, number)

    # ----------------------------------------------------------------------------------- inside
    @property
    def _session(self) -> Session:
        assert self._io is not None
        return self._io.checkpointer.session

    def _stop(self, trainer: Trainer) -> None:
        notice, session = self.notice, self._session
        number = notice.received or signal.SIGTERM
        step = trainer.global_step
        why = f"received {number.name}" if notice.received else "another rank has to end"
        session.is_preempted = self._is_stopping = True
        session.log.at_step(step).warning("%s; %.0f s are left for a last checkpoint", why, notice.left_s(session))
        if step > 0 and not trainer.sanity_checking:
            with trained_weights(trainer) if trainer.validating else contextlib.nullcontext():
                self._save(trainer, step)
        self._leave(trainer, number)

    def _leave(self, trainer: Trainer, number: signal.Signals) -> NoReturn:
        session = self._session
        environment = trainer._accelerator_connector.cluster_environment
        # Lightning's own handler of SIGUSR1, which is replaced, would do the same.
        if trainer.is_global_zero and isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            requeue(session.log, session.clock.timing.requeue_s)
        if self._agreement is not None:
            self._agreement.leave()
        raise Preempted(128 + number)

    def _save(self, trainer: Trainer, step: int) -> None:
        session, log = self._session, self._session.log.at_step(step)
        # All ranks go by the first one's clock.
        has_time = self.notice.left_s(session) > session.clock.timing.preemption_upload_s
        durable = bool(trainer.strategy.broadcast(has_time))
        started = session.clock.monotonic()
        # Failures of earlier saves are logged and counted here; they do not prevent this one.
        session.surface()
        made = self._try(trainer, step, durable=durable)
        if trainer.strategy.broadcast(made is None and self.notice.left_s(session) > 0):
            # An earlier save's background work may have failed, which fails the next save, once.
            made = self._try(trainer, step, durable=durable)
        if made is None:
            if trainer.is_global_zero:
                log.error("there is no last checkpoint: it was not saved")
        elif self._is_held(made):
            where = "on the node's disk" if made.spilled else "in memory"
            log.info("the last checkpoint is %s, after %.2f s", where, session.clock.monotonic() - started)
        else:
            log.error("there is no last checkpoint: it was captured, but not completed in memory")
        if not durable:
            return
        try:
            session.wait(self.notice.left_s(session))
        except DrainError as error:
            log.warning(
                "not all that this node has saved is on the durable tier yet. It stays in node memory, and %s: %s",
                "the drain, a process of its own, uploads it; where that is killed, the next start on this node does"
                if session.config.support.drain == "process"
                else "the next start on this node uploads it",
                error,
            )
        else:
            # The first operation among all ranks' saves is the commit.
            outcome = session.outcome(made.save_id) if made is not None and trainer.is_global_zero else None
            if outcome is not None and outcome.state == "committed":
                log.info("the last checkpoint is on the durable tier")

    def _try(self, trainer: Trainer, step: int, *, durable: bool) -> SaveReport | None:
        """Saves with all ranks; None if the save failed or was skipped, and on ranks without a file."""
        session = self._session
        options = {"tiers": ["memory", "durable"] if durable else ["memory"], "wait": False}
        before = session.last_save
        try:
            trainer.save_checkpoint(ids.join_url(session.dirpath, self.name), storage_options=options)
        except Exception as error:
            # Errors of a user's hook, too: the job ends as requested, and is queued again.
            session.log.at_step(step).error("saving the last checkpoint failed: %s", error)
            # The other ranks wait in the barrier by which Trainer.save_checkpoint ends.
            trainer.strategy.barrier("Trainer.save_checkpoint")
            return None
        return session.last_save if session.last_save is not before else None

    def _is_held(self, made: SaveReport) -> bool:
        """Returns True if this node has this rank's save, once the background task has ended."""
        try:
            parts = [each for each in self._session.open().tier.parts() if not each.is_replica]
            return (made.save_id, current_rank()) in [(each.save_id, each.part.rank) for each in parts]
        except (OSError, TieredCheckpointError):
            return False

    def _end(self) -> signal.Signals | None:
        """Takes no more notice; returns a received notice, if no code has acted on it."""
        number = self.notice.remove()
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()
        return None if self._is_stopping else number


def requeue(log: Logger, timeout_s: float) -> None:
    """Makes Slurm queue this job again; a failure is logged, because the job ends all the same."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or ""
        log.error("can't requeue job %s: %s %s", job or "(SLURM_JOB_ID is not set)", error, said.strip())
    else:
        log.info("requeued job %s", job)
