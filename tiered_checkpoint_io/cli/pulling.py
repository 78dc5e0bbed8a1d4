"""How a checkpoint is fetched from the durable tier to this node's memory, or to a folder: all of it, or nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from tiered_checkpoint_io.cli.answers import counter
from tiered_checkpoint_io.cli.checking import check_part
from tiered_checkpoint_io.cli.progress import Meter, progress
from tiered_checkpoint_io.engine.chunks import fetch_chunk
from tiered_checkpoint_io.engine.durable.damage import contents_there
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.engine.ranks.transfer import SlotDestination
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestError,
    MemoryFullError,
    MemoryTierError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.export.files import new_files
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.inventory.durable import find, read_unchanged
from tiered_checkpoint_io.memory.node import node_budget
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest, Part
from tiered_checkpoint_io.stores import Store, place_of
from tiered_checkpoint_io.stores.silence import local_work, moving


def fetch(
    config: TieredCheckpointConfig,
    store: Store,
    wanted: str,
    ranks: Sequence[int],
    to: Path | None,
    stop: threading.Event,
    *,
    silent: bool,
) -> tuple[list[Part], list[Part]]:
    """Fetches the parts of a checkpoint to this node's memory, or their files to a folder; every byte is verified.

    Args:
        config: Which durable tier, and which namespace of memory.
        store: The durable tier.
        wanted: The checkpoint's name, or ``tiered:latest``.
        ranks: Whose parts; all where it is empty.
        to: A folder, in place of memory.
        stop: Ends it where it is set.
        silent: Show no progress.

    Returns:
        The parts, and those of them that were fetched: memory may have had the others, intact.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        CorruptCheckpointError: Its bytes are not those that were saved.
        MemoryFullError: Memory has no room for it.
        ExportError: A file exists already, or can't be written.
        StoreChangedError: A run removed or overwrote it, each time that it was read.
    """

    def look() -> tuple[Manifest, Manifest]:
        manifest = _find(store, wanted)
        return manifest, manifest

    def work(manifest: Manifest) -> tuple[list[Part], list[Part]]:
        errors: list[TieredCheckpointError] = []
        for content in contents_there(store, manifest):
            try:
                return fetch_content(manifest.name, content)
            except (CorruptCheckpointError, ManifestError, StoreNotFoundError, MemoryFullError) as error:
                errors.append(error)
        # What does not fit may be the one that is intact.
        raise next((each for each in errors if isinstance(each, MemoryFullError)), errors[0])

    def fetch_content(name: str, content: Content) -> tuple[list[Part], list[Part]]:
        parts = _parts(config, store, name, content, ranks)
        with contextlib.ExitStack() as held:
            if to is not None:
                fetched, views = parts, held.enter_context(_files(to, parts))
            else:
                tier = _open(config)
                fetched = [part for part in parts if not _has(tier, part)]
                views = held.enter_context(_slots(tier, fetched))
            entries = [entry for part in fetched for entry in part.content.files]
            jobs = [(entry, index) for entry in entries for index in range(len(entry.hashes))]
            meter = held.enter_context(progress("pull", sum(entry.size for entry in entries), silent=silent))
            count = counter("pull", store.url, stop, meter.add)
            in_parallel(lambda job: _fetch(store, views, *job, count), jobs, config.read_concurrency())
        return parts, fetched

    return read_unchanged(store, look, work, operation="pull")


def _find(store: Store, wanted: str) -> Manifest:
    found = find(store, wanted, operation="pull")
    if found is None:
        text = f"no such checkpoint: {wanted}"
        hint = "list what is there: tiered-ckpt ls; a checkpoint of another library is loaded by its path"
        raise CheckpointNotFoundError(text, operation="pull", tier="durable", key=store.url, hint=hint)
    return found


def _parts(
    config: TieredCheckpointConfig, store: Store, name: str, content: Content, ranks: Sequence[int]
) -> list[Part]:
    """The parts of a checkpoint that are asked for, as memory holds them."""
    place = place_of(config)
    files, there = files_of(store, content), range(content.parts)
    if content.parts == 1:
        there = range(max(content.coordinator, 0), max(content.coordinator, 0) + 1)
    elif unknown := [rank for rank in ranks if rank not in there]:
        raise typer.BadParameter(f"--rank {unknown[0]}: {name} has {content.parts} parts, from rank 0 on")
    return [
        Part(
            name,
            rank,
            replace(content, files=files.of_rank(rank), index=None),
            config.dirpath,
            durable=True,
            server=place.server,
            series=content.series_at(name),
        )
        for rank in there
        if content.parts == 1 or not ranks or rank in ranks
    ]


def _open(config: TieredCheckpointConfig) -> MemoryTier:
    budget = node_budget(config.memory_allocation_percentage, config.memory_dir)
    tier = MemoryTier.open(config.memory_dir, config.namespace, budget_bytes=budget)
    tier.place = place_of(config)
    return tier


def _has(tier: MemoryTier, part: Part) -> bool:
    """Whether memory has a part already, intact; a damaged one is quarantined."""
    heard = moving()
    for stored in tier.held():
        if (stored.save_id, stored.part.rank) == (part.save_id, part.rank):
            checked = check_part(tier, stored, Meter(lambda _: heard()))
            if checked.state == "damaged":
                tier.quarantine(stored.folder, checked.error or "")
            elif checked.state == "intact":
                return True
    return False


_Views = Mapping[str, memoryview]


@contextlib.contextmanager
def _slots(tier: MemoryTier, parts: Sequence[Part]) -> Iterator[_Views]:
    """Room in memory for the files of parts, which are committed there if the block does not raise."""
    destinations = [SlotDestination(tier, part, drained=True) for part in parts]
    try:
        with contextlib.ExitStack() as held:
            views: dict[str, memoryview] = {}
            for part, destination in zip(parts, destinations, strict=True):
                with local_work():
                    opened = held.enter_context(destination.open())
                views |= {entry.path: opened[entry.basename] for entry in part.content.files}
            yield views
        for part, destination in zip(parts, destinations, strict=True):
            try:
                destination.keep()
            except MemoryFullError:
                raise
            except MemoryTierError:
                # Another process has brought it meanwhile, such as this command in another task of the node.
                if not _has(tier, part):
                    raise
                destination.drop()
    except BaseException:
        for destination in destinations:
            destination.drop()
        raise
    finally:
        tier.close()


@contextlib.contextmanager
def _files(folder: Path, parts: Sequence[Part]) -> Iterator[_Views]:
    """Files below a folder, which get their names if the block does not raise; the switch gets its name last."""
    entries = [(entry, part.content.switch) for part in parts for entry in part.content.files]
    entries.sort(key=lambda each: each[0].basename == each[1])
    targets = [(folder / entry.path, entry.size) for entry, _ in entries]
    for target, _ in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
    with new_files(targets) as mappings, contextlib.ExitStack() as held:
        yield {
            entry.path: held.enter_context(memoryview(mapping))
            for (entry, _), mapping in zip(entries, mappings, strict=True)
        }


def _fetch(store: Store, views: _Views, entry: FileEntry, index: int, count: Callable[[int], None]) -> None:
    count(0)
    offset, length = entry.chunks[index]
    with views[entry.path][offset : offset + length] as chunk:
        fetch_chunk(store, entry, index, chunk)
    count(length)
