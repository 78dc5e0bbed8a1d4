"""What a process tells of its saves, and of the work behind them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiered_checkpoint_io.engine.drain.queue import DrainProgress


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
    """

    name: str
    step: int
    save_id: str
    size: int
    stall_s: float
    tiers: frozenset[str]


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
