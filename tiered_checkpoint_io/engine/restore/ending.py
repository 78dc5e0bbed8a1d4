"""End of a search: a checkpoint that all ranks have agreed on, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Kind


@dataclass(slots=True, kw_only=True)
class Found:
    """A checkpoint that all ranks have agreed on.

    Attributes:
        name: Its name.
        dirpath: The durable tier that it belongs to.
        content: The facts of the save; None if others wrote it, so that nothing verified it.
        rejected: Copies that were tried before it, and why they were not taken.
        newest_save_id: The newest save that was seen in any tier; later runs count on from there.
    """

    name: str
    dirpath: str
    content: Content | None
    rejected: list[str] = field(default_factory=list)
    newest_save_id: str | None = None

    @property
    def url(self) -> str:
        """URL of the checkpoint on the durable tier, which may still have to get it."""
        return ids.join_url(self.dirpath, self.name)

    @property
    def save_id(self) -> str:
        """Id of the save; empty for a checkpoint of another tool."""
        return self.content.save_id if self.content is not None else ""

    @property
    def step(self) -> int:
        """The training step; -1 if the checkpoint has none."""
        if self.content is not None:
            return self.content.step
        step = ids.step_in_name(self.name)
        return -1 if step is None else step


def why_nothing(
    tiers: Tiers, selector: Selector, accepts: Kind, rejected: Sequence[str], suspects: Iterable[str], rank: int
) -> RestoreError | CheckpointNotFoundError:
    """Returns the error that explains why no checkpoint was found.

    Args:
        tiers: Tiers that were searched.
        selector: Request for a checkpoint.
        accepts: The payload that was wanted.
        rejected: Copies that were tried, or could not be read, and the reasons against them.
        suspects: Other unreadable parts in memory, or parts found corrupt earlier; one may be of the wanted checkpoint.
        rank: Rank of this process, for the error.
    """
    what = "checkpoint" if accepts == "full" else f"{accepts} checkpoint"
    key, by_name = tiers.dirpath, selector.kind == "name"
    if by_name:
        what, key = f"{what} {selector.name!r}", ids.join_url(key, selector.name)
    what += selector.terms
    damage = list(dict.fromkeys([*rejected, *suspects]))
    if rejected or (damage and not by_name):
        again = f"a node that has it in memory uploads it again by `tiered-ckpt flush {selector.name}`; "
        return RestoreError(
            f"no {what} is intact: " + "; ".join(damage),
            operation="restore",
            key=key,
            rank=rank,
            step=selector.step,
            hint=f"{again if by_name else ''}corrupt parts of memory lie in {tiers.memory.root}/quarantine; to start"
            " from scratch, remove what is damaged",
        )
    hint = "see `tiered-ckpt ls` for those that exist"
    if by_name and (selector.name in ("latest", "last") or selector.name.startswith(f"{ids.SENTINELS}:")):
        hint = f"allowed: {ids.LOADABLE}"
    return CheckpointNotFoundError(
        f"no {what} in memory or at {tiers.dirpath}" + (f" (it may have been: {'; '.join(damage)})" if damage else ""),
        operation="restore",
        key=key,
        rank=rank,
        step=selector.step,
        hint=hint,
    )
