"""What replication between nodes can expect of its interface, and uploads of the way to the durable tier: pure."""

from __future__ import annotations

from tiered_checkpoint_io.cli.doctor.facts import Check, RateFacts, Setting, StateSize
from tiered_checkpoint_io.engine.replication.network import Interface, rate_text
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: A durable save that takes longer than this is rare enough to be a surprise, seconds.
_LONG_UPLOAD_S = 1800
_LONG_REPLICATION_S = 600
#: What a request may take without a silence that ends it, with room to spare, seconds.
_PART_S = 30


def judge_network(interface: Interface | None, megabits: int, state: StateSize, *, wanted: bool) -> list[Check]:
    """One check: the interface that replication would use, its rate, and the time that a checkpoint takes on it.

    Args:
        interface: None where none was found. One that reaches no other node is taken only where there is no other.
        megabits: Its rate, Mbit/s; 0 where that is not known.
        state: The size of a checkpoint.
        wanted: Whether it is known that there are other nodes.
    """
    if interface is None or interface.is_inner:
        where = f"{interface or 'no interface'}: reaches no other node"
        do = "give this node a network to the others; if it has one, name it by GLOO_SOCKET_IFNAME"
        return [Check("network", "warn" if wanted else "ok", "replication", where, do if wanted else "")]
    where = f"{interface}, {rate_text(megabits) or 'rate unknown'}"
    if megabits and state.size is not None:
        seconds = state.size / (megabits * 125_000)
        where += f": {size_text(state.size)} take at least {_duration(seconds)}"
        if seconds > _LONG_REPLICATION_S:
            do = "if there is a faster one, name it by GLOO_SOCKET_IFNAME"
            return [Check("network", "warn", "replication", where, do)]
    return [Check("network", "ok", "replication", where)]


def judge_rate(rate: RateFacts, state: StateSize) -> list[Check]:
    """One check: bytes a second to and from the durable tier, and what that means for a checkpoint."""
    text = f"{size_text(int(rate.up))}/s up, {size_text(int(rate.down))}/s down, by {size_text(rate.size)}"
    if state.size is None:
        return [Check("durable", "ok", "throughput", text)]
    up = state.size / max(rate.up, 1.0)
    text += f": {size_text(state.size)} take {_duration(up)} up, {_duration(state.size / max(rate.down, 1.0))} down"
    long = up > _LONG_UPLOAD_S
    do = f"save to the durable tier no more often than every {_duration(up)} (s3_every_n_train_steps)" if long else ""
    return [Check("durable", "warn" if long else "ok", "throughput", text, do)]


def recommend_for_rate(rate: RateFacts, config: TieredCheckpointConfig) -> list[Setting]:
    """Smaller parts, where one of the configured size would take long to repeat."""
    # Parts share the line.
    seconds = config.chunk_size_MB * (1 << 20) * config.write_concurrency() / max(rate.up, 1.0)
    if seconds <= _PART_S or config.chunk_size_MB == _SMALLEST:
        return []
    reason = f"a part takes {_duration(seconds)} at {size_text(int(rate.up))}/s, and one that fails is sent again"
    return [Setting("chunk_size_MB", _SMALLEST, reason)]


#: S3 has no smaller parts, MiB, and some room.
_SMALLEST = 8


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
