"""Slurm's automatic requeue, where the trainer has no PreemptionCheckpoint: what Lightning does for it, over the tiers.

Lightning saves ``hpc_ckpt_N.ckpt`` to ``default_root_dir``, inside a signal handler: beside the tiers, in the middle of
whatever the signal interrupts, and without a requeue where that save fails. A fit without ``ckpt_path`` then resumes
from what lies there. Here ``hpc_ckpt_1.ckpt`` lies below dirpath, and such a fit resumes from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.callbacks.notice import is_unhandled
from tiered_checkpoint_io.callbacks.preemption import PreemptionCheckpoint
from tiered_checkpoint_io.callbacks.trainer import on_rank_0
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model import ids

#: The checkpoint's name below dirpath, without its ending: one that Lightning knows. It is overwritten each time.
_NAME = "hpc_ckpt_1"
#: Slurm sends the signal so long before the end as the user asked for: 90 s in Lightning's documentation. The requeue
#: must still fit into that.
_GRACE_S = 60.0


def take_over_requeue(trainer: Trainer, module: LightningModule, io: TieredCheckpointIO) -> None:
    """Takes the place of Lightning's handler of the requeue signal; called in ``setup`` of a fit, on all ranks."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return
    number = environment.requeue_signal or signal.SIGUSR1
    has_one = any(isinstance(each, PreemptionCheckpoint) for each in trainer.callbacks)  # type: ignore[attr-defined]
    # Lightning respects a handler of the user's as well. All ranks have the callback, or none: they stop together.
    if not has_one and trainer.strategy.reduce_boolean_decision(is_unhandled(number)):
        callback = PreemptionCheckpoint(grace_seconds=_GRACE_S, signals=[number], name=_NAME, requeue=True)
        callback.setup(trainer, module, "fit")
    _resume_if_requeued(trainer, io)


def _resume_if_requeued(trainer: Trainer, io: TieredCheckpointIO) -> None:
    connector: Any = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, *args: Any, **options: Any) -> None:
        del connector.resume_start
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and on_rank_0(trainer, lambda: _was_requeued(io, checkpoint_path, connector)):
            checkpoint_path = ids.LATEST
        connector.resume_start(checkpoint_path, *args, **options)

    # The path is chosen before any callback is asked, and this is what takes it.
    connector.resume_start = resume_start


def _was_requeued(io: TieredCheckpointIO, checkpoint_path: Any, connector: Any) -> bool:
    """Whether no checkpoint was named, and an earlier run has left one because it was queued again."""
    session, name = io.checkpointer.session, f"{_NAME}.ckpt"
    if checkpoint_path:
        # Where default_root_dir is dirpath, Lightning finds it too, however much newer the others are.
        ours = str(checkpoint_path) == ids.join_url(session.dirpath, name)
        return ours and str(checkpoint_path) == connector._hpc_resume_path
    parts = [stored.part for stored in session.open().tier.parts()]
    if any((part.name, part.place) == (name, session.place) for part in parts):
        return True
    try:
        return name in session.known.all(io.config.support.durable_timeout_s)
    except StoreError as error:
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        session.log.warning("could not look for %s, the last checkpoint of a requeued job: %s", name, error)
        return restarts not in ("", "0")
