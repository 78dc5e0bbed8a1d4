"""The catalog: what the durable tier and a node's memory hold, from which the choice is made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.restore.choice import Held, Selector
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import (
    FormatVersionError,
    ManifestError,
    RestoreError,
    StoreNotFoundError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.tier import PART_FILE, MemoryTier, StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, Manifest, Part
from tiered_checkpoint_io.stores.base import ObjectInfo, Store

#: Manifests that are read at once when looking for the newest, and how many of them are picked by
#: the step that their name tells.
_BATCH = 32
_BY_STEP = 8
_READ_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where a restore looks, and how.

    Attributes:
        config: For bounds and concurrency.
        memory: This node's memory.
        store: Opens the durable tier; called on rank 0, and where bytes are fetched.
        dirpath: The durable tier.
        log: Where to log.
        clock: For waits.
        on_listed: Called with all names on the durable tier, where this rank listed them.
    """

    config: TieredCheckpointConfig
    memory: MemoryTier
    store: Callable[[], Store]
    dirpath: str
    log: Logger
    clock: Clock = SYSTEM
    on_listed: Callable[[set[str]], None] = lambda _: None

    def held(self) -> list[StoredPart]:
        """The parts in this node's memory, and the replicas that it keeps."""
        return [*self.memory.parts(), *self.memory.replicas.parts()]

    def skipped(self, note: str) -> None:
        """Logs why a copy is not taken."""
        self.log.error("skipping this copy, trying the next: %s", note)


def tiers_of(session: Session, config: TieredCheckpointConfig, dirpath: str | None = None) -> Tiers:
    """The tiers of a session.

    Args:
        session: Which.
        config: That of the load.
        dirpath: Another durable tier than the session's.
    """
    here = dirpath or config.dirpath
    return Tiers(
        config=config,
        memory=session.open().tier,
        store=session.durable if dirpath is None else lambda: session.durable(dirpath),
        dirpath=here,
        log=session.log,
        clock=session.clock,
        on_listed=session.known.remember if here == session.dirpath else lambda _: None,
    )


# ----------------------------------------------------------------------------------- durable tier
@dataclass(slots=True)
class DurableCatalog:
    """What is known of the durable tier.

    Attributes:
        manifests: Those that were read last.
        rest: Names of manifests that were listed, but not read yet, in the order to read them.
        rejected: Manifests that can't be understood, and why.
        foreign_size: Bytes of an object of the wanted name that has no manifest.
        error: Why the tier could not be asked.
    """

    manifests: list[Manifest] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    foreign_size: int | None = None
    error: TieredCheckpointError | None = None


def discover(tiers: Tiers, selector: Selector, queued: dict[str, str]) -> DurableCatalog:
    """Asks the durable tier, once: one list, or for a name the few objects that it is about.

    Args:
        tiers: Where to look.
        selector: What is wanted.
        queued: Aliases that are not on the tier yet, and their targets.

    Returns:
        Never raises: an error is part of the answer, since memory may do without the durable tier.
    """
    known = DurableCatalog()
    try:
        store = tiers.store()
        if selector.kind == "name":
            _discover_name(store, selector.name, known, queued)
        else:
            names = reading_order(list(store.list(ids.MANIFEST_PREFIX)))
            tiers.on_listed(set(names))
            targets = {target for alias, target in queued.items() if selector.wants(alias)}
            known.rest = [name for name in names if selector.wants(name) or name in targets]
            _read_batch(store, known)
            while selector.kind == "best" and known.rest:
                # Which one it is no name tells.
                earlier, notes = known.manifests, known.rejected
                _read_batch(store, known)
                known.manifests, known.rejected = earlier + known.manifests, notes + known.rejected
    except Exception as error:
        return DurableCatalog(error=_as_ours(error))
    return known


def read_more(tiers: Tiers, known: DurableCatalog) -> DurableCatalog:
    """Reads the manifests of the next names; as :func:`discover`, it never raises."""
    more = DurableCatalog(rest=known.rest)
    try:
        _read_batch(tiers.store(), more)
    except Exception as error:
        return DurableCatalog(error=_as_ours(error))
    return more


