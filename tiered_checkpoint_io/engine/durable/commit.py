"""Commits to the durable tier: one sequence of writes for checkpoints of one part or of many.

Each write concerns one object. A crash after any of them leaves a state in which a reader finds the old checkpoint or
the new one, complete, and each function may be repeated after a crash.

====  ==========================================================================  ===================================
      write                                                                       what a reader finds after it
====  ==========================================================================  ===================================
W1    the files of each part, but the switch, by the drain of its node            the old checkpoint
W2    the part's description                                                      the old one
W3    the index, once all descriptions are there and all files have their size    the old one
W4    a manifest of both contents, if the old one has such a switch as well       the new fails at its switch: the old
W5    the switch                                                                  the new one
W6    the manifest of only the new content                                        the new one
W7    the old one's files, then its descriptions and index go                     the new one
====  ==========================================================================  ===================================

W1 and W2 are :func:`put_part`, the others :func:`commit`, by the drain that holds the coordinator's part.
:func:`commit` does all writes of a checkpoint of one part. A small manifest lists the files itself: W2 and W3 are then
left out. Without a switch, W4 and W5 are. ``sweep`` does W7, also after a crash.

The bytes of a file come from node memory (an upload), or from another checkpoint of the tier, by a copy that the store
makes (``copies``).

The switch is the only file of committed content that is written to: other files have names of their own, and a part
whose files do not is refused. While the switch may be the old or the new one, the manifest has both contents. An object
that no manifest names is replaced after a reservation. Each manifest and switch is written only if it is unchanged
since it was read (``manifests``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Literal

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.files import check_paths, is_gone, paths_in
from tiered_checkpoint_io.engine.durable.manifests import Manifests, contents_of, current, repeated
from tiered_checkpoint_io.engine.durable.sweep import Remains
from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, StoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Index, IndexRow, Manifest, Part
from tiered_checkpoint_io.stores.base import ServerCopy, Store, UploadContent, UploadJournal, changed, copy_to

#: ``sent``: the part is there; ``committed``: its save is; ``replaced``: a later save has taken its name.
Fate = Literal["sent", "committed", "replaced"]

_Progress = Callable[[int], None] | None
_Source = UploadContent | ServerCopy
_SENT = "sent"
_UPLOAD = "upload"
#: Journal section that says that W4 may have been written.
_HELD = "held"
_DESCRIPTION = "part.json"
#: Largest manifest that lists the files itself, for a checkpoint of one part.
_MAX_INLINE = 3 << 10


class Section:
    """One entry of a journal, as a journal of its own; without a journal, entries are not kept."""

    def __init__(self, journal: UploadJournal | None, name: str) -> None:
        self._journal = journal
        self._name = name

    def read(self) -> dict[str, object] | None:
        state = self._all().get(self._name)
        return state if isinstance(state, dict) else None

    def write(self, state: dict[str, object]) -> None:
        if self._journal is not None:
            self._journal.write({**self._all(), self._name: state})

    def clear(self) -> None:
        state = self._all()
        if self._journal is None or state.pop(self._name, None) is None:
            return
        if state:
            self._journal.write(state)
        else:
            self._journal.clear()

    def _all(self) -> dict[str, object]:
        return (self._journal.read() if self._journal is not None else None) or {}


# ------------------------------------------------------------------------------------------ names
def gone_past(old: Manifest | None, part: Part, clock: Clock) -> bool:
    """Returns True if a name already holds a later save than this part's, as far as is known."""
    if old is None or old.alias_of is not None or old.content.save_id <= part.save_id:
        return False
    # Clocks of different runs may disagree: there the last to commit gets the name, except for a save that a dead run
    # left in its node's memory, and that is uploaded only now.
    same_run = ids.run_id_of(old.content.save_id) == ids.run_id_of(part.save_id)
    return same_run or clock.wall() - part.content.created > clock.timing.left_over_s


