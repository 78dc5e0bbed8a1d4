"""Choice of the checkpoint to restore, and of its source: a pure function of the tiers' contents.

A checkpoint of any payload is chosen in the same way. The payload only decides what an adapter accepts, and this is the
one module of the engine that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.logs import names_text
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Kind, Manifest

#: Source of a checkpoint for a node: its own memory (its own parts, and copies that it keeps for others), the
#: memory of another node, or the durable tier.
Tier = Literal["memory", "peer", "durable"]


#: For :attr:`Selector.folder`: see :meth:`Catalog.in_one_folder`.
ONE_FOLDER = "*"


@dataclass(frozen=True, slots=True)
class Selector:
    """Request for a checkpoint to restore.

    Attributes:
        kind: ``latest``: the newest checkpoint that training can resume from; ``last``: the newest resumable one that
            is called "last", or if all of these are weights-only, the newest of them; ``name``: the newest of one name.
        name: For ``name``.
        step: For ``latest``: only checkpoints of this training step, if given.
        also: For ``last``: further names that count as "last".
        folder: For ``latest``: only names in this folder, as :func:`ids.folder_of` gives it; None for any. Process
            groups, or averaged weights, may be saved in folders of their own.
    """

    kind: Literal["latest", "last", "name"]
    name: str = ""
    step: int | None = None
    also: frozenset[str] = frozenset()
    folder: str | None = None

    @property
    def terms(self) -> str:
        """Further terms of a request, for messages: `` of step 5 in folder 'ema'``."""
        step = f" of step {self.step}" if self.step is not None else ""
        return f"{step} in folder {self.folder!r}" if self.folder not in (None, "", ONE_FOLDER) else step

    def wants(self, name: str) -> bool:
        """Returns True if a checkpoint of this name is, or may be, wanted."""
        if self.step is not None and ids.step_in_name(name) not in (None, self.step):
            return False
        if self.folder not in (None, ONE_FOLDER, ids.folder_of(name)):
            return False
        if self.kind == "latest":
            return True
        if self.kind == "last":
            return ids.is_last(name) or name in self.also
        return name == self.name

    def takes(self, content: Content) -> bool:
        """Returns True if the content serves: a request by name may be for an evaluation, not to resume."""
        return content.resumable or self.kind == "name"

    def in_order(self, contents: Iterable[Content]) -> list[Content]:
        """Returns the wanted candidates in the order to try: the latest first."""
        there = list(contents)
        wanted = [each for each in there if self.takes(each)]
        if self.kind == "last" and not wanted:
            # Weights only, for an evaluation. Resuming from them is refused, as by their name.
            wanted = there
        wanted = [each for each in wanted if self.step in (None, each.step)]
        return sorted(wanted, key=lambda each: each.order, reverse=True)


@dataclass(frozen=True, slots=True)
class Held:
    """One part of a checkpoint in the memory of a node; ``content`` lists its files without their hashes.

    ``commits`` is true for the coordinator's part, ``owns`` for a node's own part (no replica), ``replicated`` if all
    parts of its save are in the memory of other nodes as well, ``committed`` if the node knows that its save was on the
    durable tier.
    """

    name: str
    rank: int
    content: Content
    commits: bool = True
    owns: bool = True
    replicated: bool = False
    committed: bool = False


@dataclass(frozen=True, slots=True)
class Catalog:
    """Contents of the tiers: parts in each node's memory, manifests, and the targets of queued aliases."""

    memory: Mapping[str, Sequence[Held]]
    manifests: Sequence[Manifest] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def in_one_folder(self, selector: Selector, accepts: Kind, dirpath: str) -> Selector:
        """Returns the selector with the folder that :data:`ONE_FOLDER` means; none, if any name is in none.

        Raises RestoreError if all names are in folders, and there are several folders.
        """
        there = [(held.name, held.content) for parts in self.memory.values() for held in parts]
        there += [(manifest.name, manifest.content) for manifest in self.manifests]
        passed = _PASSED_OVER.get(accepts, ())
        names = {name for name, content in there if content.resumable and content.kind not in passed}
        folders = sorted({ids.folder_of(name) for name in names})
        if selector.folder != ONE_FOLDER or not folders:
            return selector
        if len(folders) > 1 and folders[0]:
            raise RestoreError(
                f"there are checkpoints in several folders, and which is meant is not said: {names_text(folders)}",
                operation="restore",
                key=dirpath,
                hint=f"ask for the newest of one by checkpoint_id='{folders[0]}/{ids.LATEST}', or for one by its name,"
                f" such as '{max(name for name in names if ids.folder_of(name) == folders[0])}'",
            )
        return replace(selector, folder=folders[0])


