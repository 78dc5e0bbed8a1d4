"""How a checkpoint of several parts begins to exist on the durable tier, and what of others goes.

As in ``commit``, each function is a sequence of single-object writes, ordered so that a crash after
any of them leaves the old checkpoint or the new one, and each may be repeated:

1. The drain of each node, for each part in its memory: the part's files, but not ``.metadata``;
   then the part's description, ``.tiered/parts/<name>/<save_id>/rank-00003.json`` (:func:`put_part`).
2. The drain that holds the coordinator's part, once all descriptions are there
   (:func:`commit_parts`): where the name's ``.metadata`` is taken, a manifest that knows both contents;
   ``.metadata``; a manifest that knows the new content alone. Behind that, files of the old content
   and the descriptions go.
3. Then what is left of saves that never became whole (:func:`collect`).

No file of the old content is ever written to, but ``.metadata``, which is one object: whoever saves
gives new files new names where a name is taken, and a part that does not is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tiered_checkpoint_io.engine.durable.commit import aliases_of, orphans_of
from tiered_checkpoint_io.engine.durable.journals import Removal, Section
from tiered_checkpoint_io.engine.durable.manifests import (
    contents_of,
    current,
    in_parallel,
    paths_in,
    paths_of,
    replaced_by,
    verify,
)
from tiered_checkpoint_io.errors import FormatVersionError, ManifestError, StoreError, StoreNotFoundError, UsageError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.ids import PartKey
from tiered_checkpoint_io.model.manifest import METADATA, FileEntry, Manifest, Part, merge_parts
from tiered_checkpoint_io.stores.base import Store, UploadJournal

_SENT = "sent"
_FILES = "files"
_UPLOAD = "upload"
_REMOVAL = "removal"
#: Beside the files, in the list of what was sent: the part's description.
_DESCRIPTION = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A part whose files are on the durable tier.

    Attributes:
        key: Which.
        modified: When its description was put, by the store's own clock, seconds since the epoch.
    """

    key: PartKey
    modified: float


# ------------------------------------------------------------------------------------------ parts
def put_part(
    store: Store,
    part: Part,
    files: Mapping[str, memoryview],
    *,
    journal: UploadJournal,
    progress: Callable[[int], None] | None = None,
) -> Literal["sent", "committed", "replaced"]:
    """Brings one rank's part to the durable tier, all but ``.metadata``.

    Args:
        store: Where.
        part: A part of a ``sharded`` or ``local`` checkpoint.
        files: The bytes of its files, by basename; all are verified before anything is written.
        journal: Remembers what has arrived, between a crash and the next call. :func:`commit_parts`
            goes on with it.
        progress: See :meth:`Store.upload`.

    Returns:
        ``sent``; ``committed`` where its save is committed already; ``replaced`` where a later
        save has taken its name. In the last two cases nothing was written.

    Raises:
        CorruptCheckpointError: A file differs from its hashes. Nothing was written.
        UsageError: Not such a part, or it would write to files of the checkpoint that it replaces.
        FormatVersionError: A newer release owns this name. Nothing was written.
        StoreError: Repeat the call to finish.
    """
    sent = _sent(journal)
    old = current(store, part.name)
    if old is not None and old.alias_of is None:
        if old.content.save_id > part.save_id:
            return "replaced"
        if old.content.save_id == part.save_id and not old.previous:
            return "committed"
    if _DESCRIPTION in sent:
        return "sent"
    _check(store, part, old)
    for entry in part.content.files:
        verify(entry, files[entry.basename], tier="memory", where=f"{part.name}, rank {part.rank}")
    for entry in _uploaded(part):
        if entry.basename not in sent:
            upload = Section(journal, _UPLOAD)
            store.upload(entry.path, files[entry.basename], journal=upload, progress=progress)
            sent.append(entry.basename)
            Section(journal, _SENT).write({_FILES: sent})
    store.put(ids.part_key(part.name, part.save_id, part.rank), part.to_json())
    Section(journal, _SENT).write({_FILES: [*sent, _DESCRIPTION]})
    return "sent"


def abandon(store: Store, part: Part, journal: UploadJournal) -> None:
    """Ends the upload of a part that will not be needed. Files that have arrived stay where they are."""
    sent = _sent(journal)
    for entry in _uploaded(part):
        if entry.basename not in sent:
            store.abandon(entry.path, Section(journal, _UPLOAD))


