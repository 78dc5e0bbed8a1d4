"""The roots of memory tiers on this node, as the last trainer had them."""

from __future__ import annotations

import os
from pathlib import Path

from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE, last_config
from tiered_checkpoint_io.engine.drain.worker import TRAINERS_FILE
from tiered_checkpoint_io.engine.leasing.namespace_lock import LOCK_FILE as JOB_FILE
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory.spill import AUTO
from tiered_checkpoint_io.memory.tier import FOLDERS, MemoryTier, namespace_root
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.stores import place_of

#: What a process that may add to the memory holds: a trainer, and a job.
TRAINERS = (TRAINERS_FILE, JOB_FILE)


def all_roots(memory_dir: str) -> list[Path]:
    """The memory tiers of all of this user's namespaces.

    Raises:
        ConfigError: The folder does not exist.
    """
    if not os.path.isdir(memory_dir):
        raise ConfigError(f"there is no folder {memory_dir}", hint="check --memory-dir")
    folder = namespace_root(memory_dir, "default").parent
    return sorted(each for each in folder.glob("[!.]*") if _is_tier(each))


def roots_of(memory_dir: str, place: Place) -> list[Path]:
    """Those whose last trainer saved to ``place``; the last to be written to first. Raises as :func:`all_roots`."""
    configs = {root: last_config(root) for root in all_roots(memory_dir)}
    found = [root for root, config in configs.items() if config is not None and place_of(config) == place]
    return sorted(found, key=lambda root: (root / CONFIG_FILE).stat().st_mtime, reverse=True)


def existing(root: Path) -> Path:
    """Gives the root of a memory tier back.

    Raises:
        ConfigError: There is none.
    """
    if not _is_tier(root):
        raise ConfigError(f"no memory tier at {root}", hint="check --memory-dir and --namespace")
    return root


def owned(root: Path) -> Path:
    """Gives the root of a memory tier back, for commands that write there.

    Raises:
        ConfigError: It is another user's. What we made there, as root, that user's trainer and drain could not open.
    """
    owner = root.stat().st_uid
    if owner != os.getuid():
        text = f"{root} belongs to user {owner}, and this command runs as user {os.getuid()}; nothing was changed"
        raise ConfigError(text, hint=f"run it as that user, such as by: sudo -u '#{owner}'")
    return root


def _is_tier(root: Path) -> bool:
    return all((root / folder).is_dir() for folder in FOLDERS)


def tier_at(root: Path) -> MemoryTier:
    """The memory tier of a root with its spill."""
    tier, config = MemoryTier(root), last_config(root)
    tier.use_spill(config.spill_dir if config is not None else AUTO)
    tier.place = place_of(config) if config is not None else None
    return tier


def has_trainer(root: Path) -> bool:
    """Whether a process lives that may add to the memory."""
    for path in filter(Path.exists, (root / name for name in TRAINERS)):
        lock = try_lock(path)
        if lock is None:
            return True
        release(lock)
    return False


def undone(root: Path) -> int:
    """How many saves, aliases and deletes wait for the durable tier, but for what only a further save sets free."""
    try:
        return len(Queue(root).doable(tier_at(root)))
    except FileNotFoundError:
        # Half cleaned away already.
        return 0
