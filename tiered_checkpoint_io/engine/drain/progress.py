"""What a process reports of its saves, and of background work."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_checkpoint_io.engine.drain.queue import DrainProgress
from tiered_checkpoint_io.logs import rate
from tiered_checkpoint_io.model import ids


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    Attributes:
        name: The checkpoint's name.
        step: Its training step; -1 where the state does not tell.
        save_id: The save's id.
        size: Bytes.
        stall_s: How long the caller waited, seconds.
        tiers: Where it is, or is on its way to.
        queued: Whether it is still on its way to the durable tier.
        spilled: Whether what the memory tier has of it lies in its spill, on the node's disk.
        capture_s: How long the state was copied, seconds; 0 where that goes on when the save returns.
        overlapped: Whether it was copied beside training, and not within the stall.
        resumable: Whether training can resume from it.
    """

    name: str
    step: int
    save_id: str
    size: int
    stall_s: float
    tiers: frozenset[str]
    queued: bool = False
    spilled: bool = False
    capture_s: float = 0.0
    overlapped: bool = False
    resumable: bool = True

    @property
    def is_durable(self) -> bool:
        """Whether the durable tier has it by now, and not only its turn in the queue."""
        return "durable" in self.tiers and not self.queued

    def line(self, dirpath: str, what: str = "") -> str:
        """What to log of it: where it is by now, and what is still to be done.

        Args:
            dirpath: The durable tier.
            what: What was saved, in place of the name.
        """
        places = "the node's disk" if self.spilled else "memory"
        if self.is_durable:
            places = f"{places} and {tier_label(dirpath)}"
        took = rate(self.size, self.capture_s if self.overlapped else self.stall_s)
        text = f"saved {what or self.name} to {places}: {took}"
        if self.overlapped:
            text = f"{text} beside training, which waited {self.stall_s:.3f} s"
        return f"{text}; upload to {tier_label(dirpath)} queued" if self.queued else text


@dataclass(frozen=True, slots=True)
class Progress:
    """A view of background work for progress bars and metrics.

    Attributes:
        pending: Operations that wait for the drain.
        drain: What the drain last said.
        last_save: The newest save of this process.
        counters: ``saved``, ``failed`` and ``skipped`` saves of this process; parts that are ``replicated``, and
            that are ``unreplicated`` although they should be.
    """

    pending: int
    drain: DrainProgress
    last_save: SaveReport | None
    counters: dict[str, int] = field(default_factory=dict)


def tier_label(dirpath: str) -> str:
    """The name of a durable tier in messages."""
    return "S3" if ids.is_s3_url(dirpath) else dirpath
