"""PreemptionCheckpoint: one last checkpoint, and a clean stop, when the job is told to end."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO, tiered_io_of
from tiered_checkpoint_io.engine.preemption import Agreement, Notice
from tiered_checkpoint_io.errors import ConfigError, DrainError, SaveError, TieredCheckpointError, UsageError
from tiered_checkpoint_io.model import ids


class Preempted(SIGTERMException):
    """Training has stopped because the job was told to end. A SystemExit: code behind ``fit`` does not run.

    The exit status is 128 and the signal's number, as a shell has it: whoever restarts jobs must not
    take this one for finished.
    """


class PreemptionCheckpoint(Callback):
    """Saves once more, and stops, when a signal tells the job to end.

    A signal to any rank, or to several, stops all ranks at the same batch. The last checkpoint goes
    to memory, and from there to the durable tier as far as the grace time goes; what is left of that
    the drain goes on with where it is let, or the next start on this node. ``tiered:latest`` finds it.

    Lightning's own handler, which exchanges tensors inside the signal handler and hangs under DDP,
    is out of use in a trainer with this callback.
    """

    def __init__(
        self,
        *,
        grace_seconds: float = 30.0,
        signals: Iterable[str | int] = ("SIGTERM", "SIGUSR1"),
        name: str = "preempted",
        requeue: bool | None = None,
    ) -> None:
        """Validates.

        Args:
            grace_seconds: How long after the signal the process is killed; 30 is what Kubernetes and
                Slurm have by default.
            signals: Which signals tell the job to end.
            name: The checkpoint's name below dirpath, without its ending. One job has one of them: it is
                overwritten, never before the new one is whole.
            requeue: Whether to have Slurm queue the job again; by default as Lightning's
                SLURMEnvironment is told.

        Raises:
            ConfigError: A value is not allowed.
            InvalidNameError: The name is not.
        """
        self.notice = Notice(signals, grace_seconds=grace_seconds, heard=self._hear)
        self.name = ids.validate_name(f"{name}.ckpt")
        if requeue not in (True, False, None):
            raise ConfigError(f"requeue is {requeue!r}", hint="allowed: true, false or null")
        self.requeue = requeue
        self._io: TieredCheckpointIO | None = None
        self._agreement: Agreement | None = None
        self._agreed = False
        self._saved_step = -1
        self._validation_batches = 0.0

    # ------------------------------------------------------------------------------------ hooks
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Handles the signals from here on.

        Raises:
            UsageError: The trainer's checkpoint IO is not ours.
        """
        if stage != "fit":
            return
        self._io = tiered_io_of(trainer.strategy.checkpoint_io)
        if self._io is None:
            raise UsageError(
                f"PreemptionCheckpoint with a {type(trainer.strategy.checkpoint_io).__name__}",
                operation="setup",
                hint="give the trainer plugins=[TieredCheckpointIO(...)], or AsyncCheckpointIO around it",
            )
        self.notice.clock = self._io.checkpointer.session.clock
        self.notice.install()
        # Trainer composes its handler with ours; its own part may hang, see the head of this class.
        trainer._signal_connector._sigterm_notifier_fn = _leave_it_to_us  # type: ignore[method-assign, assignment]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if self._agreement is None:
            self._agreement = Agreement(float(self._tiered.config.wait_timeout_s))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Stops here, if a rank had notice before the batch.

        Raises:
            Preempted: It had.
        """
        self._ask()
        # Gradients that are accumulated already are not in a checkpoint.
        if self._agreed and not trainer.fit_loop._should_accumulate():
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        if self._agreement is not None and not self._agreed:
            # Ranks may validate different numbers of batches; they have to ask equally often.
            batches = float(sum(trainer.num_val_batches))
            self._validation_batches = self._agreement.least(0.0 if math.isinf(batches) else batches)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """As :meth:`on_train_batch_end`, while training validates."""
        if self._agreement is not None and self._validation_batches >= 1:
            self._validation_batches -= 1
            self._ask()
            if self._agreed:
                self._stop(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        self._end()

    # ----------------------------------------------------------------------------------- inside
    @property
    def _tiered(self) -> TieredCheckpointIO:
        assert self._io is not None
        return self._io

    def _hear(self, leave_by: float) -> None:
        # Whatever waits for the durable tier just now, or will, waits no longer than that.
        if self._io is not None:
            self._io.checkpointer.session.leave_by(leave_by)

    def _ask(self) -> None:
        if self._agreement is not None and not self._agreed:
            self._agreed = self._agreement.at_boundary(self.notice)

    def _stop(self, trainer: Trainer) -> None:
        notice, session = self.notice, self._tiered.checkpointer.session
        number = notice.received or signal.SIGTERM
        step = trainer.global_step
        session.log.warning(
            "Step %d: %s; %.0f s are left for a last checkpoint",
            step,
            f"received {number.name}" if notice.received else "another rank is told to end",
            notice.left_s,
        )
        if step > 0 and not trainer.sanity_checking:
            self._save(trainer, step)
        if trainer.is_global_zero and self._requeues(trainer):
            requeue(session.log, session.clock.timing.requeue_s)
        raise Preempted(128 + number)

    def _save(self, trainer: Trainer, step: int) -> None:
        session = self._tiered.checkpointer.session
        # All ranks go by the first one's clock.
        durable = bool(trainer.strategy.broadcast(self.notice.left_s > session.clock.timing.preemption_upload_s))
        options = {"tiers": ["memory", "durable"] if durable else ["memory"], "wait": False}
        started = session.clock.monotonic()
        # What failed behind earlier saves is logged and counted here, and must not keep anybody from this one.
        with contextlib.suppress(SaveError):
            session.surface()
        try:
            trainer.save_checkpoint(ids.join_url(session.dirpath, self.name), storage_options=options)
        except TieredCheckpointError as error:
            session.log.error("Step %d: there is no last checkpoint: %s", step, error)
            # The other ranks wait in the barrier by which Trainer.save_checkpoint ends.
            trainer.strategy.barrier("Trainer.save_checkpoint")
            return
        session.log.info(
            "Step %d: the last checkpoint is in memory, after %.2f s", step, session.clock.monotonic() - started
        )
        if durable:
            try:
                session.wait(self.notice.left_s)
                session.log.info("Step %d: the last checkpoint is on the durable tier", step)
            except DrainError as error:
                session.log.warning(
                    "Step %d: the last checkpoint is in node memory, and not on the durable tier yet: the drain, or the"
                    " next start on this node, goes on with it (%s)",
                    step,
                    error,
                )

    def _requeues(self, trainer: Trainer) -> bool:
        if self.requeue is not None:
            return self.requeue
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and bool(environment.auto_requeue)

    def _end(self) -> None:
        self.notice.remove()
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()


def requeue(log: Any, timeout_s: float) -> None:
    """Has Slurm queue this job again; a failure is logged, because the job ends all the same."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
    command = shutil.which("scontrol")
    if not job or command is None:
        log.error("can't requeue: %s", "SLURM_JOB_ID is not set" if command else "there is no scontrol")
        return
    try:
        done = subprocess.run([command, "requeue", job], capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("can't requeue job %s: %s", job, error)
        return
    if done.returncode == 0:
        log.info("requeued job %s", job)
    else:
        log.error("can't requeue job %s: scontrol ended with %d: %s", job, done.returncode, done.stderr.strip())


def _leave_it_to_us(*_: Any) -> None:
    """In place of Lightning's handler."""
