"""Contents of a durable tier, and rows of a listing of both tiers: one for each checkpoint, and all details of one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Literal, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.files import files_of, gone_of
from tiered_checkpoint_io.engine.durable.manifests import DurableView, read_manifest
from tiered_checkpoint_io.engine.restore.choice import Candidate, Catalog, Held, Selector, choose
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StoreError,
    StoreNotFoundError,
    is_other_format,
    without_secrets,
)
from tiered_checkpoint_io.inventory.node import BrokenPart, HeldPart, Namespace, Tier, look_at_node, places_of, time_of
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Content, Kind, Manifest, Metric
from tiered_checkpoint_io.stores import Store, open_store, place_of
from tiered_checkpoint_io.stores.retry import answer_within

_log = logging.getLogger("tiered_checkpoint_io.inventory")


@dataclass(frozen=True, slots=True)
class DurableCheckpoint:
    """A checkpoint by its name: its manifest, or why that can't be understood; neither if there is none."""

    name: str
    manifest: Manifest | None = None
    error: CorruptCheckpointError | ConfigError | StoreError | None = None

    @property
    def is_there(self) -> bool:
        return self.manifest is not None or self.error is not None


def read(store: Store, name: str) -> DurableCheckpoint:
    """Looks for one checkpoint; raises StoreError if the tier could not be read."""
    try:
        return DurableCheckpoint(name, read_manifest(store, name))
    except (CorruptCheckpointError, ConfigError, StoreError) as error:
        if isinstance(error, StoreError) and error.reason != "archived":
            raise
        # Other checkpoints can still be read.
        return DurableCheckpoint(name, error=error)


def read_all(store: Store, view: DurableView | None = None, clock: Clock = SYSTEM) -> list[DurableCheckpoint]:
    """Returns all checkpoints of a tier, by name; raises as :func:`read`. ``view`` is that of an earlier call."""
    named = (view or DurableView()).look(store, clock)
    found = [
        DurableCheckpoint(name, error=value)
        if isinstance(value, CorruptCheckpointError)
        else DurableCheckpoint(name, value)
        for name, value in sorted(named.items())
    ]
    gone = gone_of(store, [each.manifest for each in found if each.manifest is not None])
    error = StoreNotFoundError("its files are gone: deleted, by hand or by a lifecycle rule")
    found = [DurableCheckpoint(each.name, error=error) if each.name in gone else each for each in found]
    targets = {each.name: each.manifest.alias_of for each in found if each.manifest is not None}
    own = {each.name for each in found if each.is_there and not targets.get(each.name)}
    # An alias whose target is gone is no checkpoint.
    return [each for each in found if (targets.get(each.name) or each.name) in own]


def checkpoints(
    store: Store, view: DurableView | None = None, clock: Clock = SYSTEM, *, in_memory: bool = False
) -> list[DurableCheckpoint]:
    """Does :func:`read_all`; raises CheckpointNotFoundError if there is no directory, or no object below the URL.

    ``in_memory`` is true if node memory has checkpoints of this tier: then it may have none yet.
    """
    found = read_all(store, view, clock)
    if not (found or in_memory or _exists(store)):
        raise CheckpointNotFoundError(
            "there is nothing at this dirpath", operation="list", tier="durable", key=store.url, hint="check dirpath"
        )
    return found


def newer(found: Sequence[DurableCheckpoint]) -> CorruptCheckpointError | None:
    """Returns the error of a checkpoint that a newer release wrote: it may be the latest."""
    return next((each.error for each in found if is_other_format(each.error)), None)


def resumable(found: Sequence[DurableCheckpoint], held: Iterable[StoredPart] = ()) -> list[Candidate]:
    """Returns the checkpoints that training can resume from, the latest save first, by the engine's own choice.

    A name that is being overwritten counts as its old checkpoint. ``held`` has parts in this node's memory. Raises the
    error of :func:`newer`: a restart is refused as well.
    """
    error = newer(found)
    if error is not None:
        raise error
    read = [each.manifest for each in found if each.manifest is not None]
    manifests = [replace(each, content=each.settled, previous=()) for each in read]
    parts = [
        Held(each.part.name, each.part.rank, each.part.content, each.part.commits, not each.is_replica, each.replicated)
        for each in held
    ]
    catalog = Catalog({"here": parts}, manifests, {})
    return choose(catalog, Selector("latest"), None, replicas=True)


