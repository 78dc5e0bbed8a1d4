"""What the ranks of one sharded save agree on, and how it reaches each of them."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.model.manifest import Metric

#: Where the newest ticket that this thread has unpickled lies; see :func:`arrived`.
_arrivals = threading.local()


@dataclass(frozen=True, slots=True)
class Ticket:
    """What all ranks of one save agree on.

    Attributes:
        name: The checkpoint's name.
        save_id: The save's id.
        step: The training step; -1 where nobody told.
        world_size: How many ranks contribute a part.
        durable: Whether it is to go to the durable tier.
        taken: Whether the checkpoint's name is, or may be, in use already.
        completed: The newest saves of this run that are complete, the oldest first.
        epoch: The epoch; -1 where nobody told.
        metric: What a ModelCheckpoint monitored.
        series: To which names ``memory_keep_last`` applies together, see :func:`ids.series_of`; empty
            for all names.
    """

    name: str
    save_id: str
    step: int
    world_size: int
    durable: bool
    taken: bool = False
    completed: tuple[str, ...] = ()
    epoch: int = -1
    metric: Metric | None = None
    series: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrive, tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    @property
    def mark(self) -> str:
        """What tells the files of this save from those of any other of the same name.

        An overwrite must not touch the files that it replaces; nor may a drain that was left over on
        another node, and comes late with an earlier save, touch the new ones.
        """
        return hash_bytes(self.save_id.encode())[:8]

    def file_name(self, rank: int) -> str:
        """The name of a rank's file."""
        return f"__{rank}_0-{self.mark}.distcp"

    def name_beside(self, basename: str) -> str:
        """The name of another file: its own, where no other save of this checkpoint's name can have it."""
        stem, dot, ending = basename.partition(".")
        return f"{stem}-{self.mark}{dot}{ending}" if self.taken else basename


def _arrive(*fields: Any) -> Ticket:
    ticket = Ticket(*fields)
    _arrivals.ticket = ticket
    return ticket


def expect_ticket() -> None:
    """Forgets which ticket this thread has received."""
    _arrivals.ticket = None


def arrived() -> Ticket | None:
    """The ticket that this thread has received since :func:`expect_ticket`.

    With ``enable_plan_caching``, DCP's planner receives the coordinator's new plan, ticket and all,
    finds it empty, and hands the writer the plan of an earlier save in its place. Counting saves
    on each rank would agree only until one of them misses a save, and could not tell whether
    *this* save goes to the durable tier. But the ticket did reach every rank, in the thread that
    saves: so it is noted when it is unpickled.
    """
    ticket: Ticket | None = getattr(_arrivals, "ticket", None)
    return ticket
