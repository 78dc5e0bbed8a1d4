"""Exclusive use of a namespace of a node's memory: by one live job at a time.

Two jobs in one namespace would remove each other's checkpoints by their retention, and each would configure the drain
for its own durable tier. A job is known by its launch, which is in a file; each of its processes holds a shared lock on
another file, which ends with the process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.locks import is_lost, release, share, try_lock
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.private import write_atomic
from tiered_checkpoint_io.model.launches import are_one

LOCK_FILE = "job.lock"
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