def arrived(store: Store) -> list[Arrived]:
    """All parts whose files are on the durable tier and whose save is not committed: one list.

    Raises:
        StoreError: The tier could not be asked.
    """
    keys = ((ids.parse_part_key(entry.key), entry.modified) for entry in store.list(ids.PART_PREFIX))
    return [Arrived(key, modified) for key, modified in keys if key is not None]


def missing_ranks(part: Part, parts: Sequence[Arrived]) -> list[int]:
    """The ranks whose parts of the same save have not arrived, beside ``part``."""
    there = {each.key.rank for each in parts if (each.key.name, each.key.save_id) == (part.name, part.save_id)}
    there.add(part.rank)
    return [rank for rank in range(part.content.world_size) if rank not in there]


# ----------------------------------------------------------------------------------------- commit
def commit_parts(store: Store, part: Part, files: Mapping[str, memoryview], *, journal: UploadJournal) -> bool:
    """Makes a checkpoint exist, all of whose parts have arrived.

    Args:
        store: Where.
        part: The coordinator's part, behind :func:`put_part`.
        files: The bytes of its files, by basename.
        journal: The one of :func:`put_part`; cleared at the end.

    Returns:
        False where this very save was committed already, and nothing was to be done but clear up.

    Raises:
        CorruptCheckpointError: ``.metadata`` differs from its hashes. Nothing was written.
        ManifestError: The parts do not make one checkpoint.
        StoreNotFoundError: A part is not there.
        StoreError: A file is not there as its part says. Or else: repeat the call to finish.
    """
    removal = Section(journal, _REMOVAL)
    keys = [PartKey(part.name, part.save_id, rank) for rank in range(part.content.world_size)]
    old = current(store, part.name)
    committed = old is not None and old.alias_of is None and old.content.save_id == part.save_id and not old.previous
    if committed:
        (Removal.noted(removal) or Removal(part.name)).finish(store, removal)
    else:
        others = in_parallel(lambda key: _read_part(store, key), [key for key in keys if key.rank != part.rank])
        merged = merge_parts([part, *others])
        if merged is None:
            raise ManifestError("the parts are not of all ranks", operation="commit", tier="durable", key=part.name)
        _check_sizes(store, merged, besides=_switch(part))
        _change_over(store, part, merged, old, files, journal)
    in_parallel(store.delete, [ids.part_key(*key) for key in keys])
    journal.clear()
    return not committed


def _change_over(
    store: Store,
    part: Part,
    merged: Manifest,
    old: Manifest | None,
    files: Mapping[str, memoryview],
    journal: UploadJournal,
) -> None:
    """From the old content of a name to the new one: see the head of this module."""
    key, switch, removal = ids.manifest_key(part.name), _switch(part), Section(journal, _REMOVAL)
    replaced = replaced_by(store, part.name, f"{part.name}/{METADATA}", old)
    merged = replace(merged, aliases=aliases_of(replaced))
    others = tuple(content for content in contents_of(replaced) if content.save_id != part.save_id)
    if switch is not None:
        # It may have waited for long since it was verified with the other files.
        verify(switch, files[switch.basename], tier="memory", where=f"{part.name}, rank {part.rank}")
        if switch.path in paths_in(others):
            store.put(key, replace(merged, previous=others).to_json())
        store.upload(switch.path, files[switch.basename], journal=Section(journal, _UPLOAD))
    orphans = orphans_of(store, merged, others, old)
    orphans.note(removal)
    store.put(key, merged.to_json())
    orphans.finish(store, removal)


# ---------------------------------------------------------------------------------------- garbage
def collect(
    store: Store, committed: Part, parts: Sequence[Arrived], *, patience_s: float, busy: Collection[str] = ()
) -> list[PartKey]:
    """Removes what is left of saves that never became whole, and will not.

    Those are parts of older saves: of the same run at once, for it commits in order; of other runs,
    which may have a coordinator of their own at work, once nothing of them has moved for a while.

    Args:
        store: Where.
        committed: The coordinator's part of the save that was committed just now.
        parts: What :func:`arrived` gave before that commit.
        patience_s: How long parts of other runs are left alone, seconds.
        busy: Names with saves under way, which may share files with their older ones: left alone.

    Returns:
        The parts that are gone.
    """
    now = max((each.modified for each in parts), default=0.0)
    run = ids.run_id_of(committed.save_id)
    stale = [
        each.key
        for each in parts
        if each.key.save_id < committed.save_id
        and each.key.name not in busy
        and (ids.run_id_of(each.key.save_id) == run or now - each.modified > patience_s)
    ]
    live: dict[str, set[str]] = {}
    gone = []
    for key in stale:
        if key.name not in live:
            old = current(store, key.name)
            named = replaced_by(store, key.name, f"{key.name}/{METADATA}", old)
            live[key.name] = {path for manifest in named for path in paths_of(manifest)}
        try:
            paths = [entry.path for entry in _read_part(store, key).content.files]
        except FormatVersionError:
            continue
        except (ManifestError, StoreNotFoundError):
            # Nobody can tell what it named, and nobody will ask again.
            paths = []
        in_parallel(store.delete, [path for path in paths if path not in live[key.name]])
        store.delete(ids.part_key(*key))
        gone.append(key)
    return gone


