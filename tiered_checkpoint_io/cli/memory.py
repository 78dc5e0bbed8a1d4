"""Commands over the memory tier: run a drain, look at what lies in memory, clean."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.options import SHM, MemoryDir, Namespace, Root
from tiered_checkpoint_io.cli.output import show
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.drain.worker import EARLIER_TRAINERS_FILE, LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.engine.leasing.namespace_lock import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import ConfigError, DrainError
from tiered_checkpoint_io.logs import get_logger, gib
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.spill import AUTO
from tiered_checkpoint_io.memory.tier import FOLDERS, MemoryTier, namespace_root
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: How often a drain that stands by looks whether it is needed, seconds.
_STAND_BY_S = 1.0
_SHOWN_OUTCOMES = 10


def drain(
    root: Root = None,
    memory_dir: MemoryDir = SHM,
    namespace: Namespace = "default",
    once: Annotated[bool, typer.Option(help="Leave once nothing can be done now.")] = False,
    stay: Annotated[bool, typer.Option(help="Wait for work for ever, as a sidecar does.")] = False,
) -> None:
    """Moves checkpoints from node memory to the durable tier."""
    root = _existing(root or namespace_root(memory_dir, namespace))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log = get_logger(root.name)
    worker = Drain(root, logger=log, stop=stop, stay=stay)
    if not worker.run(once=once):
        log.info("another drain works on %s; %s", root, "standing by" if stay else "leaving")
        while stay and not stop.wait(_STAND_BY_S) and not worker.run(once=once):
            pass
    elif once and (left := _undone(root)):
        raise DrainError(
            f"{left} operations are not done",
            operation="drain",
            tier="durable",
            key=str(root),
            hint=f"last error: {Queue(root).progress().last_error or 'none'}",
        )


def status(root: Root = None, memory_dir: MemoryDir = SHM, namespace: Namespace = "default") -> None:
    """Shows what lies in node memory and what the drain does."""
    root = _existing(root or namespace_root(memory_dir, namespace))
    tier, queue = _tier(root), Queue(root)
    own = [_row(stored, _state(tier, stored)) for stored in reversed(tier.parts())]
    own += [(str(folder), "?", "?", "?", f"damaged: {error}", "?") for folder, error in tier.damaged()]
    show("Checkpoints in memory", own, "name", "step", "rank", "size", "state", "on peers too")
    copies = [_row(stored) for stored in reversed(tier.replicas.parts())]
    copies += [(str(folder), "?", "?", "?", f"damaged: {error}") for folder, error in tier.replicas.damaged()]
    if copies:
        show("Copies kept for other nodes", copies, "name", "step", "rank", "size", "all parts on peers")
    outcomes = [
        (each.action, each.name, each.state, gib(each.bytes) if each.bytes else "", each.error)
        for each in reversed(queue.outcomes()[-_SHOWN_OUTCOMES:])
    ]
    if outcomes:
        show("Last operations on the durable tier", outcomes, "operation", "name", "outcome", "size", "error")
    progress = queue.progress()
    age = time.time() - progress.heartbeat
    seen = f"process {progress.pid}, last seen {age:.0f} s ago" if progress.pid else "has not run"
    typer.echo(
        f"drain: {seen}, {progress.pending} pending"
        + (f", {progress.name} {gib(progress.bytes_done)} of {gib(progress.bytes_total)}" if progress.name else "")
        + (f"\nlast error: {progress.last_error}" if progress.last_error else "")
    )


def clean(
    root: Root = None,
    memory_dir: MemoryDir = SHM,
    namespace: Namespace = "default",
    force: Annotated[bool, typer.Option(help="Also what waits for the durable tier, or is in use.")] = False,
) -> None:
    """Deletes a namespace's checkpoints from node memory, and from its spill on the node's disk."""
    root = root or namespace_root(memory_dir, namespace)
    spill = _tier(root).spill
    if not root.is_dir():
        typer.echo(f"nothing at {root}")
        if spill is not None and (force or not any(stored.pending for stored in spill.parts())):
            shutil.rmtree(spill.root)
        return
    if not any((root / folder).is_dir() for folder in FOLDERS):
        raise ConfigError(f"{root} is no memory tier, and was left as it is", hint="check --root")
    locks = [try_lock(root / name) for name in (LOCK_FILE, TRAINERS_FILE, EARLIER_TRAINERS_FILE, JOB_FILE)]
    try:
        pending = _undone(root)
        if not force and (None in locks or pending):
            what = "a trainer or drain uses it" if None in locks else f"{pending} operations are not yet durable"
            raise ConfigError(f"{root} was left as it is: {what}", hint="run the drain first, or give --force")
        shutil.rmtree(root)
        if spill is not None:
            shutil.rmtree(spill.root)
    finally:
        for lock in locks:
            if lock is not None:
                release(lock)
    with contextlib.suppress(OSError):
        root.parent.rmdir()


def _row(stored: StoredPart, *state: str) -> tuple[str, ...]:
    content = stored.part.content
    # Of a save of several ranks, only all parts together are safe.
    safe = "yes" if stored.replicated else "no"
    return stored.part.name, str(content.step), str(stored.part.rank), gib(content.size), *state, safe


def _state(tier: MemoryTier, stored: StoredPart) -> str:
    state = "waits for the durable tier" if stored.pending else "durable" if stored.part.durable else "memory only"
    return f"{state} (on disk)" if tier.is_spilled(stored.folder) else state


def _tier(root: Path) -> MemoryTier:
    """The memory tier of a root with its spill, as the last trainer had it."""
    tier = MemoryTier(root)
    tier.use_spill(AUTO)
    with contextlib.suppress(OSError, ConfigError):
        tier.use_spill(TieredCheckpointConfig.from_json((root / CONFIG_FILE).read_text()).spill_dir)
    return tier


def _existing(root: Path) -> Path:
    if not all((root / folder).is_dir() for folder in FOLDERS):
        raise ConfigError(f"no memory tier at {root}", hint="check --memory-dir and --namespace, or --root")
    return root


def _undone(root: Path) -> int:
    """How many saves, aliases and deletes wait for the durable tier, but for what only a further save sets free."""
    try:
        return len(Queue(root).doable(_tier(root)))
    except FileNotFoundError:
        # Half cleaned away already.
        return 0