def is_committed(manifest: Manifest | None, part: Part) -> bool:
    """Returns True if a manifest says that its name holds the save of this part, and no other."""
    if manifest is None or manifest.alias_of is not None or manifest.previous:
        return False
    return manifest.content.save_id == part.save_id


def _is_there(store: Store, manifest: Manifest | None, part: Part) -> bool:
    """Returns True if the save of a part is committed, and its files were not deleted since."""
    return manifest is not None and is_committed(manifest, part) and not is_gone(store, manifest)


# ------------------------------------------------------------------------------------------ parts
def put_part(
    store: Store,
    part: Part,
    files: Mapping[str, UploadContent],
    *,
    journal: UploadJournal | None = None,
    progress: _Progress = None,
    clock: Clock = SYSTEM,
) -> Fate:
    """Uploads one of several parts: its files except the switch, then its description. Repeatable after a StoreError.

    The journal remembers the arrived files, between a crash and the next call, and :func:`commit` continues with it.
    Returns ``sent``; with any other result, nothing was written. Nor is with these errors: CorruptCheckpointError (a
    file differs from its hashes, the part names files outside of its checkpoint, or this name has another format
    version) and ConfigError (the part would overwrite files of the checkpoint that it replaces).
    """
    old = current(store, part.name)
    if _is_there(store, old, part):
        return "committed"
    if gone_past(old, part, clock):
        return "replaced"
    if not is_sent(journal):
        _put_files(store, part, files, old, journal, progress)
        store.put(ids.description_key(part.save_id, part.rank), part.to_json())
        Section(journal, _SENT).write({**sent(journal), _DESCRIPTION: True})
    return "sent"


def _was_replaced(old: Manifest | None, part: Part, journal: UploadJournal | None) -> bool:
    """Returns True if a later save replaced this one after W4: then this save's files are to go."""
    if old is None or old.alias_of is not None or Section(journal, _HELD).read() is None:
        return False
    return old.content.save_id > part.save_id and all(each.save_id != part.save_id for each in contents_of([old]))


def sent(journal: UploadJournal | None) -> dict[str, object]:
    """Returns the files that have arrived, by basename; the part's description is the last."""
    return Section(journal, _SENT).read() or {}


def is_sent(journal: UploadJournal | None) -> bool:
    """Returns True if a part's description has arrived: all its files but the switch arrived before it."""
    return _DESCRIPTION in sent(journal)


def abandon(store: Store, part: Part, journal: UploadJournal) -> None:
    """Ends the upload of a part that will not be needed. Files that have arrived stay."""
    arrived = sent(journal)
    for entry in sorted(part.content.files, key=lambda entry: entry.basename == part.content.switch):
        if entry.basename not in arrived:
            store.abandon(entry.path, Section(journal, _UPLOAD))