def clear_up(
    store: Store,
    committed: Part,
    parts: Sequence[Arrived],
    *,
    patience_s: float,
    busy: Collection[str],
    log: Logger,
) -> None:
    """As :func:`collect`, behind a commit that stands: what goes, or can't go now, is only told to the log."""
    try:
        gone = collect(store, committed, parts, patience_s=patience_s, busy=busy)
    except StoreError as error:
        # The checkpoint is there; what is left of others is found again behind the next one.
        log.warning("could not clear up after saves that never became whole: %s", error)
        return
    for save_id, name in sorted({(key.save_id, key.name) for key in gone}):
        log.warning("save %s of %s never became whole; what was there of it is removed", save_id, name)


# ------------------------------------------------------------------------------------------ inside
def _sent(journal: UploadJournal) -> list[str]:
    files = (Section(journal, _SENT).read() or {}).get(_FILES)
    return [str(name) for name in files] if isinstance(files, list) else []


def _switch(part: Part) -> FileEntry | None:
    """The file whose change turns the old content of a name into the new one."""
    if part.content.kind != "sharded":
        return None
    return next((entry for entry in part.content.files if entry.basename == METADATA), None)


def _uploaded(part: Part) -> list[FileEntry]:
    """The files that are there before the checkpoint is."""
    switch = _switch(part)
    return [entry for entry in part.content.files if entry is not switch]


def _check(store: Store, part: Part, old: Manifest | None) -> None:
    """Refuses a part that would write where it must not."""
    if part.content.kind == "full":
        raise UsageError("a full checkpoint has no parts", operation="upload", key=part.name, rank=part.rank)
    _check_paths(part)
    ours = [entry.path for entry in _uploaded(part)]
    if not ours:
        return
    taken = replaced_by(store, part.name, f"{part.name}/{METADATA}" if part.content.kind == "sharded" else ours[0], old)
    others = [content for content in contents_of(taken) if content.save_id != part.save_id]
    clash = set(paths_in(others)).intersection(ours)
    if clash:
        raise UsageError(
            f"{min(clash)!r} belongs to the checkpoint that this save is to replace",
            operation="upload",
            tier="durable",
            key=part.name,
            rank=part.rank,
            step=part.content.step,
            hint="save under another name, or give the files names of their own",
        )


def _check_paths(part: Part) -> None:
    for entry in part.content.files:
        if entry.path != f"{part.name}/{entry.basename}":
            raise ManifestError(f"file {entry.path!r} is not in the folder of its checkpoint", key=part.name)


def _read_part(store: Store, key: PartKey) -> Part:
    """The description of a part; one that is not what its key says, or names files of others, is damaged."""
    where = ids.part_key(*key)
    part = Part.from_json(store.get(where), where=where)
    if (part.name, part.save_id, part.rank) != key or part.content.kind == "full":
        raise ManifestError("the description of another part", operation="parse", tier="durable", key=where)
    _check_paths(part)
    return part


def _check_sizes(store: Store, merged: Manifest, *, besides: FileEntry | None) -> None:
    """What a manifest names must be there: one list, for all that may have happened since the uploads."""
    sizes = {entry.key: entry.size for entry in store.list(f"{merged.name}/")}
    for entry in merged.content.files:
        if entry.path != (besides.path if besides else None) and sizes.get(entry.path) != entry.size:
            raise StoreError(
                f"{sizes.get(entry.path, 'no')} bytes of a file are there, in place of {entry.size}",
                operation="commit",
                tier="durable",
                key=entry.path,
                step=merged.content.step,
                hint="it was removed or replaced after its upload; the next save is not affected",
            )