@dataclass(frozen=True, slots=True)
class Candidate:
    """One save that every node can get."""

    name: str
    content: Content
    #: Content by its manifest; None if it is not on the durable tier.
    durable: Content | None = None
    #: For each node whose memory has parts of it: their ranks, and whether the node owns them.
    held: Mapping[str, Mapping[int, bool]] = field(default_factory=dict)
    #: Rank whose part has a file, by basename, as far as memory has it.
    files: Mapping[str, int] = field(default_factory=dict)
    #: True if the memory of the nodes has all its parts; and True if that of other nodes is known to.
    in_memory: bool = False
    replicated: bool = False
    #: True if a node knows that it was on the durable tier.
    committed: bool = False

    @property
    def save_id(self) -> str:
        return self.content.save_id

    @property
    def is_foreign(self) -> bool:
        """True for a checkpoint of another tool, which can't be verified, without a manifest."""
        return not self.save_id

    def is_complete(self, *, replicas: bool) -> bool:
        """Returns True if it is known to be complete; only with ``replicas``, the memory of other nodes counts."""
        return self.durable is not None or self.in_memory or (replicas and self.replicated)

    def is_orphaned(self, part: int = 0) -> bool:
        """Returns True if only replicas of a part are left, and the durable tier does not have it."""
        return self.durable is None and not any(ranks.get(part, False) for ranks in self.held.values())

    def orphans(self, node: str) -> list[int]:
        """Returns the orphaned parts that a node is to own: of several nodes with a replica, the first does."""
        parts = filter(self.is_orphaned, range(self.content.parts))
        return [part for part in parts if [name for name, ranks in self.held.items() if part in ranks][:1] == [node]]

    def sources(self, node: str, part: int = 0) -> tuple[Tier, ...]:
        """Returns the tiers from which a node can get a part, in the order in which to try them."""
        holders = {each for each, ranks in self.held.items() if part in ranks}
        tiers: list[tuple[Tier, bool]] = [("memory", node in holders), ("peer", bool(holders - {node}))]
        return tuple(tier for tier, has in (*tiers, ("durable", self.durable is not None)) if has)


@dataclass(slots=True, kw_only=True)
class Found:
    """A checkpoint that all ranks have agreed on.

    Attributes:
        name: Its name.
        dirpath: The durable tier that it belongs to.
        content: The facts of the save; None if others wrote it, so that nothing verified it.
        rejected: Copies that were tried before it, and why they were not taken.
        newest_save_id: The newest save that was seen in any tier; later runs count on from there.
        tier: Tier from which this node has its bytes.
        is_durable: True if it is known to be on the durable tier; its bytes may come from memory.
        seconds: Time to find, fetch and verify it.
    """

    name: str
    dirpath: str
    content: Content | None
    rejected: list[str] = field(default_factory=list)
    newest_save_id: str | None = None
    tier: Tier = "durable"
    is_durable: bool = False
    seconds: float = 0.0

    @property
    def url(self) -> str:
        """URL of the checkpoint on the durable tier, which may still have to get it."""
        return ids.join_url(self.dirpath, self.name)

    @property
    def save_id(self) -> str:
        """Id of the save; empty for a checkpoint of another tool."""
        return self.content.save_id if self.content is not None else ""

    @property
    def step(self) -> int:
        """The training step; -1 if the checkpoint has none."""
        if self.content is not None:
            return self.content.step
        step = ids.step_in_name(self.name)
        return -1 if step is None else step