# ----------------------------------------------------------------------------------------- commit
@repeated
def commit(
    store: Store,
    part: Part,
    files: Mapping[str, _Source],
    rows: Mapping[int, IndexRow] | None = None,
    *,
    journal: UploadJournal | None = None,
    progress: _Progress = None,
    clock: Clock = SYSTEM,
) -> Fate:
    """Makes a checkpoint exist, whose other parts have all arrived.

    ``files`` has the bytes by basename: if they were sent, only the switch is needed. ``rows`` has all parts, as
    :class:`Arrivals` found them. The journal is the one of :func:`put_part`, and cleared at the end.

    Returns:
        ``sent`` if this call made it exist; ``committed`` if an earlier one had; ``replaced`` by a later save.

    Raises:
        CorruptCheckpointError: A hash differs, the parts do not fit, or another format version. Nothing was written.
        ConfigError: See :func:`put_part`.
        StoreError: A file is missing or has another size. Any other error: repeat the call to finish.
        CopyRefusedError: The store can't copy a file. The name is as it was; call again with the bytes.
    """
    switch, manifests = _switch(part), Manifests(store, part.save_id)
    old = manifests.current(part.name)
    if _is_there(store, old, part):
        if journal is not None:
            journal.clear()
        return "committed"
    if gone_past(old, part, clock) or _was_replaced(old, part, journal):
        return "replaced"
    index = _index_of(part, rows or {part.rank: IndexRow.of(part)})
    described = part.content.parts > 1 or is_sent(journal)
    if not described:
        _put_files(store, part, files, old, journal, progress)
    elif switch is not None:
        # The file may have waited for long since it was verified with the other files.
        _verify(part, [switch], files)
    own = old if old is not None and old.alias_of is None else None
    unlike = _unlike(store, part, index)
    if own is not None and own.content.save_id > part.save_id and any(size is None for size, _ in unlike.values()):
        # The save had done W4. Then the run that has the name now replaced it, and removed its files.
        return "replaced"
    if unlike:
        raise _not_as_sent(part, *next(iter(unlike.items())))
    tag = manifests.conditional.tag(switch.path) if switch is not None else None
    if tag is not None and own is None:
        manifests.reserve(part.name)
    new = Manifest(part.name, replace(part.content, coordinator=part.rank), aliases=own.aliases if own else ())
    if described or len(new.to_json()) > _MAX_INLINE:
        new = replace(new, content=_put_index(store, part, index))
    others = tuple(each for each in contents_of([own]) if each.save_id != part.save_id)
    if switch is not None:
        if tag is not None:
            Section(journal, _HELD).write({})
            if own is not None:
                _hold_both(manifests, new, others)
        _switch_over(
            manifests, part.name, switch.path, tag, files[switch.basename], Section(journal, _UPLOAD), progress
        )
    remains = Remains.of(store, part.name, others, but=[path for path, _ in index.paths])
    manifests.put(replace(new, reserved=manifests.reserved(part.name)))
    remains.remove(store)
    if journal is not None:
        journal.clear()
    return "sent"


def _hold_both(manifests: Manifests, new: Manifest, previous: tuple[Content, ...]) -> None:
    """Writes that the switch may be the old one or the new one (W4)."""
    path = new.content.switch_path(new.name)
    if any(content.switch_path(new.name) == path for content in previous):
        manifests.put(replace(new, previous=previous, reserved=manifests.reserved(new.name)))
    else:
        manifests.reserve(new.name, replace(new, previous=previous))


def _index_of(part: Part, rows: Mapping[int, IndexRow]) -> Index:
    """Returns the index of a save; CorruptCheckpointError if the parts do not make one checkpoint."""
    index = Index(part.name, part.save_id, rows)
    paths = [path for path, _ in index.paths]
    if part.content.parts > 1 and set(rows) != set(range(part.content.parts)):
        raise CorruptCheckpointError("the parts are not of all ranks", operation="commit", key=part.name)
    if len(set(paths)) != len(paths):
        raise CorruptCheckpointError("two parts claim the same file", operation="commit", key=part.name)
    return index


def _put_index(store: Store, part: Part, index: Index) -> Content:
    """Writes the index (W3), after the description of an only part; returns the content that names it."""
    content = replace(part.content, coordinator=part.rank, files=())
    if part.content.parts == 1:
        store.put(ids.description_key(part.save_id, part.rank), part.to_json())
    data, reference = index.to_json()
    store.put(ids.index_key(part.save_id), data)
    return replace(content, index=reference)


# ------------------------------------------------------------------------------------------ inside
def _switch(part: Part) -> FileEntry | None:
    """Returns the file whose change turns the old content of a name into the new one."""
    return next((entry for entry in part.content.files if entry.basename == part.content.switch), None)


def _uploaded(part: Part) -> list[FileEntry]:
    """Returns the files that are there before the checkpoint is."""
    return [entry for entry in part.content.files if entry.basename != part.content.switch]