def reading_order(listed: Sequence[ObjectInfo]) -> list[str]:
    """Names of checkpoints in the order in which their manifests are worth reading.

    Those committed last come first, and with them those of the greatest steps: the times of a
    bucket that was copied tell the order of copying alone.
    """
    by_time = sorted(listed, key=lambda entry: entry.modified, reverse=True)
    names = [name for entry in by_time if (name := ids.name_from_manifest_key(entry.key)) is not None]
    first, later = names[: _BATCH - _BY_STEP], names[_BATCH - _BY_STEP :]
    # The sort is stable: without steps in the names, the order of time stays.
    steps = sorted(later, key=lambda name: -1 if (step := ids.step_in_name(name)) is None else step, reverse=True)
    first += steps[:_BY_STEP]
    chosen = set(first)
    return first + [name for name in later if name not in chosen]


def _discover_name(store: Store, name: str, known: DurableCatalog, queued: dict[str, str]) -> None:
    for each in dict.fromkeys((name, queued.get(name, name))):
        try:
            manifest = read_manifest(store, each)
        except FormatVersionError:
            raise
        except ManifestError as error:
            known.rejected.append(f"durable {each}: {error}")
            continue
        if manifest is None:
            continue
        known.manifests.append(manifest)
        if manifest.alias_of is not None:
            target = read_manifest(store, manifest.alias_of)
            known.manifests += [target] if target is not None else []
    if not known.manifests and not known.rejected:
        with contextlib.suppress(StoreNotFoundError):
            known.foreign_size = store.size(name)


def _read_batch(store: Store, known: DurableCatalog) -> None:
    batch, known.rest = known.rest[:_BATCH], known.rest[_BATCH:]

    def read(name: str) -> Manifest | str | None:
        try:
            return read_manifest(store, name)
        except FormatVersionError:
            # What a newer release wrote may be the newest checkpoint: not to be passed over.
            raise
        except ManifestError as error:
            return f"durable {name}: {error}"

    with ThreadPoolExecutor(_READ_AT_ONCE, thread_name_prefix="tiered-discover") as pool:
        results = list(pool.map(read, batch))
        found = [manifest for manifest in results if isinstance(manifest, Manifest)]
        targets = {manifest.alias_of for manifest in found if manifest.alias_of} - set(batch)
        results += list(pool.map(read, sorted(targets)))
    known.manifests = [manifest for manifest in results if isinstance(manifest, Manifest)]
    known.rejected = [note for note in results if isinstance(note, str)]


def _as_ours(error: Exception) -> TieredCheckpointError:
    if isinstance(error, TieredCheckpointError):
        return error
    return RestoreError(f"{type(error).__name__}: {error}", operation="discover", tier="durable")


# ------------------------------------------------------------------------------------ node memory
@dataclass(slots=True)
class NodeCatalog:
    """What one node's memory holds for one durable tier.

    Attributes:
        held: Parts of complete saves and of others, replicas among them.
        damaged: Parts that can't be read, and why.
        quarantined: Parts that earlier restores found corrupt.
        newer: Why a part can't be read, where a newer release wrote it.
        aliases: Aliases that are queued for the durable tier, and their targets.
    """

    held: list[Held] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    newer: FormatVersionError | None = None
    aliases: dict[str, str] = field(default_factory=dict)


def look(tiers: Tiers) -> NodeCatalog:
    """Lists this node's memory.

    Raises:
        OSError: The memory tier can't be read.
    """
    here, tier, dirpath = NodeCatalog(), tiers.memory, tiers.dirpath
    for stored in tiers.held():
        part = stored.part
        if part.dirpath == dirpath:
            content = _without_hashes(part.content)
            owns = not stored.is_replica
            here.held.append(Held(part.name, part.rank, content, part.commits, owns, stored.replicated))
    for folder, error in (*tier.damaged(), *tier.replicas.damaged()):
        here.damaged.append(f"memory {folder}: {error}")
        if isinstance(error, FormatVersionError):
            here.newer = error
    for folder in sorted((tier.root / "quarantine").iterdir()):
        if _may_belong(folder, dirpath):
            here.quarantined.append(f"memory {folder}: quarantined")
    for request in Queue(tier.root).requests():
        if request.action == "alias" and request.dirpath == dirpath:
            here.aliases[request.name] = request.target
    return here


def _without_hashes(content: Content) -> Content:
    return replace(content, files=tuple(replace(entry, hashes=()) for entry in content.files))


def _may_belong(folder: Path, dirpath: str) -> bool:
    """Whether a quarantined part is, or may be, one of this durable tier."""
    path = folder / PART_FILE
    try:
        return Part.from_json(path.read_bytes(), where=str(path)).dirpath == dirpath
    except (OSError, ManifestError):
        return True