def find(store: Store, name: str) -> Manifest:
    """Returns the checkpoint of a name, an alias, or ``tiered:latest``; of the latter, logs skipped checkpoints."""
    text, hint = "there is no checkpoint to resume from", "name another one: see `tiered-ckpt ls`"
    if name == ids.LATEST:
        listed = read_all(store)
        meant = next(iter(resumable(listed)), None)
        for each in listed:
            if each.error is not None:
                _log.warning("skipping this checkpoint: %s", each.error)
        found = next((each.manifest for each in listed if meant is not None and each.name == meant.name), None)
    else:
        text = f"no such checkpoint: {name}"
        hint = "list what is there: tiered-ckpt ls; a checkpoint of another library is loaded by its path"
        found = read_manifest(store, name)
    target = read_manifest(store, found.alias_of) if found is not None and found.alias_of else found
    if target is None or target.alias_of is not None:
        raise CheckpointNotFoundError(text, operation="get", tier="durable", key=store.url, hint=hint)
    return target


def _exists(store: Store) -> bool:
    if ids.url_scheme(store.url) is None:
        return os.path.isdir(store.url)
    return next(iter(store.list("")), None) is not None


# ----------------------------------------------------------------------------------------- rows
_T = TypeVar("_T")
CheckpointState = Literal["durable", "memory_only", "waiting", "uploading", "incomplete", "corrupt", "newer_release"]
_NOT_KNOWN = "this node can't tell whether it is durable; the durable tier can, where DIRPATH is given and it answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint, as a look at the tiers found it.

    Attributes:
        name: Its path relative to dirpath. Of a damaged part whose name can't be read, the part's folder.
        url: URL on the durable tier, now or later: dirpath and name.
        dirpath: The durable tier that it belongs to.
        save_id: Id of the save that made it; as text, ids sort in the order of the saves. "" if it is not known.
        state: ``durable``: committed on the durable tier. ``memory_only``: in node memory, and not to be uploaded.
            ``waiting``, ``uploading``: in node memory, on its way to the durable tier. ``incomplete``: other nodes
            have to send or commit the rest, its files were deleted there, or the durable tier was not asked.
            ``corrupt``: it can't be read, or was found damaged, and no intact copy is known. ``newer_release``: a newer
            release of this package wrote it.
        where: The tiers that have it, or parts of it, without damaged copies. ``memory``: this node's; ``spill``: on
            its disk; ``replicas``: kept for other nodes.
        step: The training step; None if it is not known.
        epoch: The epoch; None if it is not known.
        metric: Value that ModelCheckpoint monitored when it saved: ``monitor`` and ``value``; None if it did not.
        size_bytes: Bytes of all its files; if the durable tier does not have it, of the parts on this node.
        created: Time of the save, by the writer's clock (UTC); None if it is not known.
        kind: ``full``, ``sharded`` or ``local``; None if it is not known.
        resumable: True if training can resume from it.
        is_latest: True if ``tiered:latest`` means this one, among all that were found.
        alias_of: For an alias, the name of its target.
        copy_of: For a copy, the id of the save that made its bytes.
        parts: Number of its parts; 0 if that is not known.
        parts_here: Number of its parts in this node's memory.
        problem: Defect of it, or of one copy of it; "" if none is known.
    """

    name: str
    url: str
    dirpath: str
    save_id: str = ""
    state: CheckpointState
    where: tuple[Tier, ...] = ()
    step: int | None = None
    epoch: int | None = None
    metric: Metric | None = None
    size_bytes: int = 0
    created: datetime | None = None
    kind: Kind | None = None
    resumable: bool = False
    is_latest: bool = False
    alias_of: str | None = None
    copy_of: str | None = None
    parts: int = 0
    parts_here: int = 0
    problem: str = ""

    @property
    def order(self) -> tuple[str, bool]:
        """Sorts in the order of the saves; a copy, or an alias, comes right before its target."""
        return self.copy_of or self.save_id, not (self.copy_of or self.alias_of)


def url_of(dirpath: str, name: str) -> str:
    """Returns a checkpoint's URL on the durable tier, without secrets."""
    return without_secrets(ids.join_url(dirpath, name))


def iso(when: datetime | float | None) -> str | None:
    """Returns a time as ISO 8601 in UTC, to the millisecond."""
    when = time_of(when) if isinstance(when, float) else when
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z") if when is not None else None