def _verify(part: Part, entries: Collection[FileEntry], files: Mapping[str, _Source]) -> None:
    for entry in entries:
        data = files[entry.basename]
        # A copy has bytes that were verified when they were uploaded.
        if not isinstance(data, memoryview):
            continue
        for index, (offset, length) in enumerate(entry.chunks):
            with data[offset : offset + length] as chunk:
                entry.check_chunk(index, chunk, tier="memory", where=f"{part.name}, rank {part.rank}")


def _put_files(
    store: Store,
    part: Part,
    files: Mapping[str, _Source],
    old: Manifest | None,
    journal: UploadJournal | None,
    progress: _Progress,
) -> None:
    """Uploads the files that come before the checkpoint (W1), once all files are verified."""
    _check_names(store, part, old)
    _verify(part, part.content.files, files)
    for entry in _uploaded(part):
        if entry.basename not in sent(journal):
            _put_file(store, entry, files, journal, progress)
            Section(journal, _SENT).write({**sent(journal), entry.basename: True})


def _put_file(
    store: Store, entry: FileEntry, files: Mapping[str, _Source], journal: UploadJournal | None, progress: _Progress
) -> None:
    """Uploads a file, or copies it on the server."""
    data, upload = files[entry.basename], Section(journal, _UPLOAD)
    if isinstance(data, ServerCopy):
        copy_to(store, entry.path, data, journal=upload, progress=progress)
    else:
        store.upload(entry.path, data, journal=upload, progress=progress)


def _switch_over(
    manifests: Manifests, name: str, key: str, tag: str | None, data: _Source, journal: Section, progress: _Progress
) -> None:
    """Writes the switch, if the object that is there still has the tag (W5)."""
    conditional = manifests.conditional
    look = functools.partial(manifests.look, name) if tag is not None else None
    if not isinstance(data, ServerCopy):
        conditional.upload_if(key, data, tag, journal=journal, progress=progress, look=look)
        return

    # No server takes a condition on the target of a copy, and a store may look again after it, at the new object.
    if conditional.tag(key) != tag:
        raise changed("copy", key)

    def check() -> None:
        data.check()
        if look is not None:
            look()

    copy_to(manifests.store, key, replace(data, check=check), journal=journal, progress=progress)


def _check_names(store: Store, part: Part, old: Manifest | None) -> None:
    """Refuses a part that would write to files of others."""
    check_paths(part)
    # A file with a mark of the save's id belongs to no other save.
    mark = hash_bytes(part.save_id.encode())[:8]
    ours = {entry.path for entry in _uploaded(part) if mark not in entry.basename}
    if not ours:
        return
    own = old if old is not None and old.alias_of is None else None
    others = [each for each in contents_of([own]) if each.save_id != part.save_id]
    # The files of the checkpoint that it replaces may be unknown, or unreadable.
    clash = ours & (paths_in(store, others) or set())
    if clash:
        raise ConfigError(
            f"{min(clash)!r} belongs to the checkpoint that this save is to replace",
            operation="upload",
            tier="durable",
            key=part.name,
            rank=part.rank,
            step=part.content.step,
            hint="save under another name, or give the files names of their own",
        )


def _unlike(store: Store, part: Part, index: Index) -> dict[str, tuple[int | None, int]]:
    """Returns the files, except the switch, that do not have their size, and both sizes; None for no file. One list."""
    switch = _switch(part)
    expected = {path: size for path, size in index.paths if switch is None or path != switch.path}
    there = {entry.key: entry.size for entry in store.list(f"{part.name}/")} if expected else {}
    return {path: (there.get(path), size) for path, size in expected.items() if there.get(path) != size}


def _not_as_sent(part: Part, path: str, sizes: tuple[int | None, int]) -> StoreError:
    size, expected = sizes
    return StoreError(
        f"{'no' if size is None else size} bytes of a file are there instead of {expected}",
        operation="commit",
        tier="durable",
        key=path,
        step=part.content.step,
        hint="it was removed or replaced after its upload; the next save is not affected",
    )
