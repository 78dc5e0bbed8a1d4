"""Exclusive use of a namespace of a node's memory: by one live job at a time.

Two jobs in one namespace would remove each other's checkpoints by their retention, and each would configure the drain
for its own durable tier. A job is known by its launch, which is in a file; each of its processes holds a shared lock on
another file, which ends with the process. Memory of namespaces that have ended is room for others.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import tier_at
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE as DRAIN_FILE
from tiered_checkpoint_io.engine.drain.worker import TRAINERS_FILE
from tiered_checkpoint_io.engine.staging.retention import only_here
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger, size_text
from tiered_checkpoint_io.memory.node import are_one, is_lost, release, share, try_lock, used, write_atomic
from tiered_checkpoint_io.memory.parts import SAVES
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.documents import Place

LOCK_FILE = "job.lock"
#: Locks of processes that may add to the memory: a trainer, and a job.
TRAINERS = (TRAINERS_FILE, LOCK_FILE)
_FACTS_FILE = "job.json"


class NamespaceLock:
    """One process' lock on a namespace of its node's memory."""

    def __init__(self, root: Path, dirpath: str, owner: str, log: Logger, clock: Clock) -> None:
        """Locks the namespace, for the launch ``owner`` with its durable checkpoints at ``dirpath``.

        If space or descriptors for the lock are lacking, this warns, and holds no lock.

        Raises:
            ConfigError: A live job of another launch has it.
        """
        mine = {"dirpath": dirpath, "owner": owner, "pid": os.getpid()}
        deadline = clock.monotonic() + clock.timing.namespace_wait_s
        self._held: int | None = None
        while True:
            try:
                self._held, other = _lock(root, mine, clock)
            except OSError as error:
                # No space, or no descriptor: a save may not need memory.
                log.warning("could not lock this namespace of node memory; another job in it goes unnoticed: %s", error)
                return
            if self._held is not None:
                return
            if clock.monotonic() > deadline:
                break
            # The other job's process may be about to end.
            clock.sleep(clock.timing.namespace_poll_s)
        raise ConfigError(
            f"another live job keeps its checkpoints in this node's memory under the same namespace: that of"
            f" {other.get('dirpath')}, process {other.get('pid')}",
            operation="save",
            tier="memory",
            key=str(root),
            hint="give each job of a node a namespace of its own",
        )

    @property
    def is_lost(self) -> bool:
        """True if the lock's file was removed, so that other jobs do not see the lock."""
        return self._held is not None and is_lost(self._held)

    def close(self) -> None:
        """Releases the lock."""
        held, self._held = self._held, None
        if held is not None:
            release(held)


def _lock(root: Path, mine: dict[str, Any], clock: Clock) -> tuple[int | None, dict[str, Any]]:
    """Returns a shared lock, or None and the job that has it; the first process of a job writes its owner."""
    held = try_lock(root / LOCK_FILE)
    is_first = held is not None
    if held is None:
        held = try_lock(root / LOCK_FILE, shared=True)
    try:
        if held is not None and is_first:
            write_atomic(root / _FACTS_FILE, json.dumps(mine).encode(), clock)
            share(held)
        other = _facts(root)
        # A damaged file names no job.
        is_mine = not other or are_one(mine["owner"], str(other.get("owner")))
    except BaseException:
        if held is not None:
            release(held)
        raise
    if held is not None and not is_mine:
        release(held)
        held = None
    return held, other


def _facts(root: Path) -> dict[str, Any]:
    try:
        facts = json.loads((root / _FACTS_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def lock_out(root: Path, held: contextlib.ExitStack) -> set[str]:
    """Locks trainers and drains out of a namespace until ``held`` ends; returns the locks that others hold."""
    locks = {name: try_lock(root / name) for name in (*TRAINERS, DRAIN_FILE)}
    for lock in filter(None, locks.values()):
        held.callback(release, lock)
    return {name for name, lock in locks.items() if lock is None}


def delete(root: Path, spills: Iterable[Path], clock: Clock) -> None:
    """Deletes the memory of a namespace, and its spills.

    Memory is renamed first, so that no process finds it or queues anything there; a drain without work that holds its
    lock leaves, because its file is gone. The spill goes before the memory, which names the spill to the next command
    if this one is killed.
    """
    going = [root.with_name(f"{left_by(root)}{clock.token(8)}")] if root.is_dir() else []
    for renamed in going:
        root.rename(renamed)
    for folder in filter(Path.is_dir, (*spills, *going)):
        shutil.rmtree(folder)


def left_by(root: Path) -> str:
    """Returns the prefix of the names by :func:`delete`, under which a killed process leaves remains."""
    return f".{root.name}.cleaned-"


def make_room(tier: MemoryTier, missing: int, log: Logger, clock: Clock) -> str:
    """Deletes ended namespaces of this user whose checkpoints are durable, the oldest first, until there is room.

    Returns:
        Advice that names the namespaces which take memory too; empty if there is room, or if they do not matter.
    """
    if tier.budget is not None and tier.budget - tier.usage() < missing:
        return ""
    taken, left = [], []
    roots = [each for each in tier.root.parent.glob("[!.]*") if each != tier.root and (each / SAVES).is_dir()]
    for root in sorted(roots, key=lambda each: each.stat().st_mtime):
        # Another process may do the same.
        with contextlib.ExitStack() as held, contextlib.suppress(FileNotFoundError):
            if tier.room() >= missing:
                break
            other, size = tier_at(root), size_text(used(root))
            if lock_out(root, held):
                left.append(f"{root.name} ({size}, in use)")
            elif _is_needed(other):
                where = f"--memory-dir {root.parent.parent} --namespace {root.name}"
                free = f"`tiered-ckpt flush {where}`, then `tiered-ckpt clean --yes {where}`"
                left.append(f"{root.name} ({size}, not all known to be durable: {free})")
            else:
                delete(root, [other.spill.root] if other.spill is not None else [], clock)
                taken.append(f"{root.name} ({size})")
    if taken:
        log.info("took memory of ended runs, whose checkpoints are all durable: %s", ", ".join(taken))
    return "" if tier.room() >= missing or not left else f"other namespaces take memory too: {', '.join(left)}"


def _is_needed(tier: MemoryTier) -> bool:
    """Returns True if memory may hold anything that is not known to be on the durable tier, and is needed."""
    queue, there = Queue(tier.root), dict[tuple[Place, str], str]()
    for each in queue.outcomes():
        if each.state == "committed" and each.action in ("save", "delete"):
            there[each.place, each.name] = each.op_id if each.action == "save" else ""
    return bool(queue.look(tier) or tier.unreadable() or only_here(tier.held(), there))
