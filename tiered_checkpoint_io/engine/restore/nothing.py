"""What a search says that has found nothing: there is nothing, or nothing of it is intact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Kind


def why_nothing(
    tiers: Tiers, selector: Selector, accepts: Kind, rejected: Sequence[str], suspects: Iterable[str], rank: int
) -> RestoreError | CheckpointNotFoundError:
    """Why nothing was found.

    Args:
        tiers: Where it was looked for.
        selector: What was wanted.
        accepts: The payload that was wanted.
        rejected: What was tried, or could not be read, and why it was not taken.
        suspects: What else of memory can't be read, or was found corrupt earlier; it may have been what is meant.
        rank: That of this process, for the error.
    """
    what = "checkpoint" if accepts == "full" else f"{accepts} checkpoint"
    key, by_name = tiers.dirpath, selector.kind == "name"
    if by_name:
        what, key = f"{what} {selector.name!r}", ids.join_url(key, selector.name)
    if selector.step is not None:
        what += f" of step {selector.step}"
    damage = list(dict.fromkeys([*rejected, *suspects]))
    if rejected or (damage and not by_name):
        return RestoreError(
            f"no {what} is intact: " + "; ".join(damage),
            operation="restore",
            key=key,
            rank=rank,
            step=selector.step,
            hint=f"corrupt parts of memory lie in {tiers.memory.root}/quarantine; to start from scratch,"
            " remove what is damaged",
        )
    hint = "see `tiered-ckpt ls` for those that exist"
    if by_name and selector.name.startswith(f"{ids.SENTINELS}:"):
        hint = f"allowed: {ids.LOADABLE}"
    if accepts == "local":
        hint += "; local ones that several nodes hold in memory alone are loaded by name"
    return CheckpointNotFoundError(
        f"no {what} in memory or at {tiers.dirpath}" + (f" (it may have been: {'; '.join(damage)})" if damage else ""),
        operation="restore",
        key=key,
        rank=rank,
        step=selector.step,
        hint=hint,
    )
