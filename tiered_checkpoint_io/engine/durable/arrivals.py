"""The parts of a save that have arrived on the durable tier, as the drain that is to commit it sees them."""

from __future__ import annotations

from tiered_checkpoint_io.engine.durable.files import read_description
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import IndexRow, Part
from tiered_checkpoint_io.stores.base import Store

#: Number of ranks that are named in an error.
_NAMED = 16


class Arrivals:
    """Parts seen so far; no part is asked for again once it was seen.

    Attributes:
        part: The coordinator's part.
        rows: The parts that are there, by rank; the coordinator's own is.
    """

    def __init__(self, part: Part) -> None:
        """Begins after :func:`commit.put_part`."""
        self.part = part
        self.rows = {part.rank: IndexRow.of(part)}

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts were not there at the last look."""
        return [rank for rank in range(self.part.content.parts) if rank not in self.rows]

    def late(self, timeout_s: float) -> DrainError:
        """Returns the error for a save of which no part has come for ``timeout_s`` seconds."""
        part, missing = self.part, self.missing
        named = ", ".join(map(str, missing[:_NAMED]))
        return DrainError(
            f"the parts of {len(missing)} of {part.content.parts} ranks are missing, and none of them has come for"
            f" {timeout_s:.0f} s: {named}{' ...' if len(missing) > _NAMED else ''}",
            operation="commit",
            tier="durable",
            key=ids.join_url(part.dirpath, part.name),
            rank=part.rank,
            step=part.content.step,
            hint="it is committed once they come; see the logs of those ranks and of the drains of their nodes",
        )

    def look(self, store: Store) -> bool:
        """Looks for the missing parts, by one list for each thousand of them, and reads their descriptions.

        Returns:
            True if any has come since the last look.

        Raises:
            CorruptCheckpointError: A description is damaged.
            StoreError: The tier could not be read.
        """
        part, missing = self.part, self.missing
        prefixes = ids.description_prefixes(part.save_id, missing)
        there = {ids.rank_of_description(entry.key) for prefix in prefixes for entry in store.list(prefix)}
        new = [rank for rank in missing if rank in there]

        def read(rank: int) -> IndexRow:
            return IndexRow.of(read_description(store, part.name, part.save_id, rank))

        self.rows.update(zip(new, in_parallel(read, new), strict=True))
        return bool(new)
