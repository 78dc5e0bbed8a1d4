"""Loading a local checkpoint: each rank the file of its shard, without waiting for any other rank.

A checkpoint is taken if it is known to be complete: it is committed on the durable tier, or this node's memory holds
the parts of all its shards, or knows that all of them were replicated. The first rank that has an intact file of one
publishes which save that is, see ``local_run``; all others take theirs of that save: from their node's memory, else
from a peer's, see ``local_peers``, else from the durable tier. A checkpoint that several nodes hold in memory alone,
without replicas, is loaded by its name: no node can see that it is complete, but a rank that lacks its part says so.
The replicas that a node keeps for others count as what it holds.
"""

from __future__ import annotations

import contextlib
import json

from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.ranks.coordination import SingleGroup, raise_first
from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.engine.replication.local_peers import LocalPeers
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Evidence, Selector, Tier
from tiered_checkpoint_io.engine.restore.fetcher import FetchResult, NodeFetcher
from tiered_checkpoint_io.engine.restore.restore import Restored, restored_from
from tiered_checkpoint_io.engine.restore.search import Search
from tiered_checkpoint_io.engine.save.uncoordinated import Place
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import gib
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part


class LocalRestorer:
    """Finds the local checkpoint to load, and brings this rank's file of it to this node."""

    def __init__(self, tiers: Tiers, place: Place, peers: LocalPeers | None = None) -> None:
        """Takes the tiers.

        Args:
            tiers: Where to look.
            place: Which shard this rank has.
            peers: Who may have it in memory; None where nobody has replicas, or nobody else loads.
        """
        self._tiers = tiers
        self._place = place
        self._peers = peers
        self._load = ""
        self._fetcher = NodeFetcher(tiers, part_rank=place.shard)

    def restore(self, selector: Selector) -> Restored:
        """This rank's file of the checkpoint that is meant, to be released once it is loaded.

        Raises:
            CheckpointNotFoundError: There is none, or this rank's file of it is nowhere.
            OtherKindError: What is meant is no local checkpoint.
            RestoreError: None is intact, or another number of shards made it.
            FormatVersionError: A newer release wrote what would have to be chosen.
            StoreError: The durable tier could not be asked, and memory does not suffice.
            UsageError: The other ranks' choice could not be learnt.
        """
        started = self._tiers.clock.monotonic()
        run = current_run()
        what = f"{self._tiers.config.namespace}/{self._tiers.dirpath}/{selector.kind}/{selector.name}/{selector.step}"
        load = self._load = run.begin_load(what)
        search = Search(
            self._tiers,
            self._fetcher,
            selector,
            "local",
            # No collective, and no wait for other ranks.
            SingleGroup("here"),
            Evidence(self._place.shard, replicas=self._peers is not None),
        )
        here = search.look()
        held = [(part.content.save_id, part.rank) for part in here.held if selector.wants(part.name)] if here else []
        if self._peers is not None:
            self._peers.begin(load, held)
        try:
            search.check()
            candidate, fetched = self._choose(search, load, has_some=bool(held))
        finally:
            if self._peers is not None:
                self._peers.end(load)
        restored = restored_from(fetched, candidate.name, candidate.content)
        if not fetched.temporary:
            stored = self._fetcher.find(candidate.save_id)
            restored.hold(self._tiers.memory.reading(stored))
            restored.content = stored.part.content
        restored.seconds = self._tiers.clock.monotonic() - started
        restored.rejected = search.rejected
        restored.newest_save_id = max(filter(None, [search.newest, candidate.save_id]))
        self._tiers.log.info(
            "Step %d: resuming from shard %d of %s (%s, %s) after %.2f s",
            restored.step,
            self._place.shard,
            restored.name,
            restored.tier,
            gib(restored.path.stat().st_size),
            restored.seconds,
        )
        return restored

    # ------------------------------------------------------------------------------------ choosing
    def _choose(self, search: Search, load: str, *, has_some: bool) -> tuple[Candidate, FetchResult]:
        """The first rank to have found an intact file of its own chooses; all others take theirs of the same save."""
        run = current_run()
        chosen = run.chosen(load)
        if chosen is None and self._peers is not None and not has_some:
            # This node may have lost what others still have.
            chosen = self._peers.await_choice(load, lambda: run.chosen(load))
        if chosen is None:
            mine = search.run(lambda candidate: self._try(candidate, search))
            if mine is None:
                raise search.nothing()
            word = json.dumps([mine[0].name, mine[0].save_id])
            chosen = run.choose(load, word)
            if chosen == word:
                return mine
        return self._take(search, *json.loads(chosen))

    def _try(self, candidate: Candidate, search: Search) -> tuple[Candidate, FetchResult] | None:
        """This rank's file of a candidate, from its node's memory, from another node's, or from the durable tier."""
        self._check_degree(candidate)
        tiers: list[tuple[Tier, bool]] = [
            ("memory", any(self._place.shard in ranks for ranks in candidate.held.values())),
            ("peer", self._peers is not None and candidate.replicated),
            ("durable", candidate.durable is not None),
        ]
        for tier in (tier for tier, has in tiers if has):
            fetched = self._fetch(candidate, tier, search)
            if fetched is not None:
                return candidate, fetched
        return None

    def _take(self, search: Search, name: str, save_id: str) -> tuple[Candidate, FetchResult]:
        """This rank's file of the save that another rank has chosen."""
        # What was rejected before is not what the others load.
        search.rejected.clear()
        fetched: FetchResult | None = None
        with contextlib.suppress(CheckpointNotFoundError):
            candidate = Candidate(name, self._fetcher.find(save_id).part.content)
            self._check_degree(candidate)
            fetched = self._fetch(candidate, "memory", search)
        if fetched is None and (fetched := self._from_peers(save_id, search)) is not None:
            candidate = Candidate(name, self._fetcher.find(save_id).part.content)
            self._check_degree(candidate)
        if fetched is None:
            manifest = read_manifest(self._tiers.store(), name)
            contents = (manifest.content, *manifest.previous) if manifest is not None else ()
            for content in (each for each in contents if each.save_id == save_id):
                candidate = Candidate(name, content, durable=content)
                self._check_degree(candidate)
                fetched = self._fetch(candidate, "durable", search)
        if fetched is None:
            raise self._lacks(search, name, save_id)
        return candidate, fetched

    def _fetch(self, candidate: Candidate, tier: Tier, search: Search) -> FetchResult | None:
        """This rank's file from one tier; None where it is not intact there."""
        if tier == "peer":
            return self._from_peers(candidate.save_id, search)
        fetched = self._fetcher.fetch(candidate, (tier,), self._place.shard)
        search.reject(fetched.rejected)
        raise_first([fetched.error])
        return fetched if fetched.path is not None else None

    def _from_peers(self, save_id: str, search: Search) -> FetchResult | None:
        """This rank's file from another node's memory; None where none gives it."""
        if self._peers is None:
            return None
        stored, notes = self._peers.fetch(self._load, save_id, self._place.shard, self._is_durable)
        search.reject(notes)
        if stored is None:
            return None
        return FetchResult(str(stored.file(stored.part.content.files[0].basename)), "peer")

    def _is_durable(self, part: Part) -> bool:
        """Whether nothing is left to do for a part to get to the durable tier; asks that only where it is to."""
        if not part.durable:
            return False
        try:
            manifest = read_manifest(self._tiers.store(), part.name)
        except TieredCheckpointError as error:
            self._tiers.log.warning(
                "cannot ask whether %s is durable, so it is uploaded once more: %s", part.name, error
            )
            return False
        return manifest is not None and manifest.content.save_id == part.save_id

    # -------------------------------------------------------------------------------------- errors
    def _check_degree(self, candidate: Candidate) -> None:
        saved, mine = candidate.content.world_size, self._place.degree
        if saved != mine:
            raise RestoreError(
                f"{candidate.name} is a local checkpoint of {saved} shards, and {mine} are to load it",
                operation="load",
                key=ids.join_url(self._tiers.dirpath, candidate.name),
                rank=self._place.shard,
                step=candidate.content.step,
                hint="the shard degree has to stay as it was; the number of replicas may change. To go on with another"
                " one, save by kind='sharded'",
            )

    def _lacks(self, search: Search, name: str, save_id: str) -> RestoreError:
        notes = f": {'; '.join(search.rejected)}" if search.rejected else ""
        return RestoreError(
            f"the ranks load save {save_id} of {name}, but shard {self._place.shard} of it is not intact in this node's"
            f" memory or at {self._tiers.dirpath}{notes}",
            operation="load",
            key=ids.join_url(self._tiers.dirpath, name),
            rank=self._place.shard,
            hint="have all ranks load an older one by its checkpoint_id",
        )
