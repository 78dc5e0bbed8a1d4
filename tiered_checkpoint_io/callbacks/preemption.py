"""One last checkpoint, and a clean stop, when the job is preempted."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, require_tiered_io
from tiered_checkpoint_io.callbacks.notice import Agreement, Notice, handles_signals
from tiered_checkpoint_io.callbacks.trainer import trained_weights
from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks.run import current_rank
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, DrainError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids


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
        requeue: bool | None = None,
    ) -> None:
        """Validates the arguments.

        Args:
            grace_seconds: Seconds from the signal to the kill; 30 is the default of Kubernetes and Slurm.
            signals: Signals that ask the job to end.
            name: Name of the checkpoint below dirpath, without its ending. The next one overwrites it.
            requeue: True to have Slurm queue the job again; by default as Lightning's SLURMEnvironment is configured.

        Raises:
            ConfigError: A value or the name is not allowed.
        """
        self.notice = Notice(signals, grace_seconds)
        self.name = ids.validate_new_name(f"{name}.ckpt")
        if requeue not in (True, False, None):
            raise ConfigError(f"requeue is {requeue!r}", hint="allowed: true, false or null")
        self.requeue = requeue
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
        """Handles the signals from here on.

        Raises:
            ConfigError: The trainer's checkpoint IO is not ours.
        """
        if stage != "fit":
            return
        self._io = require_tiered_io(trainer.strategy, type(self).__name__)
        # This callback saves after the others' work at the end of a batch, such as averaging weights.
        others = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
        self.notice.install(self._session)
        self._is_stopping = False
        if trainer.is_global_zero:
            self._warn_of_thread()
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
        why = f"received {number.name}" if notice.received else "another rank is told to end"
        session.is_preempted = self._is_stopping = True
        session.log.at_step(step).warning("%s; %.0f s are left for a last checkpoint", why, notice.left_s(session))
        if step > 0 and not trainer.sanity_checking:
            with trained_weights(trainer) if trainer.validating else contextlib.nullcontext():
                self._save(trainer, step)
        self._leave(trainer, number)

    def _leave(self, trainer: Trainer, number: signal.Signals) -> NoReturn:
        session = self._session
        environment = trainer._accelerator_connector.cluster_environment
        requeues = isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)
        if trainer.is_global_zero and (requeues if self.requeue is None else self.requeue):
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
        if made is not None and "memory" in made.tiers:
            if self._is_held(made):
                where = "on the node's disk" if made.spilled else "in memory"
                log.info("the last checkpoint is %s, after %.2f s", where, session.clock.monotonic() - started)
            else:
                log.error("there is no last checkpoint: it was captured, but not completed in memory")
        elif made is None and trainer.is_global_zero:
            log.error("there is no last checkpoint: it was not saved")
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
            if made is not None and trainer.is_global_zero and self._is_durable(made):
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

    def _is_durable(self, made: SaveReport) -> bool:
        """Returns True if S3 has the save, by its outcome, or because it was sent before the save returned."""
        outcome = self._session.outcome(made.save_id)
        sent = made.tiers == {"durable"} and not made.queued
        return sent or (outcome is not None and outcome.state == "committed")

    def _end(self) -> signal.Signals | None:
        """Takes no more notice; returns a received notice, if no code has acted on it."""
        number = self.notice.remove()
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()
        return None if self._is_stopping else number

    def _warn_of_thread(self) -> None:
        if not handles_signals():
            self._session.log.warning(
                "training runs on a thread other than the main one, where Python handles no signals: to stop with a"
                " last checkpoint, call PreemptionCheckpoint.notify() when the job has to end"
            )


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
