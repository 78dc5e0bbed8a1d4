"""What commands over node memory found, as documents for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.inventory.durable import latest
from tiered_checkpoint_io.inventory.record import iso, time_of
from tiered_checkpoint_io.inventory.roots import tier_at
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.place import Place


def drain_document(root: Path, before: Collection[Outcome], left: int) -> dict[str, Any]:
    """What a drain has done since there were the outcomes ``before``, and how many operations are left."""
    done = [_outcome(each) for each in Queue(root).outcomes() if each not in before]
    return {"root": str(root), "operations_left": left, "outcomes": done}


def namespace_document(root: Path) -> dict[str, Any]:
    """What lies in the memory of one namespace, what waits, and what the drain says of itself."""
    tier, queue = tier_at(root), Queue(root)
    held = [*tier.parts(), *tier.replicas.parts()]
    latest, progress = latest_saves(held), queue.progress()
    damaged = [*tier.damaged(), *tier.replicas.damaged()]
    return {
        "namespace": root.name,
        "root": str(root),
        "parts": [_part(tier, each, is_latest=each.save_id in latest) for each in held],
        "damaged": [{"folder": str(folder), "error": str(error)} for folder, error in damaged],
        "waiting": [
            {"action": each.action, "name": each.name, "target": each.target or None, "dirpath": each.dirpath}
            for each in queue.look(tier)
        ],
        "outcomes": [_outcome(each) for each in queue.outcomes()],
        "drain": {
            "pid": progress.pid or None,
            "last_seen": iso(time_of(progress.heartbeat)) if progress.pid else None,
            "name": progress.name or None,
            "done_bytes": progress.bytes_done,
            "total_bytes": progress.bytes_total,
            "rate_bytes_per_s": progress.rate,
            "last_error": progress.last_error or None,
        },
    }


def _part(tier: MemoryTier, stored: StoredPart, *, is_latest: bool) -> dict[str, Any]:
    part, content = stored.part, stored.part.content
    return {
        "name": part.name,
        "dirpath": part.dirpath,
        "save_id": part.save_id,
        "step": content.step if content.step >= 0 else None,
        "rank": part.rank,
        "size_bytes": content.size,
        "created": iso(time_of(content.created)),
        "tier": "replicas" if stored.is_replica else "spill" if tier.is_spilled(stored.folder) else "memory",
        "is_for_durable": part.durable,
        "is_waiting": stored.pending,
        "is_replicated": stored.replicated,
        "is_resumable": content.resumable,
        "is_latest": is_latest,
    }


def _outcome(each: Outcome) -> dict[str, Any]:
    return {
        "action": each.action,
        "name": each.name,
        "dirpath": each.dirpath,
        "step": each.step if each.step >= 0 else None,
        "outcome": each.state,
        "error": each.error or None,
        "size_bytes": each.bytes,
        "duration_s": each.seconds,
        "finished": iso(time_of(each.finished)),
        "attempts": each.attempts,
    }


def latest_saves(held: Iterable[StoredPart]) -> set[str]:
    """The save of each durable tier that a restart would take of these parts."""
    by_place: dict[Place, list[StoredPart]] = {}
    for each in held:
        by_place.setdefault(each.part.place, []).append(each)
    return {meant.save_id for parts in by_place.values() if (meant := latest((), parts)) is not None}
