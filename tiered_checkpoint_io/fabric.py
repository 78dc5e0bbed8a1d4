"""Checkpoints of a loop with Lightning Fabric: saving a step to the tiers that it is due for. See docs/fabric.md."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.wrappers import _unwrap_objects

from tiered_checkpoint_io.adapters.io_of import require_tiered_io
from tiered_checkpoint_io.adapters.steps import name_of, tiers_due
from tiered_checkpoint_io.errors import UsageError

__all__ = ["save"]


def save(
    fabric: Fabric,
    state: dict[str, Any],
    step: int,
    *,
    tiers: Collection[str] | None = None,
    filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - Fabric's name for it
) -> None:
    """As ``fabric.save``, to the tiers that a step is due for; every rank calls this after each step.

    ``fabric.save`` itself has no word for tiers: it saves to both. From then on, what it saves without an entry that
    ``state`` has, such as the model alone, is loaded by name only.

    Args:
        fabric: With a :class:`TieredCheckpointIO` in its plugins, or an :class:`AsyncCheckpointIO` around it.
        state: As ``fabric.save`` takes it.
        step: The number of steps that are done; the checkpoint's name is ``step=<step>.ckpt``.
        tiers: ``"memory"``, ``"durable"`` or both; None for those that ``memory_every_n_train_steps`` and
            ``s3_every_n_train_steps`` say, which may be none.
        filter: As ``fabric.save`` takes it.

    Raises:
        UsageError: Fabric has another checkpoint IO (sharded strategies take none; Fabric says so itself), or
            ``filter`` names what ``state`` does not have.
        SaveError: A save failed, and ``on_save_error`` is ``raise``.
    """
    strategy: Any = fabric.strategy
    io = require_tiered_io(strategy, "tiered_checkpoint_io.fabric.save")
    io.resumes_with = frozenset(state)
    unknown = ", ".join(sorted(set(filter or ()) - set(state)))
    if unknown:
        # Else nothing of it would be filtered out, without a word.
        raise UsageError(
            f"filter names {unknown}, which the state does not have",
            operation="save",
            hint=f"the state has {', '.join(sorted(state))}",
        )
    wanted = tiers_due(step, io.config) if tiers is None else tiers
    if tiers is None and not wanted:
        return
    if io.config.replication_factor > 1:
        io.checkpointer.session.meet_peers()
    options = {"tiers": wanted}
    strategy.save_checkpoint(name_of(step), _unwrap_objects(state), storage_options=options, filter=filter)
