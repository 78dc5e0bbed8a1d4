"""Optimizer states in the last few checkpoints alone: NeMo's ``save_last_n_optim_states``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lightning.pytorch import Trainer

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.engine.rewriting import rewrite
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.model import ids

_OPTIMIZER = "optimizer_states"


def too_old(names: Iterable[str], keep: int) -> list[str]:
    """The names of all checkpoints but the ``keep`` of the greatest steps (pure).

    One keeps its optimizer states whatever ``keep`` says: ``-last`` stands for it, and runs resume from it.
    """
    ordered = sorted(names, key=lambda name: (ids.step_in_name(name) or -1, name))
    return ordered[: -max(keep, 1)]


def drop_optimizer_states(trainer: Trainer, io: TieredCheckpointIO, names: Collection[str], done: set[str]) -> None:
    """Puts checkpoints at the durable tier anew, without their optimizer states; on all ranks.

    Args:
        trainer: Whose rank 0 does it.
        io: Of the job.
        names: Which. One that is on its way to the durable tier is left for the next time.
        done: Those that need not be looked at again; added to.

    Raises:
        SaveError: It failed, and ``on_save_error`` is ``raise``; the same on all ranks. The old ones are whole.
    """
    failed: SaveError | None = None
    if trainer.is_global_zero:
        engine = io.checkpointer
        for name in names:
            if name in done or engine.is_pending(name):
                continue
            try:
                state = io.load_alone(name)
                if state.pop(_OPTIMIZER, None) is not None:
                    rewrite(engine.session, name, state)
                done.add(name)
            except Exception as error:
                try:
                    engine.session.failed(name, -1, error)
                except SaveError as shown:
                    failed = shown
    failed = trainer.strategy.broadcast(failed)
    if failed is not None:
        raise failed