# -------------------------------------------------------------------------------------------- look
class Look:
    """One look at a durable tier, and at its checkpoints in node memory."""

    def __init__(
        self, place: Place, node: Sequence[Namespace], found: Sequence[DurableCheckpoint] | None = None
    ) -> None:
        """Takes the tiers' contents; ``found`` is None if the durable tier was not asked, or did not answer."""
        self.place, self.node, self.found = place, node, found
        self.manifests = {each.name: each.manifest for each in found or () if each.manifest is not None}
        #: The parts of that durable tier in this node's memory, by save.
        self.held: dict[str, list[HeldPart]] = {}
        for part in (part for each in node for part in each.parts if part.place == place):
            self.held.setdefault(part.save_id, []).append(part)
        self._broken: dict[str, list[BrokenPart]] = {}
        for damage in (damage for each in node for damage in each.broken if damage.place == place):
            self._broken.setdefault(damage.save_id or str(damage.folder), []).append(damage)
        self._working_on = {each.drain.name for each in node if each.is_working}

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """One row for each checkpoint of the durable tier, the latest save first; unreadable ones are last."""
        rows = [self._durable(each) for each in self.found or ()]
        seen = {row.save_id for row in rows if not row.alias_of}
        rows += [self._in_memory(save) for save in self.held if save not in seen]
        seen |= self.held.keys()
        rows += [self._damaged(them[0]) for save, them in self._broken.items() if save not in seen]
        meant = self._latest()
        rows = [
            replace(row, is_latest=meant is not None and not row.alias_of and row.save_id == meant.save_id)
            for row in rows
        ]
        return sorted(sorted(rows, key=lambda row: row.name), key=lambda row: row.order, reverse=True)

    def _latest(self) -> Candidate | None:
        """Returns the checkpoint that a restart would take, by the engine's own choice; None if it is refused."""
        if newer(self.found or ()) is not None or any(each.is_newer for them in self._broken.values() for each in them):
            # A checkpoint of a newer release may be the latest.
            return None
        parts = [each for them in self.held.values() for each in them]
        # The owner deleted those that were committed, and that are not there.
        names = self.manifests.keys() | {each.name for each in parts if self.found is None}
        held = (each.stored for each in parts if each.state != "durable" or each.name in names)
        return next(iter(resumable(self.found or (), held)), None)

    def _durable(self, each: DurableCheckpoint) -> CheckpointInfo:
        manifest, dirpath = each.manifest, self.place.dirpath
        if manifest is None:
            state: CheckpointState = "newer_release" if is_other_format(each.error) else "corrupt"
            state = "incomplete" if isinstance(each.error, StoreNotFoundError) else state
            url = url_of(dirpath, each.name)
            return CheckpointInfo(name=each.name, url=url, dirpath=dirpath, state=state, problem=str(each.error))
        # An alias follows its target, which may have been overwritten.
        content = self.manifests.get(manifest.alias_of or "", manifest).settled
        return self._row(manifest.name, content, "durable", is_durable=True, alias_of=manifest.alias_of)

    def _in_memory(self, save_id: str) -> CheckpointInfo:
        """Returns the row of a save that this node's memory has, and that has no manifest as far as is known."""
        held = self.held[save_id]
        state, part = self._memory_state(held), held[0].stored.part
        row = self._row(part.name, part.content, state, size_bytes=sum(each.size_bytes for each in held))
        return replace(row, problem=row.problem or _NOT_KNOWN) if state == "incomplete" and self.found is None else row

    def _memory_state(self, held: Sequence[HeldPart]) -> CheckpointState:
        states = {each.state for each in held}
        if "waiting" in states:
            return "uploading" if held[0].name in self._working_on else "waiting"
        if self.found is not None and "sent" in states:
            # Other nodes have to send the rest, or to commit it.
            return "incomplete"
        if self.found is not None or "memory_only" in states:
            # The durable tier does not have it: not for that tier, or removed there, or the upload was given up.
            return "memory_only"
        # Else others upload it, or commit it; they may have died before.
        return "durable" if "durable" in states else "incomplete"

    def _damaged(self, each: BrokenPart) -> CheckpointInfo:
        state: CheckpointState = "newer_release" if each.is_newer else "corrupt"
        if each.part is not None:
            return self._row(each.part.name, each.part.content, state, resumable=False, problem=each.why)
        name, dirpath = str(each.folder), self.place.dirpath
        return CheckpointInfo(name=name, url=name, dirpath=dirpath, save_id=each.save_id, state=state, problem=each.why)

    def _row(
        self, name: str, content: Content, state: CheckpointState, *, is_durable: bool = False, **more: Any
    ) -> CheckpointInfo:
        """Returns the row of a save with the tiers that have it, and the damage of its parts here."""
        held, broken = self.held.get(content.save_id, []), self._broken.get(content.save_id)
        order: tuple[Tier, ...] = ("memory", "spill", "replicas")
        here = [tier for tier in order if any(each.tier == tier for each in held)]
        row = CheckpointInfo(
            name=name,
            url=url_of(self.place.dirpath, name),
            dirpath=self.place.dirpath,
            save_id=content.save_id,
            state=state,
            where=(*here, *(("durable",) if is_durable else ())),
            step=ids.known(content.step),
            epoch=ids.known(content.epoch),
            metric=content.metric,
            size_bytes=content.size,
            created=time_of(content.created),
            kind=content.kind,
            resumable=content.resumable,
            copy_of=content.copy_of or None,
            parts=content.parts,
            parts_here=len({each.rank for each in held}),
            problem=f"memory: {broken[0].why}" if broken else "",
        )
        return replace(row, **more)


