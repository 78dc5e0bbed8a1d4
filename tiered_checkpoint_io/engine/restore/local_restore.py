"""Loading a local checkpoint: each rank the file of its shard, without any collective.

A checkpoint is taken if it is known to be complete: it is committed on the durable tier, or this node's memory holds
the parts of all its shards, or knows that all of them were replicated. The first rank that has an intact file of a
complete checkpoint publishes its save, see ``local_run``; all others take their files of that save: from their node's
memory, else from a peer's, see ``local_peers``, else from the durable tier. With peers, a node that was not part of the
job for a while may hold an old checkpoint. So only ranks whose node has a part of the newest save that all nodes
together hold may choose. Without peers, a memory-only checkpoint is skipped if some rank's node lacks that rank's file:
the ranks of one node may have saved it for replicas on others, or ranks may have moved to other nodes. A memory-only
checkpoint of several nodes without replicas is loaded by its name: no node can see that it is complete, but a rank that
lacks its part says so. Replicas that a node keeps for others count as parts that it holds.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

from tiered_checkpoint_io.engine.durable.manifests import contents_of, read_manifest
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.engine.ranks.world import current_world_size
from tiered_checkpoint_io.engine.replication.local_peers import LocalPeers
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Candidate, Held, Selector, Tier
from tiered_checkpoint_io.engine.restore.restore import FetchedPart, NodeFetcher, Restored, fetched_from
from tiered_checkpoint_io.engine.restore.search import Search
from tiered_checkpoint_io.engine.save.uncoordinated import ShardRole
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content


class LocalRestorer:
    """Finds the local checkpoint to load, and fetches this rank's file of it to this node."""

    def __init__(self, tiers: Tiers, role: ShardRole, peers: LocalPeers | None = None, *, alone: bool = False) -> None:
        """Takes the tiers, this rank's shard, and the peers that may have it; None if none load.

        ``alone`` is true if no other rank takes part in the load.
        """
        self._alone = alone
        # Each rank looks by itself: all have to look at one dirpath.
        self._tiers = replace(tiers, store_at=None)
        self._role = role
        self._peers = peers
        self._load = ""
        self._fetcher = NodeFetcher(tiers, part_rank=role.shard)

    def restore(self, selector: Selector) -> Restored:
        """Returns this rank's file of the wanted checkpoint, to be released once it is loaded.

        Raises:
            CheckpointNotFoundError: There is none, or no tier has this rank's file of it.
            RestoreError: No copy is intact, or another number of shards made the checkpoint.
            ConfigError: The other ranks' choice could not be learnt.
            TieredCheckpointError: As :meth:`Search.run`.
        """
        what = (self._tiers.config.namespace, self._tiers.dirpath, selector.kind, selector.name, selector.step)
        self._load = current_run().begin_load("/".join(map(str, (*what, selector.folder))))
        # No collective.
        group, has_peers = Group("here"), self._peers is not None
        search = Search(self._tiers, selector, "local", group, self._role.shard, replicas=has_peers)
        listed = search.look()
        meant = [each for each in listed if each.content.kind == "local" and selector.wants(each.name)]
        held = {(each.content.save_id, each.rank): each.content.parts for each in meant}
        if self._must_ask(search):
            current_run().report_held(self._load, {save_id for save_id, rank in held if rank == self._role.shard})
        if self._peers is not None:
            self._peers.begin(self._load, held)
        try:
            search.check()
            fetched = self._choose(search, listed, has_some=bool(held))
        finally:
            if self._peers is not None:
                self._peers.end(self._load)
        restored = self._fetcher.hold(fetched, search, keep=False)
        self._fetcher.retain(fetched)
        self._fetcher.report(restored)
        return restored

    # ------------------------------------------------------------------------------------ choosing
    def _choose(self, search: Search, listed: list[Held], *, has_some: bool) -> FetchedPart:
        """Chooses a save: the first rank with an intact file chooses; all others take their files of the same save."""
        run, load = current_run(), self._load
        chosen = run.chosen(load)
        if chosen is None and self._peers is not None:
            if search.selector.kind != "name":
                newest = self._peers.newest(load, lambda: run.chosen(load))
                # The save is complete, whether this node has learnt that or not.
                listed[:] = [replace(each, replicated=each.replicated or _is(each, newest)) for each in listed]
                has_some = has_some and (newest is None or any(_is(each, newest) for each in listed))
            if not has_some:
                # This node may have lost parts that other nodes still have, or have only old parts.
                chosen = self._peers.await_choice(load, lambda: run.chosen(load))
        if chosen is None:
            mine = search.run(lambda candidate: self._try(candidate, search))
            if mine is None:
                raise search.nothing
            word = json.dumps([mine.part.name, mine.part.save_id])
            chosen = run.choose(load, word)
            if chosen == word:
                return mine
        return self._take(search, *json.loads(chosen))

    def _try(self, candidate: Candidate, search: Search) -> FetchedPart | None:
        """Returns this rank's file of a candidate, from its node's memory, another node's, or the durable tier."""
        self._check_degree(candidate.name, candidate.content)
        if candidate.durable is None and self._must_ask(search) and not self._all_hold(candidate):
            what = f"{candidate.name} (step {candidate.content.step})"
            note = f"{what} is in memory alone, and some ranks are on nodes that do not have their part of it"
            self._tiers.log.warning("%s: trying the next; with a replication_factor of 2 they would fetch it", note)
            search.reject([note])
            return None
        tiers: list[tuple[Tier, bool]] = [
            ("memory", any(self._role.shard in ranks for ranks in candidate.held.values())),
            ("peer", self._peers is not None and candidate.replicated),
            ("durable", candidate.durable is not None),
        ]
        found = (self._fetch(candidate, tier, search) for tier, has in tiers if has)
        return next((each for each in found if each is not None), None)

    def _must_ask(self, search: Search) -> bool:
        """Returns True if this rank might choose a save that other ranks can't get; a name needs no common choice."""
        return not self._alone and self._peers is None and search.selector.kind != "name"

    def _all_hold(self, candidate: Candidate) -> bool:
        return current_run().all_hold(self._load, candidate.save_id, current_world_size(), self._tiers.clock)

    def _take(self, search: Search, name: str, save_id: str) -> FetchedPart:
        """Returns this rank's file of the save that another rank has chosen."""
        # Other ranks do not load the copies that were rejected before.
        search.rejected.clear()
        fetched: FetchedPart | None = None
        with contextlib.suppress(CheckpointNotFoundError):
            held = Candidate(name, self._fetcher.find(save_id).part.content)
            fetched = self._fetch(held, "memory", search)
        fetched = fetched or self._from_peers(save_id, search)
        if fetched is None:
            manifest = read_manifest(self._tiers.store(), name)
            for content in contents_of([manifest] if manifest is not None else []):
                if content.save_id == save_id:
                    self._check_degree(name, content)
                    fetched = self._fetch(Candidate(name, content, durable=content), "durable", search)
        if fetched is None:
            raise self._lacks(search, name, save_id)
        self._check_degree(name, fetched.part.content)
        return fetched

    def _fetch(self, candidate: Candidate, tier: Tier, search: Search) -> FetchedPart | None:
        """Returns this rank's file from one tier; None if it is not intact there."""
        if tier != "peer":
            attempt = self._fetcher.fetch(candidate, tier, search)
            search.share(attempt, FetchedPart.brief)
            return attempt.value
        return self._from_peers(candidate.save_id, search)

    def _from_peers(self, save_id: str, search: Search) -> FetchedPart | None:
        """Returns this rank's file from another node's memory; None if no node sends it."""
        if self._peers is None:
            return None
        # The drain uploads the part only if the durable tier lacks it.
        stored, notes = self._peers.fetch(self._load, save_id, self._role.shard)
        search.reject(notes)
        return fetched_from(stored, "peer") if stored is not None else None

    # -------------------------------------------------------------------------------------- errors
    def _check_degree(self, name: str, content: Content) -> None:
        if content.world_size != self._role.degree:
            raise RestoreError(
                f"{name} is a local checkpoint of {content.world_size} shards, and {self._role.degree} are to load it",
                operation="load",
                key=ids.join_url(self._tiers.dirpath, name),
                rank=self._role.shard,
                step=content.step,
                hint="the shard degree has to stay as it was; the number of replicas may change. To go on with another"
                " one, save by kind='sharded'",
            )

    def _lacks(self, search: Search, name: str, save_id: str) -> RestoreError:
        notes = f": {'; '.join(search.rejected)}" if search.rejected else ""
        return RestoreError(
            f"the ranks load save {save_id} of {name}, but shard {self._role.shard} of it is not intact in this node's"
            f" memory or at {self._tiers.dirpath}{notes}",
            operation="load",
            key=ids.join_url(self._tiers.dirpath, name),
            rank=self._role.shard,
            hint="have all ranks load an older one by its checkpoint_id",
        )


def _is(held: Held, save_id: str | None) -> bool:
    return held.content.save_id == save_id
