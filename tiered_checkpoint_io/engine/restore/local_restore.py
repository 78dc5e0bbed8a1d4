"""Loading a local checkpoint: each rank the file of its shard, without waiting for any other rank.

A save is taken if it is known to be whole: it is committed on the durable tier, or this node's memory holds
the parts of all its shards, or knows that all of them were copied to peers. The first rank that has an intact file
of one leaves word which save that is, see ``local_run``; all others take theirs of that save: from their node's
memory, else from a peer's, see ``local_peers``, else from the durable tier. A save that several nodes hold in memory
alone, without copies, is loaded where its name is asked for: no node can see that it is whole, but whoever lacks a
part says so. The copies that a node keeps for others count as what it holds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.engine.replication.local_peers import LocalPeers
from tiered_checkpoint_io.engine.restore.bring import Bringer, Brought
from tiered_checkpoint_io.engine.restore.choice import Candidate, Selector, Tier, durable_contents
from tiered_checkpoint_io.engine.restore.discovery import Known, discover, read_more
from tiered_checkpoint_io.engine.saving.local_shards import Place
from tiered_checkpoint_io.errors import CheckpointNotFoundError, OtherKindError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, gib
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Manifest, Part
from tiered_checkpoint_io.stores.base import Store

_HERE = "here"


@dataclass(frozen=True, slots=True)
class Found:
    """A local checkpoint, and this rank's file of it.

    Attributes:
        name: The checkpoint's name.
        content: The facts of its save, and the file of this rank's shard.
        tier: Where the file was found.
        path: A verified local copy.
        rejected: What was tried before it, and why it was not taken.
    """

    name: str
    content: Content
    tier: Tier
    path: Path
    rejected: list[str]


def local_candidates(
    parts: Sequence[Part],
    manifests: Sequence[Manifest],
    selector: Selector,
    shard: int,
    safe: Collection[str] = (),
) -> list[Candidate]:
    """The saves to try, those that are known to be whole first, and among them in the selector's order.

    Args:
        parts: What this node's memory holds.
        manifests: Of the durable tier.
        selector: What is wanted.
        shard: Whose file.
        safe: Ids of saves of which peers have all parts.

    Returns:
        Candidates whose only file is that of the shard; one that has no such shard, for it had fewer, has none.
    """
    names: dict[str, str] = {}
    there: dict[str, Content] = {}
    for name, content in durable_contents(manifests, selector, set()):
        if content.kind == "local":
            names[content.save_id], there[content.save_id] = name, content
    here: dict[str, dict[int, Content]] = {}
    for part in parts:
        if part.content.kind == "local" and selector.wants(part.name):
            names.setdefault(part.save_id, part.name)
            here.setdefault(part.save_id, {})[part.rank] = part.content
    made: dict[bool, list[Candidate]] = {True: [], False: []}
    contents = {save_id: there.get(save_id) or next(iter(here[save_id].values())) for save_id in names}
    for content in selector.in_order(contents.values()):
        save_id, mine = content.save_id, here.get(content.save_id, {})
        whole = save_id in there or save_id in safe or set(mine) >= set(range(content.world_size))
        if not whole and (selector.kind != "name" or (shard not in mine and shard < content.world_size)):
            continue
        offered: list[tuple[Tier, bool]] = [("memory", shard in mine), ("peer", save_id in safe)]
        tiers = tuple(tier for tier, has in (*offered, ("durable", save_id in there)) if has)
        files = mine[shard].files if shard in mine else _files_of(there.get(save_id), shard)
        made[whole].append(Candidate(names[save_id], replace(content, files=files), {_HERE: tiers}))
    return made[True] + made[False]


def _files_of(content: Content | None, shard: int) -> tuple[FileEntry, ...]:
    prefix = ids.rank_folder(shard)
    files = content.files if content is not None else ()
    return tuple(entry for entry in files if entry.basename.partition(".")[0].rpartition("-")[0] == prefix)


class LocalRestorer:
    """Finds the local checkpoint to load, and brings this rank's file of it to this node."""

    def __init__(
        self,
        config: TieredCheckpointConfig,
        tier: MemoryTier,
        store: Callable[[], Store],
        logger: Logger,
        place: Place,
        peers: LocalPeers | None = None,
    ) -> None:
        """Takes the tiers.

        Args:
            config: For bounds and concurrency.
            tier: This node's memory.
            store: Opens the durable tier.
            logger: Where to log.
            place: Which shard this rank has.
            peers: Who may have it in memory; None where nobody has copies, or nobody else loads.
        """
        self._config = config
        self._tier = tier
        self._store = store
        self._log = logger
        self._place = place
        self._peers = peers
        self._load = ""
        self._bringer = Bringer(config, tier, store, logger, config.dirpath, part_rank=place.shard)
        self._rejected: list[str] = []
        #: The newest save that was seen in any tier.
        self.newest_seen: str | None = None

    @contextlib.contextmanager
    def open(self, selector: Selector) -> Iterator[Found]:
        """This rank's file of the checkpoint that is meant; held while the block runs.

        Raises:
            CheckpointNotFoundError: There is none, or this rank's file of it is nowhere.
            OtherKindError: What is meant is no local checkpoint.
            RestoreError: None is intact, or another number of shards made it.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            UsageError: The other ranks' choice could not be learnt.
        """
        started = time.monotonic()
        run = current_run()
        what = f"{self._config.namespace}/{self._config.dirpath}/{selector.kind}/{selector.name}/{selector.step}"
        load = self._load = run.begin_load(what)
        if self._peers is not None:
            self._peers.begin(load, [(part.save_id, part.rank) for part in self._wanted(selector)])
        try:
            candidate, brought = self._choose(selector, load)
        finally:
            if self._peers is not None:
                self._peers.end(load)
        assert brought.path is not None
        path = Path(brought.path)
        with contextlib.ExitStack() as held:
            if brought.temporary:
                held.callback(path.unlink, missing_ok=True)
            else:
                held.enter_context(self._tier.reading(self._bringer.find(candidate.content.save_id)))
            self._log.info(
                "Step %d: resuming from shard %d of %s (%s, %s) after %.2f s",
                candidate.content.step,
                self._place.shard,
                candidate.name,
                brought.tier,
                gib(candidate.content.size),
                time.monotonic() - started,
            )
            yield Found(candidate.name, candidate.content, brought.tier, path, self._rejected)

    # ------------------------------------------------------------------------------------ choosing
    def _choose(self, selector: Selector, load: str) -> tuple[Candidate, Brought]:
        run = current_run()
        chosen = run.chosen(load)
        if chosen is None and self._peers is not None and not self._wanted(selector):
            # This node may have lost what others still have.
            chosen = self._peers.await_choice(load, lambda: run.chosen(load))
        if chosen is None:
            mine = self._first_intact(selector)
            word = json.dumps([mine[0].name, mine[0].content.save_id])
            chosen = run.choose(load, word)
            if chosen == word:
                return mine
        name, save_id = json.loads(chosen)
        self._see([save_id])
        # What was rejected before is not what the others load.
        self._rejected = []
        options = local_candidates(self._held(), [], Selector("name", name), self._place.shard)
        options = [each for each in options if each.content.save_id == save_id and each.sources[_HERE]]
        for candidate in options:
            self._check_degree(candidate)
            brought = self._bring(candidate)
            if brought is not None:
                return candidate, brought
        brought = self._from_peers(save_id)
        if brought is not None:
            content = self._bringer.find(save_id).part.content
            candidate = Candidate(name, content, {_HERE: ("peer",)})
            self._check_degree(candidate)
            return candidate, brought
        manifest = read_manifest(self._store(), name)
        found = local_candidates([], [manifest] if manifest else [], Selector("name", name), self._place.shard)
        for candidate in found:
            if candidate.content.save_id == save_id:
                self._check_degree(candidate)
                brought = self._bring(candidate)
                if brought is not None:
                    return candidate, brought
        raise self._lacks(name, save_id)

    def _first_intact(self, selector: Selector) -> tuple[Candidate, Brought]:
        """The first rank's choice."""
        known: Known = discover(self._store, selector, {})
        tried: set[str] = set()
        while True:
            for note in known.rejected:
                self._log.error("not restored, looking further: %s", note)
            self._rejected += known.rejected
            held = self._held()
            options = [
                each
                for each in local_candidates(held, known.manifests, selector, self._place.shard, self._safe())
                if each.content.save_id not in tried
            ]
            self._see(manifest.content.save_id for manifest in known.manifests)
            if known.error is not None:
                # As in any restore: training goes on from memory while S3 is away, but never from scratch.
                if not options or not known.error.retryable:
                    raise known.error
                self._rejected.append(f"durable {self._config.dirpath}: {known.error}")
            if not options and not tried and selector.kind == "name":
                self._check_kind(known.manifests, held, selector)
            for candidate in options:
                self._check_degree(candidate)
                tried.add(candidate.content.save_id)
                brought = self._bring(candidate)
                if brought is not None:
                    return candidate, brought
            if not known.rest:
                raise self._none(selector)
            known = read_more(self._store, known)

    def _held(self) -> list[Part]:
        dirpath = self._config.dirpath
        for folder, error in (*self._tier.damaged(), *self._tier.replicas.damaged()):
            note = f"memory {folder}: {error}"
            if note not in self._rejected:
                self._rejected.append(note)
                self._log.error("not restored, looking further: %s", note)
        held = (*self._tier.parts(), *self._tier.replicas.parts())
        parts = [stored.part for stored in held if stored.part.dirpath == dirpath]
        self._see(part.save_id for part in parts)
        return parts

    def _see(self, save_ids: Iterable[str]) -> None:
        self.newest_seen = max([*save_ids, *filter(None, [self.newest_seen])], default=None)

    def _bring(self, candidate: Candidate) -> Brought | None:
        sources = candidate.sources[_HERE]
        for tier in sources:
            if tier == "peer":
                brought = self._from_peers(candidate.content.save_id)
                if brought is not None:
                    return brought
                continue
            brought = self._bringer.bring(candidate, (tier,), self._place.shard)
            self._rejected += brought.rejected
            if brought.error is not None:
                raise brought.error
            if brought.path is not None:
                return brought
        return None

    def _from_peers(self, save_id: str) -> Brought | None:
        """This rank's file from another node's memory; None where none gives it."""
        if self._peers is None:
            return None
        stored, notes = self._peers.fetch(self._load, save_id, self._place.shard, self._is_durable)
        self._rejected += notes
        if stored is None:
            return None
        return Brought(str(stored.file(stored.part.content.files[0].basename)), "peer")

    def _is_durable(self, part: Part) -> bool:
        """Whether nothing is left to do for a part to get to the durable tier; asks that only where it is to."""
        if not part.durable:
            return False
        try:
            manifest = read_manifest(self._store(), part.name)
        except TieredCheckpointError as error:
            self._log.warning("cannot ask whether %s is durable, so it is uploaded once more: %s", part.name, error)
            return False
        return manifest is not None and manifest.content.save_id == part.save_id

    def _safe(self) -> set[str]:
        """Saves of which peers have all parts; where there is nobody to ask, that is of no use."""
        if self._peers is None:
            return set()
        held = (*self._tier.parts(), *self._tier.replicas.parts())
        return {stored.save_id for stored in held if stored.replicated}

    def _wanted(self, selector: Selector) -> list[Part]:
        return [part for part in self._held() if part.content.kind == "local" and selector.wants(part.name)]

    # -------------------------------------------------------------------------------------- errors
    def _check_degree(self, candidate: Candidate) -> None:
        saved, mine = candidate.content.world_size, self._place.degree
        if saved != mine:
            raise RestoreError(
                f"{candidate.name} is a local checkpoint of {saved} shards, and {mine} are to load it",
                operation="load",
                key=ids.join_url(self._config.dirpath, candidate.name),
                rank=self._place.shard,
                step=candidate.content.step,
                hint="the shard degree has to stay as it was; the number of replicas may change. To go on with another"
                " one, save by kind='sharded'",
            )

    def _check_kind(self, manifests: Collection[Manifest], held: Collection[Part], selector: Selector) -> None:
        others = [(each.name, each.content) for each in manifests]
        others += [(each.name, each.content) for each in held if selector.wants(each.name)]
        for name, content in others:
            if content.kind != "local":
                raise OtherKindError(
                    f"{name} is a {content.kind} checkpoint, not a local one",
                    operation="load",
                    key=ids.join_url(self._config.dirpath, name),
                    step=content.step,
                    hint="load it by kind='sharded'" if content.kind == "sharded" else "load it by TieredCheckpointIO",
                )

    def _none(self, selector: Selector) -> CheckpointNotFoundError | RestoreError:
        key = ids.join_url(self._config.dirpath, selector.name) if selector.name else self._config.dirpath
        if self._rejected:
            return RestoreError(
                "no local checkpoint is intact: " + "; ".join(self._rejected),
                operation="load",
                key=key,
                rank=self._place.shard,
                hint=f"corrupt parts of memory lie in {self._tier.root}/quarantine",
            )
        return CheckpointNotFoundError(
            f"no local checkpoint{f' {selector.name!r}' if selector.name else ''} is whole in this node's memory or at"
            f" {self._config.dirpath}",
            operation="load",
            key=key,
            rank=self._place.shard,
            hint="see `tiered-ckpt ls`; one that several nodes hold in memory alone is loaded by its checkpoint_id",
        )

    def _lacks(self, name: str, save_id: str) -> RestoreError:
        notes = f": {'; '.join(self._rejected)}" if self._rejected else ""
        return RestoreError(
            f"the ranks load save {save_id} of {name}, but shard {self._place.shard} of it is not intact in this node's"
            f" memory or at {self._config.dirpath}{notes}",
            operation="load",
            key=ids.join_url(self._config.dirpath, name),
            rank=self._place.shard,
            hint="have all ranks load an older one by its checkpoint_id",
        )