class Tiers:
    """The tiers that a program asks about, looked at again and again; see :class:`DurableView`."""

    def __init__(self, config: TieredCheckpointConfig, memory_dir: str | None = None, *, clock: Clock = SYSTEM) -> None:
        """Takes the durable tier, and the folder of node memory; None not to look there."""
        self.clock = clock
        self._config, self._place, self._memory_dir = config, place_of(config), memory_dir
        self._view = DurableView()
        self._store: Store | None = None

    def close(self) -> None:
        """Lets the connection to the durable tier go."""
        if self._store is not None:
            self._store.close()

    def look(self, store: Store | None) -> Look:
        """Looks at both tiers, at memory first: a checkpoint committed in between is seen twice, and not missed.

        ``store`` is None to look only at memory. Raises as :func:`checkpoints` and :func:`all_roots`.
        """
        node = look_at_node(self._memory_dir) if self._memory_dir is not None else []
        if store is None:
            return Look(self._place, node)
        in_memory = self._place in places_of(node)
        return Look(self._place, node, checkpoints(store, self._view, self.clock, in_memory=in_memory))

    def ask(self, work: Callable[[Store], _T]) -> _T:
        """Returns the result of ``work`` on the durable tier; raises StoreError if that is silent."""

        def asked() -> _T:
            # One that fails, or is given up, is not asked again.
            store, self._store = self._store or open_store(self._config, clock=self.clock), None
            try:
                found = work(store)
            except BaseException:
                store.close()
                raise
            self._store = store
            return found

        patience_s, what = self._config.support.durable_timeout_s, self._config.dirpath
        return answer_within(patience_s, asked, what=what, clock=self.clock)


# ------------------------------------------------------------------------------------------ details
@dataclass(frozen=True, slots=True)
class File:
    """A file: its path, of a checkpoint's below dirpath, and its bytes."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Details(CheckpointInfo):
    """All that is known of one save of a name: its row in a listing, and the rest."""

    manifest_key: str | None
    #: The namespace that saved it; empty if it is not known.
    namespace: str
    #: Versions of the software that wrote it.
    writer: Mapping[str, str]
    aliases: Sequence[str]
    #: All files if the durable tier has them, else those of the parts here.
    files: Sequence[File]
    held_parts: Sequence[HeldPart]


def details_of(name: str, look: Look, store: Store | None) -> list[Details]:
    """Returns all saves of a name, the latest first: one may be on the durable tier, and a later one in memory.

    ``store`` is the durable tier, from which the index of a checkpoint of several parts is read; None not to.
    """
    rows = look.checkpoints
    meant = [row for row in rows if (row.is_latest if name == ids.LATEST else row.name == name)]
    return [_details(row, rows, look, store) for row in meant]


def _details(row: CheckpointInfo, rows: list[CheckpointInfo], look: Look, store: Store | None) -> Details:
    manifest = look.manifests.get(row.name) if "durable" in row.where else None
    target = look.manifests.get(manifest.alias_of or "", manifest) if manifest is not None else None
    held = look.held.get(row.save_id, [])
    parts = [each.stored.part for each in held]
    files = {entry.path: entry.size for part in parts for entry in part.content.files}
    contents = (target.content, *target.previous) if target is not None else ()
    known = (*contents, *(part.content for part in parts))
    content = next((each for each in known if each.save_id == row.save_id), None)
    if content is not None and target is not None and row.state == "durable":
        try:
            files = files_of(store, content).sizes if store is not None else files
        except CorruptCheckpointError as error:
            row = replace(row, state="corrupt", problem=str(error))
    return Details(
        **{each.name: getattr(row, each.name) for each in fields(row)},
        manifest_key=ids.manifest_key(row.name) if manifest is not None else None,
        namespace=content.namespace if content is not None else "",
        writer=content.writer if content is not None else {},
        aliases=[each.name for each in rows if each.alias_of == row.name],
        files=[File(path, size) for path, size in files.items()],
        held_parts=held,
    )
