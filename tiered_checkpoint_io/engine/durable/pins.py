"""Pins: small objects that keep checkpoints of the durable tier from being deleted, until they are removed or expire.

A delete looks for pins before it removes the manifest, and again before it removes any file; a pin looks for the
manifest after its own write. So where the two meet, the delete puts the manifest back, or the pin is refused.
"""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.document_cache import DocumentCache
from tiered_checkpoint_io.engine.durable.manifests import meant_by
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, ManifestError, PinnedError, UsageError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import dump, load, located, value_of
from tiered_checkpoint_io.model.numbers import seconds
from tiered_checkpoint_io.model.retention import Pin
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.refusals import Refusals

_MAX_REASON = 500


def pin(store: Store, name: str, *, reason: str = "", expires_s: float | None = None) -> Pin:
    """Pins a checkpoint; what it takes and raises is that of :func:`tiered_checkpoint_io.retention.pin`."""
    if expires_s is not None:
        expires_s = seconds("expires_s", expires_s, above=0)
    if not isinstance(reason, str):
        raise ConfigError(f"reason is {reason!r}", hint="allowed: text")
    if len(reason) > _MAX_REASON:
        raise ConfigError(f"the reason has {len(reason)} characters", hint=f"at most {_MAX_REASON}")
    manifest = meant_by(store, name, operation="pin", undone="nothing is pinned")
    if manifest.content.copy_of:
        raise UsageError(
            f"{name} is a copy, which the next save replaces",
            operation="pin",
            key=name,
            hint="pin the checkpoint that it is a copy of; tiered-ckpt ls shows which",
        )
    now = SYSTEM.wall()
    made = Pin(
        name=manifest.name,
        token=SYSTEM.token(8),
        save_id=manifest.settled.save_id,
        reason=reason,
        host=socket.gethostname(),
        created=now,
        expires=None if expires_s is None else now + expires_s,
    )
    key = ids.pin_key(made.name, made.token)
    store.put(key, dump(asdict(made)))
    try:
        meant_by(store, made.name, operation="pin", undone="nothing is pinned")
    except CheckpointNotFoundError:
        store.delete(key)
        raise
    return made


def unpin(store: Store, name: str, token: str | None = None) -> list[Pin]:
    """Removes the pins of a checkpoint, or the one with a token; gives those that are gone.

    Of an alias, as :func:`pin` does, those of what it stands for now. Nothing is deleted by this: what had to go
    without the pin goes at the next retention or prune.
    """
    held = pins_of(store, name)
    if not held:
        with contextlib.suppress(CheckpointNotFoundError):
            held = pins_of(store, meant_by(store, name, operation="unpin", undone="it has no pin").name)
    gone = [each for each in held if token in (None, each.token)]
    in_parallel(lambda each: store.delete(ids.pin_key(each.name, each.token)), gone)
    return gone


def pins(
    store: Store, cache: DocumentCache[Pin] | None = None, *, tidies: bool = True, clock: Clock = SYSTEM
) -> dict[str, list[Pin]]:
    """All pins that hold, by the names of their checkpoints: one list. Where it ``tidies``, expired ones are removed.

    One that can't be read counts as a pin without an end.
    """
    found: defaultdict[str, list[Pin]] = defaultdict(list)
    for each in _sorted_out(store, (cache or pin_cache()).read(store, clock), clock, tidies=tidies):
        found[each.name].append(each)
    return dict(found)


def pins_of(store: Store, name: str, *, clock: Clock = SYSTEM) -> list[Pin]:
    """The pins of one checkpoint; see :func:`pins`."""
    read = DocumentCache(ids.pins_prefix(name), _parse).read(store, clock)
    return [each for each in _sorted_out(store, read, clock) if each.name == name]


def refuse_pinned(store: Store, name: str, *, clock: Clock = SYSTEM) -> None:
    """Raises PinnedError where a checkpoint is pinned: one list."""
    held = pins_of(store, name, clock=clock)
    if held:
        longest = max(held, key=lambda each: (each.expires is None, each.expires or 0.0))
        raise PinnedError(
            f"{name} is {longest.text}",
            operation="delete",
            tier="durable",
            key=name,
            hint="it stays; once the pin is gone, the next retention or `tiered-ckpt prune` removes it",
        )


def pin_cache() -> DocumentCache[Pin]:
    """What reads all pins of a durable tier."""
    return DocumentCache(ids.PINS_PREFIX, _parse)


def _sorted_out(
    store: Store, read: Mapping[str, Pin | ManifestError], clock: Clock, *, tidies: bool = True
) -> Iterable[Pin]:
    """Those that hold; where it ``tidies``, the others are removed."""
    now = clock.wall()
    for key, value in read.items():
        name, _, last = key.removeprefix(ids.PINS_PREFIX).rpartition("/")
        # The key names the checkpoint; of a pin that can't be read, that is all that is known.
        unread = Pin(name, last.removesuffix(".json"), "", "a pin that can't be read", "?", 0.0)
        each = unread if isinstance(value, ManifestError) else replace(value, name=name, token=unread.token)
        if each.holds(now):
            yield each
        elif tidies:
            # One that can't be removed counts for nothing all the same.
            with Refusals().kept():
                store.delete(key)


def _parse(data: bytes, where: str) -> Pin:
    raw = load(data, where)
    with located(where):
        has_end = raw.get("expires") is not None
        return Pin(
            name=value_of(raw, "name", str),
            token=value_of(raw, "token", str),
            save_id=value_of(raw, "save_id", str),
            reason=value_of(raw, "reason", str, ""),
            host=value_of(raw, "host", str, ""),
            created=value_of(raw, "created", float, 0.0),
            expires=value_of(raw, "expires", float) if has_end else None,
        )
