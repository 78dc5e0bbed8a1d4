"""The catalog: contents of the durable tier and of a node's memory, from which the choice is made."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.chunks import unverified
from tiered_checkpoint_io.engine.drain.operations import NAMING
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.durable.files import is_gone
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.restore.choice import ONE_FOLDER, Held, Selector
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import (
    CorruptCheckpointError,
    RestoreError,
    StoreError,
    StoreNotFoundError,
    TieredCheckpointError,
    is_other_format,
)
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.node import release, try_lock
from tiered_checkpoint_io.memory.parts import PART_FILE, StoredPart
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import AtPlace, Place, Server
from tiered_checkpoint_io.model.manifest import METADATA, Content, Kind, Manifest, Part, reservation_in
from tiered_checkpoint_io.stores import place_of
from tiered_checkpoint_io.stores.base import ObjectInfo, Store
from tiered_checkpoint_io.stores.peer import Endpoint

#: Manifests that are read at once when looking for the newest, and the number that is chosen by the step in a name.
_BATCH = 32
_BY_STEP = 8
#: Number of folders above a file that are asked for its manifest.
_MOST_FOLDERS = 16


@dataclass(frozen=True, slots=True)
class Tiers(AtPlace):
    """Tiers of a restore, and the means to read them.

    ``store`` opens the durable tier, on rank 0 and on ranks that fetch bytes; ``on_listed`` gets all its names, if this
    rank listed them. ``store_at`` opens the durable tier of another dirpath, whose run may have saved the wanted name;
    None if no other dirpath is looked at. ``serve`` has the drain serve this node's memory to others.
    """

    config: TieredCheckpointConfig
    memory: MemoryTier
    store: Callable[[], Store]
    dirpath: str
    log: Logger
    clock: Clock = SYSTEM
    on_listed: Callable[[set[str]], None] = lambda _: None
    server: Server | None = None
    store_at: Callable[[str], Store] | None = None
    serve: Callable[[], Endpoint | None] = lambda: None

    def at(self, dirpath: str) -> Tiers:
        """Returns the same tiers at another dirpath on the same server; no further dirpath is looked at."""
        assert self.store_at is not None
        store = functools.partial(self.store_at, dirpath)
        return replace(self, dirpath=dirpath, store=store, on_listed=lambda _: None, store_at=None)

    def skipped(self, note: str) -> None:
        """Logs the reason why a copy is not taken."""
        self.log.error("skipping this copy, trying the next: %s", note)

    def say_whose(self, content: Content) -> None:
        """Logs that a checkpoint was saved under another namespace, if its content says so: perhaps by another job."""
        if content.namespace not in ("", self.config.namespace):
            text = "this checkpoint was saved under namespace %s; this job's is %s"
            self.log.info(text, content.namespace, self.config.namespace)

    def quarantine(self, stored: StoredPart, error: CorruptCheckpointError) -> None:
        """Takes a damaged part out of use."""
        self.skipped(str(error))
        with contextlib.suppress(OSError):
            self.memory.quarantine(stored.folder, str(error))

    @contextlib.contextmanager
    def lock(self, which: str = "") -> Iterator[None]:
        """Lets one process of a node at a time verify or fetch, also if no group orders them.

        Raises RestoreError if another process does not finish within ``wait_timeout_s``.
        """
        path = self.memory.root / f"restore{which}.lock"
        descriptor = try_lock(path, patience_s=self.config.support.wait_timeout_s, clock=self.clock)
        if descriptor is None:
            raise RestoreError(
                "another process of this node did not finish restoring in time", operation="restore", key=str(path)
            )
        try:
            yield
        finally:
            release(descriptor)


def tiers_of(session: Session, config: TieredCheckpointConfig, dirpath: str | None = None) -> Tiers:
    """Returns a session's memory, and the durable tier of a configuration, or at another dirpath."""
    wanted = config.dirpath if dirpath is None else dirpath
    here = session.place if wanted == session.dirpath else place_of(config, wanted)
    return Tiers(
        config=config,
        memory=session.open().tier,
        store=lambda: session.durable(wanted),
        dirpath=here.dirpath,
        log=session.log,
        clock=session.clock,
        on_listed=session.known.remember if here == session.place else lambda _: None,
        server=here.server,
        store_at=session.durable,
        serve=session.serve,
    )


