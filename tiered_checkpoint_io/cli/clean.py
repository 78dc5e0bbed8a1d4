"""The command that deletes a namespace's checkpoints from node memory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.listing import columns_of
from tiered_checkpoint_io.cli.options import Node, Output
from tiered_checkpoint_io.cli.output import say, show, write_json
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.stores import last_config
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE
from tiered_checkpoint_io.engine.leasing import delete, left_by, lock_out
from tiered_checkpoint_io.engine.retention import only_here
from tiered_checkpoint_io.errors import ConfigError, TieredCheckpointError
from tiered_checkpoint_io.inventory.durable import DurableCheckpoint, read_all, resumable
from tiered_checkpoint_io.inventory.node import BrokenPart, Namespace, look_at, owned, places_of, undone
from tiered_checkpoint_io.inventory.rows import Look
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import release, try_lock
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.memory.tier import AUTO, FOLDERS, MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.retention import unit_of
from tiered_checkpoint_io.stores import config_at

_USED = "a trainer or drain uses it"


@dataclass(frozen=True, kw_only=True)
class Clean(Output, Node):
    """Deletes a namespace's checkpoints from node memory, and from its spill.

    Without --yes it only shows what would go, and warns of what would be lost: uploads that are pending, parts that
    can't be read, and a newest checkpoint that the durable tier does not have. Then the exit status is 1. Refused while
    a trainer uses the memory, or a drain works on it; a drain that has nothing to do is ended.
    """

    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only show what would go.")] = False

    def run(self) -> None:
        """Shows the files that would go, or deletes them; the status is 1 if there is a warning."""
        root = self.root
        with contextlib.ExitStack() as held:
            left = _left_over(root, held)
            # A folder that an earlier command has put away, and not deleted yet, names the spill as well.
            config = next(filter(None, map(last_config, [root, *left])), None)
            memory = MemoryTier(root)
            memory.use_spill(config.spill_dir if config is not None else AUTO)
            spills = [memory.spill] if memory.spill is not None else []
            folders = [*([root] if root.is_dir() else []), *(each.root for each in spills)]
            if root.is_dir():
                if not any((root / folder).is_dir() for folder in FOLDERS):
                    hint = "check --memory-dir and --namespace"
                    raise ConfigError(f"{root} is no memory tier, and was left as it is", hint=hint)
                owned(root)
            is_used, found = _is_used(root, held), None
            # An earlier command may have been killed half-way.
            with contextlib.suppress(FileNotFoundError):
                found = look_at(root) if root.is_dir() else None
            warnings = _warnings(config, found, is_used=is_used) if found is not None and not self.yes else []
            if self.yes:
                if is_used:
                    raise ConfigError(f"{root} was left as it is: {_USED}", hint="end it first")
                delete(root, [each.root for each in spills], SYSTEM)
                for folder in left:
                    shutil.rmtree(folder, ignore_errors=True)
        if self.yes:
            with contextlib.suppress(OSError):
                root.parent.rmdir()
        rows = [row for place in places_of([found]) for row in Look(place, [found]).checkpoints] if found else []
        if self.as_json:
            document = {"root": root, "dry_run": not self.yes, "warnings": warnings, "checkpoints": rows}
            write_json("clean", document)
        elif not folders:
            say(f"nothing in memory at {root}, and no spill of it is known")
        else:
            show(rows, columns_of(rows))
            for warning in warnings:
                say(f"warning: {warning}", err=True)
            parts, unread = (found.held, _unread(found)) if found is not None else ([], [])
            size = size_text(sum(each.size_bytes for each in parts))
            what = f"{_count(len(parts) + len(unread), 'part')}, {size}, and {', '.join(map(str, folders))}"
            say(f"removed {what}" if self.yes else f"{what} would go; delete with --yes")
        raise typer.Exit(1 if warnings else 0)


def _is_used(root: Path, held: contextlib.ExitStack) -> bool:
    """Locks out trainers and drains until ``held`` ends; returns whether one of them was there before."""
    deadline = SYSTEM.monotonic() + SYSTEM.timing.namespace_wait_s
    while root.is_dir():
        with contextlib.ExitStack() as tried:
            busy = lock_out(root, tried)
            # An idle drain is no reason to keep a memory.
            is_used = bool(busy - {LOCK_FILE}) or (bool(busy) and undone(root) > 0)
            if not is_used or SYSTEM.monotonic() > deadline:
                held.push(tried.pop_all())
                return is_used
        # A drain that is about to leave looks for trainers by their lock.
        SYSTEM.sleep(SYSTEM.timing.namespace_poll_s)
    return False


def _left_over(root: Path, held: contextlib.ExitStack) -> list[Path]:
    """Returns folders that killed commands have put away, locked until ``held`` ends."""
    found: list[Path] = []
    for left in sorted(root.parent.iterdir()) if root.parent.is_dir() else ():
        # One that is locked is another command's, which may put it back.
        if left.name.startswith(left_by(root)) and (lock := try_lock(left / TRAINERS_FILE)) is not None:
            held.callback(release, lock)
            found.append(left)
    return found


def _warnings(config: TieredCheckpointConfig | None, found: Namespace, *, is_used: bool) -> list[str]:
    """Returns reasons not to delete the parts."""
    pending, parts = len(found.waiting), [each.stored for each in found.held]
    warnings = [
        f"{_USED}, so nothing can be deleted" if is_used else "",
        f"{_count(pending, 'operation')} not yet durable: upload first, by tiered-ckpt flush" if pending else "",
        *(f"a part can't be read: {each.why}" for each in _unread(found)[:1]),
        *(_nowhere_else(config, place, parts) for place in sorted({each.place for each in found.held}, key=str)),
    ]
    return list(filter(None, warnings))


def _unread(found: Namespace) -> list[BrokenPart]:
    """Returns the parts that can't be read: unknown if they are needed. Those in quarantine are not."""
    return [each for each in found.broken if each.tier is not None]


def _nowhere_else(config: TieredCheckpointConfig | None, place: Place, parts: Iterable[StoredPart]) -> str:
    """Returns why the newest checkpoint of a payload, or another of its step, must stay in memory; else "".

    Replicas on other nodes are in memory too, and may be cleaned at the same time: they do not count.
    """
    here = [each for each in parts if each.part.place == place and each.part.content.resumable]
    if not (lost := only_here(here, {})):
        return ""
    try:
        there = config_at(config or TieredCheckpointConfig.from_any(dirpath=place.dirpath), place)
        found = ask(there, read_all, place.dirpath)
        held = {(place, each.name): each.manifest.settled.save_id for each in found if each.manifest is not None}
        lost = [each for each in only_here(here, held) if not _is_older(each.part, found)]
    except TieredCheckpointError as error:
        named = _named(lost[-1].part)
        return f"could not check whether its newest checkpoint {named} is on the durable tier too: {error}"
    return f"its newest checkpoint {_named(lost[0].part)} is not on the durable tier {place.dirpath}" if lost else ""


def _is_older(part: Part, found: Sequence[DurableCheckpoint]) -> bool:
    """Returns True if a restart would take a later durable save of the same payload and another step."""
    alike = [each for each in found if each.manifest is None or each.manifest.settled.kind == part.content.kind]
    meant = next(iter(resumable(alike)), None)
    if meant is None or meant.save_id <= part.save_id:
        return False
    return unit_of(meant.name, meant.content.step) != unit_of(part.name, part.content.step)


def _named(part: Part) -> str:
    return f"{part.name} (step {part.content.step})" if part.content.step >= 0 else part.name


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
