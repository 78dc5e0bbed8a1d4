"""Preflight: tries the needs of a training's saves before its first batch, within a few seconds.

First come the tries, then a judgement that is pure. A permanent problem is an error, unless node memory holds a
checkpoint to resume from and a restart can do without the durable tier. A transient problem is a warning.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.ranks.coordination import node_of
from tiered_checkpoint_io.engine.restore.catalog import DurableCatalog, discover, look, queued_aliases, tiers_of
from tiered_checkpoint_io.engine.restore.choice import Candidate, Catalog, Selector, choose
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError, MemoryTierError, StoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.node import MemoryFullError, node_budget
from tiered_checkpoint_io.memory.tier import AUTO, spill_dir_of
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store
from tiered_checkpoint_io.stores.retry import answer_within

_T = TypeVar("_T")


class Need(NamedTuple):
    """Needs of a training's saves, as far as known before the training begins.

    ``node_bytes`` is the least size of a checkpoint in one node's memory: parameters and buffers. ``file_bytes``
    estimates its largest file, with optimizers.
    """

    node_bytes: int
    file_bytes: int
    memory_steps: bool
    durable_steps: bool


class Room(NamedTuple):
    """Largest space for one checkpoint in memory and in the spill, bytes; the user may have named the spill."""

    memory: int
    spill: int
    spill_is_named: bool
    spill_is_refused: bool = False


class Problem(NamedTuple):
    """Problem that preflight found; ``permanent`` if no retry can solve it.

    A training that continues has the ``consequence``, and does not continue ``unless`` that is so. With
    ``stops_restarts``, a restart fails for it, even with a checkpoint in node memory.
    """

    error: TieredCheckpointError
    permanent: bool
    consequence: str
    unless: str = ""
    stops_restarts: bool = False


def preflight(session: Session, need: Need) -> None:
    """Tries the needs of saves; only rank 0 calls this, before the first batch. Does nothing if preflight is off.

    Raises:
        StoreError: The durable tier refuses requests of saves, or does not exist as configured.
        ConfigError: The client library for the durable tier is missing.
        MemoryTierError: The memory tier can't be used, or no checkpoint can be saved because it is too small.
    """
    config = session.config
    if config.preflight == "off":
        return
    problems: list[Problem] = []
    holds = False
    try:
        held = tiers_of(session, config).memory.held()
        holds = any(stored.part.place == session.place and stored.part.content.resumable for stored in held)
        problems += judge_room(need, room_of(config), config)
    except MemoryTierError as error:
        full = isinstance(error, MemoryFullError)
        problems.append(Problem(error, not full, "saves fail until that is mended, and each failure is logged"))
    except OSError as error:
        session.log.warning("preflight could not look at node memory: %s", error)
    # A checkpoint of one part is one request, a larger one several.
    multipart = need.file_bytes > config.chunk_size_MB << 20
    problems += judge_store(try_durable(config, session.clock, multipart=multipart), config)
    stopping = next((each for each in problems if each.permanent and (each.stops_restarts or not holds)), None)
    if stopping is not None and config.preflight == "error":
        raise _refusal(stopping.error)
    for each in problems:
        # A restart does without credentials, or a right to write, only if all nodes find it in memory.
        reason = each.unless if each.permanent or not holds else ""
        if each.permanent and config.preflight == "error":
            reason = ", because node memory holds a checkpoint to resume from" + each.unless
        session.log.warning("preflight: %s; training continues%s: %s", each.error, reason, each.consequence)


def newest(session: Session) -> Candidate | None:
    """Returns the candidate of ``tiered:latest``, as far as this rank sees; ignores a durable tier in trouble.

    The session's saves come after all that is seen, independently of this machine's clock.
    """
    selector = Selector("latest")
    tiers = replace(tiers_of(session, session.config), on_listed=lambda _: None)
    here = look(tiers, 0)
    aliases = queued_aliases([here])

    def ask(store: Store) -> DurableCatalog:
        return discover(replace(tiers, store=lambda: store), selector, aliases)

    found = DurableCatalog()
    with contextlib.suppress(TieredCheckpointError):
        found = _asked(session.config, session.clock, ask)
    for manifest in found.manifests:
        session.save_ids.follow(manifest.content.save_id)
    node = node_of(tiers.memory.root)
    catalog = Catalog({node: here.held}, found.manifests, aliases)
    # Local checkpoints are not this training's.
    return next(iter(choose(catalog, selector, "sharded", replicas=True)), None)


# ----------------------------------------------------------------------------------- judgement
def judge_store(failures: Sequence[TieredCheckpointError], config: TieredCheckpointConfig) -> list[Problem]:
    """Returns the problem, if any, that requests to the durable tier failed."""
    if not failures:
        return []
    first = next((each for each in failures if not each.retryable), failures[0])
    text = "; ".join(dict.fromkeys(each.message for each in failures))
    text += "".join(f"; {each.key} may stay there" for each in failures if each.operation == "delete")
    operations = ", ".join(dict.fromkeys(each.operation or "preflight" for each in failures))
    key = first.key or config.dirpath
    # Keys of stores of files are relative.
    key = key if key.startswith(config.dirpath) else ids.join_url(config.dirpath, key)
    error = first.reworded(text, operation=operations, tier="durable", key=key)
    consequence = (
        "what needs this fails until it is fixed, and each failed upload is reported again at the next save"
        if not first.retryable
        else f"a save waits at most {config.support.pending_timeout_s} s for the durable tier; after that"
        " its checkpoint stays in node memory"
    )
    # The restore comes after this, and never takes silence for an empty tier.
    unless = ", unless ckpt_path needs an answer from there"
    # The restore does the same: a refused read is not skipped, unless credentials are missing.
    refused = (each for each in failures if not each.retryable and each.reason != "credentials")
    stops = any(
        isinstance(each, ConfigError) or each.reason == "config" or each.operation in ("list", "get")
        for each in refused
    )
    return [Problem(error, not first.retryable, consequence, unless, stops)]


def judge_room(need: Need, room: Room, config: TieredCheckpointConfig) -> list[Problem]:
    """Returns a problem if not even the weights fit into empty memory and an empty spill.

    Also if the spill that the user named can't be used, even if it is not needed.
    """
    if room.spill_is_refused:
        refused = MemoryTierError(
            f"spill_dir is {config.spill_dir}, where this user may not write",
            operation="save",
            key=config.spill_dir,
            hint="make the folder, with the rights of the user that trains; or set spill_dir to null",
        )
        return [Problem(refused, True, "nothing is spilled: what memory has no room for is skipped, or fails")]
    if need.node_bytes <= room.memory or (room.spill_is_named and need.node_bytes <= room.spill):
        return []
    fits = need.node_bytes <= room.spill
    consequences = ["steps of memory alone are skipped"] * need.memory_steps
    if not fits and need.durable_steps:
        consequences.append("durable saves fail")
    if not consequences:
        return []
    error = MemoryFullError(
        f"parameters and buffers alone take {size_text(need.node_bytes)}; memory can hold {size_text(room.memory)}"
        f" and the spill {size_text(room.spill)}",
        operation="save",
        tier="memory",
        key=config.memory_dir,
        hint="give memory_dir more space (docker: --shm-size), raise memory_allocation_percentage, or name a spill_dir",
    )
    # Durable saves go through the spill.
    return [Problem(error, not (fits and need.durable_steps), " and ".join(consequences))]


def _refusal(error: TieredCheckpointError) -> TieredCheckpointError:
    """Returns the error that is raised for a problem."""
    hint = "; ".join(
        filter(None, [error.hint, "to train from scratch all the same, set preflight: warn, and leave ckpt_path out"])
    )
    return error.reworded(f"preflight: {error.message}", hint=hint)


# ---------------------------------------------------------------------------------------- tries
def try_durable(config: TieredCheckpointConfig, clock: Clock, *, multipart: bool) -> list[TieredCheckpointError]:
    """Returns the reason why requests to the durable tier failed; empty if none did."""
    key = ids.PREFLIGHT_PREFIX + clock.token(8)
    try:
        return _asked(config, clock, lambda store: try_requests(store, key, multipart=multipart))
    except TieredCheckpointError as error:
        return [error]


def _asked(config: TieredCheckpointConfig, clock: Clock, ask: Callable[[Store], _T]) -> _T:
    """Returns the result of ``ask`` on the durable tier; each request is sent once.

    Without an answer within ``preflight_s`` seconds, this raises StoreError, and the request ends by itself, later.
    """
    seconds = clock.timing.preflight_s
    bounds = replace(
        clock.timing,
        s3_connect_s=min(seconds, clock.timing.s3_connect_s),
        s3_read_s=min(seconds, clock.timing.s3_read_s),
        # The deadline is over before the first attempt is.
        retry_deadline_s=-1.0,
    )

    def run() -> _T:
        # A program that gives credentials may be as silent as a server.
        with contextlib.closing(open_store(config, clock=Clock(bounds, clock.rng))) as store:
            return ask(store)

    try:
        return answer_within(seconds, run, clock=clock)
    except TieredCheckpointError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise StoreError(text, operation="preflight", key=config.dirpath, reason="unavailable") from error


def room_of(config: TieredCheckpointConfig) -> Room:
    """Returns the capacity of this node's memory and spill, by their file systems' sizes: others may leave again."""
    spill_dir, spill = spill_dir_of(config.spill_dir), 0
    is_named, is_refused = config.spill_dir not in (AUTO, None), False
    if spill_dir is not None:
        # Path.exists raises for a folder that may not be entered.
        folder = next(each for each in (Path(spill_dir), *Path(spill_dir).parents) if os.path.exists(each))
        is_refused = is_named and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK))
        facts = os.statvfs(folder)
        spill = facts.f_blocks * facts.f_frsize // (2 if config.spill_dir == AUTO else 1)
    memory = node_budget(config.memory_allocation_percentage, config.memory_dir)
    return Room(memory, spill, is_named, is_refused)


def try_requests(store: Store, key: str, *, multipart: bool) -> list[TieredCheckpointError]:
    """Sends each kind of request that saves, loads and deletes need once; returns the errors of the failed ones.

    After a refused one the others are sent as well, so that all missing rights are known at once. With ``multipart``,
    they begin an upload in parts, and end it, if the store has such.
    """
    failures: list[TieredCheckpointError] = []
    content = key.encode()

    def done(request: Callable[[], object]) -> bool:
        try:
            request()
        except TieredCheckpointError as error:
            failures.append(error)
            return False
        return True

    def read_back() -> None:
        if store.get(key) != content:
            raise StoreError("an object that was just written has another content", operation="get", key=key)

    if not done(lambda: next(iter(store.list(ids.PREFLIGHT_PREFIX)), None)) and not _lacks_a_right(failures):
        return failures
    if not done(lambda: store.put(key, content)) and not failures[-1].retryable:
        return failures
    # If there was no answer, it may have been written.
    if not failures or _lacks_a_right(failures):
        done(read_back)
        begin = getattr(store, "try_multipart", None)
        if multipart and begin is not None:
            done(lambda: begin(key))
    done(lambda: store.delete(key))
    return failures


def _lacks_a_right(failures: Sequence[TieredCheckpointError]) -> bool:
    return all(isinstance(error, StoreError) and error.is_denied for error in failures)