# ----------------------------------------------------------------------------------- durable tier
@dataclass(slots=True)
class DurableCatalog:
    """Contents of the durable tier, as far as known."""

    #: Manifests that were read last, and why others can't be understood.
    manifests: list[Manifest] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    #: Names of manifests that were listed, but not read yet, in the order to read them.
    rest: list[str] = field(default_factory=list)
    #: Content of another tool under the wanted name, without a manifest: it can't be verified.
    foreign: Content | None = None
    #: Place of the wanted file's manifest, if not here: a run saved it under a name with folders, or with fewer.
    elsewhere: ids.Split | None = None
    #: All names there, if they were listed.
    listed: set[str] | None = None
    #: Names of manifests whose objects were removed: by hand, or by a lifecycle rule.
    gone: set[str] = field(default_factory=set)
    #: Error by which the tier could not be read.
    error: TieredCheckpointError | None = None


def discover(
    tiers: Tiers,
    selector: Selector,
    queued: Mapping[str, str],
    accepts: Kind | None = None,
    known: DurableCatalog | None = None,
) -> DurableCatalog:
    """Asks the durable tier: one list and the first manifests, or the few objects of one name.

    Never raises: an error is part of the answer, because memory may suffice. This uses only stores: see
    :class:`Question`.
    """
    found = DurableCatalog(rest=known.rest if known is not None else [])
    try:
        store = tiers.store()
        if selector.kind == "name":
            _read(store, list(dict.fromkeys((selector.name, queued.get(selector.name, selector.name)))), found)
            if accepts is not None and not found.manifests and not found.rejected:
                if tiers.store_at is not None:
                    others = other_names(tiers.place, selector.name).values()
                    found.elsewhere = committed_elsewhere(tiers.store_at, others)
                found.foreign = _foreign(store, selector.name, accepts)
            return found
        if known is None:
            names = reading_order(list(store.list(ids.MANIFEST_PREFIX)))
            found.listed = set(names)
            targets = {target for alias, target in queued.items() if selector.wants(alias)}
            found.rest = [name for name in names if selector.wants(name) or name in targets]
            if selector.folder == ONE_FOLDER:
                # All folders must be known, also folders with only older saves. Other errors there do not matter.
                by_step, folders = sorted(names, key=lambda name: ids.step_in_name(name) or 0), DurableCatalog()
                newest = {ids.form_of(name): name for name in by_step}
                newest_there = {ids.form_of(name): name for name in reversed(names)}
                # Names in no folder first. The number of manifests to read is bounded.
                forms = sorted(newest, key=lambda form: ("/" in form, form))[:_BATCH]
                wanted = {each[form] for each in (newest, newest_there) for form in forms}
                _read(store, sorted(wanted - set(found.rest[:_BATCH])), folders)
                found.manifests += folders.manifests
        batch, found.rest = found.rest[:_BATCH], found.rest[_BATCH:]
        _read(store, batch, found)
        _leave_out_gone(store, selector, found)
        return found
    except TieredCheckpointError as error:
        return DurableCatalog(listed=found.listed, error=error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        failed = RestoreError(text, operation="discover", tier="durable")
        return DurableCatalog(listed=found.listed, error=failed)


def _leave_out_gone(store: Store, selector: Selector, found: DurableCatalog) -> None:
    """Leaves out the newest manifests of which files are not there any more, by one list each; memory may have them."""
    by_id = {each.content.save_id: each for each in found.manifests if not each.alias_of}
    order = selector.in_order(each.content for each in by_id.values())
    for manifest in itertools.takewhile(functools.partial(is_gone, store), (by_id[each.save_id] for each in order)):
        found.manifests.remove(manifest)
        found.gone.add(manifest.name)
        found.rejected.append(f"durable {manifest.name}: its files are gone: deleted by hand, or by a lifecycle rule")


def reading_order(listed: Sequence[ObjectInfo]) -> list[str]:
    """Returns names of checkpoints in the order in which their manifests are worth reading.

    The last commits come first, then the greatest steps: the times of a copied bucket give only the order of copying.
    """
    by_time = sorted(listed, key=lambda entry: entry.modified, reverse=True)
    names = [name for entry in by_time if (name := ids.name_from_manifest_key(entry.key)) is not None]
    first, later = names[: _BATCH - _BY_STEP], names[_BATCH - _BY_STEP :]
    # The sort is stable: without steps in the names, the order of time stays.
    steps = sorted(later, key=lambda name: -1 if (step := ids.step_in_name(name)) is None else step, reverse=True)
    # A name counts at its first place.
    return list(dict.fromkeys([*first, *steps[:_BY_STEP], *later]))


def _read(store: Store, names: Sequence[str], found: DurableCatalog) -> None:
    """Reads manifests, and the manifests of their aliases' targets."""

    def read(name: str) -> Manifest | str | None:
        try:
            return read_manifest(store, name)
        except (CorruptCheckpointError, StoreError) as error:
            # A newer release's manifest may be the newest checkpoint, so this raises.
            if is_other_format(error) or (isinstance(error, StoreError) and error.reason != "archived"):
                raise
            return f"durable {name}: {error}"

    results = in_parallel(read, names)
    targets = {each.alias_of for each in results if isinstance(each, Manifest) and each.alias_of} - set(names)
    results += in_parallel(read, sorted(targets))
    found.manifests += [manifest for manifest in results if isinstance(manifest, Manifest)]
    found.rejected += [note for note in results if isinstance(note, str)]


def _foreign(store: Store, name: str, accepts: Kind | None) -> Content | None:
    """Returns the content that another tool wrote under a name: a file, or a folder of torch.distributed.checkpoint."""
    if accepts not in ("full", "sharded"):
        return None
    path = f"{name}/{METADATA}" if accepts == "sharded" else name
    try:
        entry = unverified(path, store.size(path))
    except StoreNotFoundError:
        return None
    step = ids.step_in_name(name)
    return Content("", -1 if step is None else step, -1, accepts, 0.0, 1, {}, (entry,), switch=entry.basename)


# ------------------------------------------------------------------------------------ node memory
@dataclass(slots=True)
class NodeCatalog:
    """Contents of one node's memory for one durable tier."""

    #: Parts of complete saves and of others, replicas among them.
    held: list[Held] = field(default_factory=list)
    #: Unreadable parts, and the errors; and parts that earlier restores found corrupt.
    damaged: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    #: Why a part can't be read, if a newer release wrote it.
    newer: CorruptCheckpointError | None = None
    #: Aliases that are queued for the durable tier: the operation's id, and the target.
    aliases: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: True if its newest checkpoint of another place is of this dirpath: the endpoint may have changed.
    is_of_other_server: bool = False
    #: Place of the wanted file, by a part or an alias of another dirpath.
    elsewhere: ids.Split | None = None


def queued_aliases(nodes: Iterable[NodeCatalog]) -> dict[str, str]:
    """Returns aliases that are queued on any node, and their targets; for one name, the latest counts."""
    queued = sorted((op_id, name, target) for node in nodes for name, (op_id, target) in node.aliases.items())
    return {name: target for _, name, target in queued}


def look(tiers: Tiers, rank: int, name: str = "") -> NodeCatalog:
    """Lists this node's memory, and quarantines unreadable parts; another run may have saved a requested ``name``."""
    here, tier, place = NodeCatalog(), tiers.memory, tiers.place
    elsewhere = other_names(place, name) if name and tiers.store_at is not None else {}
    other: Part | None = None
    queue = Queue(tier.root)
    given_up = {each.op_id for each in queue.outcomes() if each.state != "committed"}
    for stored in tier.held():
        part = stored.part
        if part.place != place and (other is None or part.save_id > other.save_id):
            other = part
        here.elsewhere = here.elsewhere or elsewhere.get((part.place, part.name))
        if part.place == place:
            content, owns = part.content.without_hashes(), not stored.is_replica
            committed = part.durable and part.commits and stored.drained and stored.op_id not in given_up
            here.held.append(Held(part.name, part.rank, content, part.commits, owns, stored.replicated, committed))
    for folder in tier.quarantined():
        if _may_belong(folder, place):
            here.quarantined.append(f"memory {folder}: quarantined")
    damaged = tier.unreadable()
    here.damaged = [f"rank {rank}: memory {folder}: {error}" for folder, error in damaged]
    here.newer = next((error for _, error in damaged if is_other_format(error)), None)
    if damaged:
        # Under the lock, so that no other process moves the same folder; listed again there.
        with tiers.lock():
            for folder, error in tier.unreadable():
                # A part of another format version is not damaged.
                if not is_other_format(error):
                    tier.quarantine(folder, str(error))
    for note in here.damaged:
        tiers.skipped(note)
    here.is_of_other_server = other is not None and other.dirpath == place.dirpath
    is_newest = other is not None and all(each.content.save_id < other.save_id for each in here.held)
    if other is not None and is_newest and (here.is_of_other_server or not name):
        how = f"resume from {ids.join_url(other.dirpath, other.name)}"
        how = f"set endpoint_url to {other.place.endpoint or 'null'}" if here.is_of_other_server else how
        text = "node memory holds %s (step %d) of %s, which is another place; to take it, %s"
        tiers.log.warning(text, other.name, other.content.step, other.place, how)
    for request in queue.requests():
        if request.action not in NAMING:
            continue
        here.elsewhere = here.elsewhere or elsewhere.get((request.place, request.name))
        if request.place == place:
            here.aliases[request.name] = request.op_id, request.target
    return here


def _may_belong(folder: Path, place: Place) -> bool:
    """Returns True if a quarantined part belongs, or may belong, to this durable tier."""
    path = folder / PART_FILE
    try:
        return Part.from_json(path.read_bytes(), where=str(path)).place == place
    except (OSError, CorruptCheckpointError):
        return True


# ------------------------------------------------------------------------------------ other places
# The run at any folder above a file may have saved it, and only that run's manifest can verify it. If neither the tier
# nor memory knows the name at one dirpath, and a run at another one has saved the file, all ranks search there.


def other_names(place: Place, name: str) -> Mapping[tuple[Place, str], ids.Split]:
    """Returns the other places at which a run may have saved the file of a checkpoint, the nearest to it first."""
    splits = ids.splits(ids.join_url(place.dirpath, name))
    return {(Place(each.dirpath, place.server), each.name): each for each in splits if each.dirpath != place.dirpath}


def committed_elsewhere(store_at: Callable[[str], Store], others: Iterable[ids.Split]) -> ids.Split | None:
    """Returns the nearest of some places that has a manifest; raises StoreError if the tier can't be read."""
    places = list(others)[:_MOST_FOLDERS]
    if not places:
        return None
    # One store asks for all places, so that one connection does.
    outermost = places[-1]

    def is_there(split: ids.Split) -> bool:
        above = outermost.name.removesuffix(split.name)
        try:
            return not reservation_in(store.get(above + ids.manifest_key(split.name)))
        except TieredCheckpointError as error:
            # Rights often end at a folder: if its manifests can't be read, its checkpoints can't be verified.
            if error.retryable:
                raise
            return False

    try:
        store = store_at(outermost.dirpath)
    except TieredCheckpointError:
        return None
    return next((each for each, there in zip(places, in_parallel(is_there, places), strict=True) if there), None)
