"""Whose a namespace of a node's memory is: one live job's at a time.

Two jobs in one namespace would take each other's checkpoints for surplus ones of their own, and each would tell
the drain how to reach its own durable tier. A job is known by its dirpath and by its launch; who it is stands in
a file, and whoever belongs to it holds a shared lock on another, which dies with its process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.locks import release, share, try_lock
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.private import write_atomic

LOCK_FILE = "job.lock"
_FACTS_FILE = "job.json"


class Tenancy:
    """One process' hold on a namespace of its node's memory."""

    def __init__(self, root: Path, dirpath: str, owner: str, log: Logger, clock: Clock) -> None:
        """Takes the namespace, or finds who has it.

        Args:
            root: The memory tier's.
            dirpath: Where the job's durable checkpoints go.
            owner: Its launch: see :func:`lease_keeper.owner_of_process`.
            log: Told where there is no space for the lock: then nothing is held.
            clock: For the wait for a job that may be about to end.

        Raises:
            UsageError: A live job of another dirpath and another launch has it.
        """
        self._held: int | None = None
        mine = {"dirpath": dirpath, "owner": owner, "pid": os.getpid()}
        deadline = clock.monotonic() + clock.timing.namespace_wait_s
        while True:
            held = None
            try:
                held = self._lock(root, mine, clock)
                other = _facts(root)
            except OSError as error:
                if held is not None:
                    release(held)
                # No space, or no descriptor: that must not keep a save from going past memory.
                log.warning("cannot note whose the memory of this namespace is: %s", error)
                return
            # What nobody can read names nobody.
            if held is not None and (not other or dirpath == other.get("dirpath") or owner == other.get("owner")):
                self._held = held
                return
            if held is not None:
                release(held)
            if clock.monotonic() > deadline:
                break
            # Its process may be about to end.
            clock.sleep(clock.timing.namespace_poll_s)
        raise UsageError(
            f"another live job keeps its checkpoints in this node's memory under the same namespace: that of"
            f" {other.get('dirpath')}, process {other.get('pid')}",
            operation="save",
            tier="memory",
            key=str(root),
            hint="give each job of a node a namespace of its own",
        )

    @staticmethod
    def _lock(root: Path, mine: dict[str, Any], clock: Clock) -> int | None:
        """A shared lock; None where somebody is just making his mark. Whoever finds no other leaves his."""
        held = try_lock(root / LOCK_FILE)
        if held is None:
            return try_lock(root / LOCK_FILE, shared=True)
        try:
            write_atomic(root / _FACTS_FILE, json.dumps(mine).encode(), clock)
            share(held)
        except BaseException:
            release(held)
            raise
        return held

    def close(self) -> None:
        """Lets it go."""
        if self._held is not None:
            release(self._held)
            self._held = None


def _facts(root: Path) -> dict[str, Any]:
    try:
        facts = json.loads((root / _FACTS_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
