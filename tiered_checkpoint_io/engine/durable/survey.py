"""The state of a durable tier, asked as little as possible: one list of the manifests, and a read of the new ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.document_cache import DocumentCache
from tiered_checkpoint_io.engine.durable.manifests import contents_of, manifest_cache
from tiered_checkpoint_io.errors import CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.model.retention import Checkpoint
from tiered_checkpoint_io.stores.base import Store


class RemovalAttempt(NamedTuple):
    """Result of an attempt to remove a checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        is_gone: True if it ceased to exist. Otherwise it is unchanged: saved again since, in use, or refused.
        refusal: Error of the server if it refused to remove something: of a checkpoint that is gone, some of the files.
    """

    checkpoint: Checkpoint
    is_gone: bool
    refusal: TieredCheckpointError | None = None


@dataclass(slots=True)
class Survey:
    """Knowledge of the sweep and of retention about a durable tier; no manifest is read twice unless it changes.

    Attributes:
        locked: Unnamed saves that the server refuses to remove.
        due: Time of the next sweep, by the monotonic clock.
        told: The error of the last sweep, as it was logged.
        unread: After :meth:`look`, the names whose manifests can't be understood: they stay.
        saves: After :meth:`look`, the saves that manifests name.
        refused: Checkpoints that the server refused to remove, and that were not reported yet.
        left_alone: Time until which the checkpoints of a step stay, as the server lately refused to remove one.
    """

    locked: set[str] = field(default_factory=set)
    due: float = -math.inf
    told: str = ""
    unread: dict[str, CorruptCheckpointError] = field(default_factory=dict)
    saves: set[str] = field(default_factory=set)
    refused: list[RemovalAttempt] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    left_alone: dict[int | str, float] = field(default_factory=dict)
    _manifests: DocumentCache[Manifest | None] = field(default_factory=manifest_cache)

    def manifests(self, store: Store, clock: Clock = SYSTEM) -> dict[str, Manifest | CorruptCheckpointError]:
        """Returns all manifests, by name: one list, and a read of the new ones.

        Raises:
            StoreError: The tier could not be read.
        """
        read = self._manifests.read(store, clock).items()
        named = {name: value for key, value in read if (name := ids.name_from_manifest_key(key)) is not None}
        # A reservation is None here.
        return {name: value for name, value in named.items() if value is not None}

    def look(self, store: Store, *, clock: Clock = SYSTEM) -> list[Checkpoint]:
        """Returns all checkpoints and aliases.

        Raises:
            StoreError: The tier could not be read.
        """
        read = self.manifests(store, clock)
        self.unread = {name: value for name, value in read.items() if isinstance(value, CorruptCheckpointError)}
        manifests = [value for value in read.values() if isinstance(value, Manifest)]
        self.saves = {each.save_id for each in contents_of(each for each in manifests if each.alias_of is None)}
        return [Checkpoint.of(each) for each in manifests]

    def leave_alone(self, attempt: RemovalAttempt, clock: Clock) -> None:
        """Remembers a checkpoint that the server refused to remove, so that the server is not asked each time."""
        # The other checkpoints of its step stay with it.
        self.left_alone[attempt.checkpoint.unit] = clock.monotonic() + clock.timing.refused_again_s
        if attempt.checkpoint.save_id not in self._known:
            self._known.add(attempt.checkpoint.save_id)
            self.refused.append(attempt)
