"""Optimizer states in the newest checkpoints alone: NeMo's ``save_last_n_optim_states``."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_checkpoint_io.adapters.lightning import TieredCheckpointIO
from tiered_checkpoint_io.engine.save.rewrite import rewrite
from tiered_checkpoint_io.model import ids

_OPTIMIZER = "optimizer_states"


def drop_optimizer_states(io: TieredCheckpointIO, names: Iterable[str], keep: int, done: set[str]) -> None:
    """Rewrites durable checkpoints without their optimizer states, but for those of the greatest steps; on rank 0.

    Args:
        io: The checkpoint IO of the job.
        names: All checkpoints. One whose upload is queued is left for the next time.
        keep: How many keep their optimizer states; at least one does: ``-last`` is its alias, and runs
            resume from it.
        done: Names that need not be read again; added to.

    Raises:
        SaveError: It failed, and ``on_save_error`` is ``raise``. The old checkpoint is intact.
    """
    engine = io.checkpointer
    by_step = sorted(names, key=lambda name: (ids.step_in_name(name) or -1, name))
    for name in by_step[: -max(keep, 1)]:
        if name in done or engine.is_pending(name):
            continue
        try:
            state = io.load_alone(name)
            if state.pop(_OPTIMIZER, None) is not None:
                rewrite(engine.session, name, state)
            done.add(name)
        except Exception as error:
            engine.session.failed(name, -1, error)
