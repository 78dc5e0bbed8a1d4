"""Damage of checkpoints on the durable tier: every byte is read and compared with its hash."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tiered_checkpoint_io.engine.chunks import fetch_targets
from tiered_checkpoint_io.engine.durable.files import files_of, is_edited
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.retry import moving

#: Chunks of a file that are read at once.
_READS = 8

_Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Damage:
    """The first damage of a content; ``rank`` and ``file`` if it is in a file, which may not be there."""

    error: str
    rank: int | None = None
    file: str = ""
    is_gone: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.error}" if self.file else self.error


def contents_there(store: Store, manifest: Manifest) -> tuple[Content, ...]:
    """Returns the contents that a checkpoint's objects may be; an overwrite under way adds the content before.

    A sharded checkpoint's switch decides. Of one file, all contents are returned: only a read of all bytes decides.
    """
    contents = (manifest.content, *manifest.previous)
    if not manifest.previous:
        return contents
    current = tuple(each for each in contents if each.kind == "sharded" and _has_switch(store, manifest.name, each))
    return current or contents


def _has_switch(store: Store, name: str, content: Content) -> bool:
    path = content.switch_path(name)
    try:
        entry = files_of(store, content).entry(path.rpartition("/")[2]) if path is not None else None
        if entry is not None:
            for index in range(len(entry.chunks)):
                fetch_targets(store, entry, index, ())
    except (CorruptCheckpointError, StoreNotFoundError):
        return False
    return entry is not None


def content_or_damage(store: Store, manifest: Manifest, progress: _Progress = lambda _: None) -> Content | Damage:
    """Returns the content that a checkpoint's bytes match; or their damage, if they match none.

    For an alias, better the manifest of the target. Calls ``progress`` with the bytes of each chunk, from any thread.
    A StoreError says nothing of the checkpoint.
    """
    damage: Damage | None = None
    for content in contents_there(store, manifest):
        try:
            files = files_of(store, content)
            # With one part, all files are its coordinator's.
            alone = content.parts == 1
            ranks = [max(content.coordinator, 0)] if alone else range(content.parts)
            owners = {entry.path: rank for rank in ranks for entry in files.of_rank(rank)}
            found = _first_damage(store, files.all(), owners, progress)
        except (CorruptCheckpointError, StoreNotFoundError) as error:
            found = _damage(error, error.key or "")
        if found is None:
            return content
        # With several contents, the damage of the last one, which is known to have been complete.
        damage = found
    assert damage is not None
    return damage


def edit_of(store: Store, manifest: Manifest) -> Damage | None:
    """Returns the damage of a checkpoint that its owner edited; None for any other, which is read if times differ."""
    found = content_or_damage(store, manifest) if is_edited(store, manifest) else None
    return found if isinstance(found, Damage) and read_manifest(store, manifest.name) == manifest else None


def _first_damage(
    store: Store, entries: Collection[FileEntry], owners: dict[str, int], progress: _Progress
) -> Damage | None:
    moved, damaged = moving(), set[str]()

    def one(job: tuple[FileEntry, int]) -> Damage | None:
        entry, index = job
        if entry.path in damaged:
            return None
        where = f"{store.url}/{entry.path}", owners.get(entry.path)
        try:
            if index == 0 and (size := store.size(entry.path)) != entry.size:
                raise CorruptCheckpointError(f"{size} bytes instead of {entry.size}")
            # The bytes are only compared. A slow line takes longer for a chunk than a silence may last.
            fetch_targets(store, entry, index, (), lambda _: moved())
            progress(entry.chunks[index][1])
        except (CorruptCheckpointError, StoreNotFoundError) as error:
            damaged.add(entry.path)
            return _damage(error, *where)
        return None

    jobs = [(entry, index) for entry in entries for index in range(len(entry.hashes))]
    return next(filter(None, in_parallel(one, jobs, _READS)), None)


def _damage(error: CorruptCheckpointError | StoreNotFoundError, file: str, rank: int | None = None) -> Damage:
    return Damage(error.message, rank, file, isinstance(error, StoreNotFoundError))