def choose(
    catalog: Catalog,
    selector: Selector,
    accepts: Kind | None = None,
    *,
    replicas: bool = False,
) -> list[Candidate]:
    """Returns the wanted complete checkpoints, in the order in which to try them.

    A checkpoint is complete if its manifest exists, or if all its parts are seen.

    ``accepts`` is the wanted payload, None for any; see :func:`refuse_other_kind` for others. ``replicas`` is True to
    count the mark that all parts are in the memory of other nodes, because they can be asked.
    """
    wanted = {target for alias, target in catalog.aliases.items() if selector.wants(alias)}
    on_durable = {
        content.save_id: (name, content) for name, content in _durable_contents(catalog.manifests, selector, wanted)
    }
    parts: dict[str, list[tuple[str, Held]]] = {}
    # A copy counts as its original, in any tier: the original may be in memory.
    copied = {content.copy_of for _, content in on_durable.values() if content.copy_of}
    meant = set(on_durable)
    for node, held in catalog.memory.items():
        for part in held:
            parts.setdefault(part.content.save_id, []).append((node, part))
            if selector.wants(part.name) or part.name in wanted or part.content.save_id in copied:
                meant.add(part.content.save_id)
    made = {save_id: _candidate(parts.get(save_id, []), on_durable.get(save_id)) for save_id in meant}

    def in_order(candidates: Iterable[Candidate]) -> list[Candidate]:
        return [made[content.save_id] for content in selector.in_order(each.content for each in candidates)]

    usable = in_order(each for each in made.values() if each.is_complete(replicas=replicas))
    passed = _PASSED_OVER.get(accepts or "", ())
    kept = [each for each in usable if each.content.kind not in passed]
    # If it is asked for by name, it is refused for its payload, and not reported as missing.
    return kept if kept or selector.kind != "name" else usable


def _candidate(parts: Sequence[tuple[str, Held]], durable: tuple[str, Content] | None) -> Candidate:
    """Returns one save, from its parts in memory and the durable tier's content."""
    held: dict[str, dict[int, bool]] = {}
    for node, part in parts:
        here = held.setdefault(node, {})
        here[part.rank] = here.get(part.rank, False) or part.owns
    name, content = durable or (parts[0][1].name, parts[0][1].content)
    ranks = {part.rank for _, part in parts}
    count = content.parts
    return Candidate(
        name=name,
        content=content,
        durable=durable[1] if durable is not None else None,
        held=held,
        files={entry.basename: part.rank for _, part in parts for entry in part.content.files},
        in_memory=any(part.commits for _, part in parts) and (count == 1 or ranks >= set(range(count))),
        replicated=any(part.replicated for _, part in parts),
        committed=any(part.committed for _, part in parts),
    )


#: Payloads that a search for a payload skips: local checkpoints are further steps in memory, each loaded by the rank
#: that saved it. A full and a sharded one in one dirpath are one run's, which must not go back to the older one.
_PASSED_OVER: Mapping[str, tuple[Kind, ...]] = {"sharded": ("local",), "local": ("full", "sharded")}

_HOW_TO_LOAD: Mapping[Kind, str] = {
    "full": "load it by TieredCheckpointIO",
    "sharded": "load it by tiered_checkpoint_io.dcp or with a sharded strategy of this package, or make a full one of"
    " it: tiered-ckpt get",
    "local": "load it by tiered_checkpoint_io.dcp with kind='local'",
}


def refuse_other_kind(candidate: Candidate, accepts: Kind, dirpath: str, rejected: Mapping[str, str]) -> None:
    """Refuses a checkpoint whose payload the caller can't load, instead of going back to an older one.

    ``rejected`` has the ids of saves that were tried before it, and the reasons against them. Raises RestoreError.
    """
    kind = candidate.content.kind
    if kind != accepts:
        before = f"; before it: {'; '.join(rejected.values())}" if rejected else ""
        raise RestoreError(
            f"{candidate.name} is a {kind} checkpoint, not a {accepts} one{before}",
            rejected=rejected,
            operation="restore",
            key=ids.join_url(dirpath, candidate.name),
            step=candidate.content.step,
            hint=f"{_HOW_TO_LOAD[kind]}; or name the one that is meant",
            reason="other_kind",
        )


def _durable_contents(
    durable: Sequence[Manifest], selector: Selector, wanted: set[str]
) -> Iterable[tuple[str, Content]]:
    """Yields the names and contents that the objects of wanted manifests may hold."""
    by_name = {manifest.name: manifest for manifest in durable}
    for manifest in durable:
        if not (selector.wants(manifest.name) or manifest.name in wanted):
            continue
        # An alias follows its target, which may have been overwritten, and is none without it.
        target = by_name.get(manifest.alias_of) if manifest.alias_of else manifest
        if target is None or target.alias_of:
            continue
        for content in (target.content, *target.previous):
            yield target.name, content
