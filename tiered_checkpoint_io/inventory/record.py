"""One checkpoint in a listing, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Content, Kind, Metric
from tiered_checkpoint_io.redaction import without_secrets

CheckpointState = Literal["durable", "memory_only", "waiting", "uploading", "incomplete", "corrupt", "newer_release"]
Tier = Literal["memory", "spill", "replicas", "durable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint, as a look at the tiers found it.

    Attributes:
        name: Its path relative to dirpath. Of a damaged part whose name can't be read, the part's folder.
        url: Where it lies on the durable tier, or will lie: dirpath and name.
        dirpath: The durable tier that it belongs to.
        save_id: Which save made it; as text, ids sort in the order of the saves. "" where it is not known.
        state: ``durable``: committed on the durable tier. ``memory_only``: in node memory, and not to be uploaded.
            ``waiting``, ``uploading``: in node memory, on its way to the durable tier. ``incomplete``: a part of it is
            on the durable tier; other nodes are uploading it, or it never became complete; or, where the durable tier
            was not asked, only that can tell whether it did. ``corrupt``: it can't be read, or was found damaged, and
            no intact copy is known. ``newer_release``: a newer release of this package wrote it.
        where: The tiers that have it, or parts of it, without those that are known to be damaged. ``memory``: this
            node's; ``spill``: on its disk; ``replicas``: kept for other nodes.
        step: The training step; None where it is not known. So is the epoch.
        epoch: The epoch.
        metric: What ModelCheckpoint monitored when it saved: ``monitor`` and ``value``; None where it did not.
        size_bytes: Bytes of all its files; where the durable tier does not have it, of the parts on this node.
        created: When it was saved, by the writer's clock (UTC); None where it is not known.
        kind: ``full``, ``sharded`` or ``local``; None where it is not known.
        resumable: Whether training can resume from it.
        is_latest: Whether ``tiered:latest`` means this one, of what was found.
        alias_of: For an alias, the name that it stands for.
        copy_of: For a copy, the id of the save that made its bytes.
        parts: How many parts it has; 0 where that is not known.
        parts_here: How many of them this node's memory has.
        problem: What is wrong with it, or with one copy of it; "" where nothing is known to be.
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
        """Sorts in the order of the saves; a copy, or an alias, comes right before what it stands for."""
        return self.copy_of or self.save_id, not (self.copy_of or self.alias_of)


def info(name: str, dirpath: str, content: Content, *, state: CheckpointState, **more: Any) -> CheckpointInfo:
    """The record of a checkpoint of which a content is known; ``more`` are further fields."""
    facts: Mapping[str, Any] = {
        "save_id": content.save_id,
        "step": ids.known(content.step),
        "epoch": ids.known(content.epoch),
        "metric": content.metric,
        "size_bytes": content.size,
        "created": time_of(content.created),
        "kind": content.kind,
        "resumable": content.resumable,
        "copy_of": content.copy_of or None,
        "parts": content.parts,
    }
    return CheckpointInfo(name=name, url=url_of(dirpath, name), dirpath=dirpath, state=state, **{**facts, **more})


def url_of(dirpath: str, name: str) -> str:
    """Where a checkpoint lies on the durable tier, without secrets."""
    return without_secrets(ids.join_url(dirpath, name))


def time_of(seconds: float) -> datetime | None:
    """A time in seconds since the epoch; None where there is no such time: the writer's clock said so."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def iso(when: datetime | float | None) -> str | None:
    """A time as ISO 8601 in UTC, to the millisecond."""
    when = time_of(when) if isinstance(when, float) else when
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z") if when is not None else None
