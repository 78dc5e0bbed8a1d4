"""For programs other than the training: a list of checkpoints, the latest one, and new durable ones.

Each call waits 15 s at most for a silent server. The module reads no checkpoint's bytes, and does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.sweep import hold, release
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StoreError,
    seconds,
)
from tiered_checkpoint_io.inventory.rows import CheckpointInfo, Tiers
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_log = logging.getLogger("tiered_checkpoint_io.inventory")
#: Interval at which programs look by default, seconds: one list of a small prefix each time.
EVERY_S = 10.0


def list_checkpoints(
    dirpath: str | os.PathLike[str], *, memory_dir: str | None = None, **options: Any
) -> list[CheckpointInfo]:
    """Returns all checkpoints of a durable tier: the latest save first, unreadable ones last.

    Args:
        dirpath: The durable tier: an S3 URL, any fsspec URL, or a directory.
        memory_dir: Folder of this node's memory, mostly ``/dev/shm``, to list its checkpoints too. None for only the
            durable tier.
        options: Configuration that the durable tier needs: ``endpoint_url``, ``region``, ``profile``, ``s3_options``.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at all at this dirpath.
        ConfigError: A value is not allowed, or there is no such memory_dir.
        StoreError: The durable tier could not be read.
    """
    config = TieredCheckpointConfig.from_any(dirpath=dirpath, **options)
    with contextlib.closing(Tiers(config, memory_dir)) as tiers:
        return tiers.ask(tiers.look).checkpoints


def find_latest(
    dirpath: str | os.PathLike[str], *, memory_dir: str | None = None, **options: Any
) -> CheckpointInfo | None:
    """Returns the checkpoint that ``tiered:latest`` means: the latest save (not the greatest step) to resume from.

    Args:
        dirpath: The durable tier, as for :func:`list_checkpoints`.
        memory_dir: With it, a checkpoint that only this node's memory has counts as well.
        options: Options of the durable tier.

    Returns:
        The checkpoint; None if there is none, also for an empty dirpath.

    Raises:
        CorruptCheckpointError: A newer release wrote a checkpoint, which may be the latest.
        ConfigError: See :func:`list_checkpoints`.
        StoreError: See :func:`list_checkpoints`.
    """
    try:
        found = list_checkpoints(dirpath, memory_dir=memory_dir, **options)
    except CheckpointNotFoundError:
        return None
    for each in found:
        if each.state == "newer_release":
            raise CorruptCheckpointError(
                each.problem, operation="find", key=each.url, hint="update this package", reason="format"
            )
    return next((each for each in found if each.is_latest), None)


def new_checkpoints(
    dirpath: str | os.PathLike[str],
    *,
    after: str | None = None,
    idle_timeout_s: float | None = None,
    stop: threading.Event | None = None,
    every_s: float = EVERY_S,
    clock: Clock = SYSTEM,
    **options: Any,
) -> Iterator[CheckpointInfo]:
    """Yields each checkpoint that becomes durable, once, in the order of the saves.

    An alias or a copy, such as ``last.ckpt``, is not yielded besides its original. A checkpoint that becomes durable
    only after a later save is yielded then. A yielded checkpoint can't be deleted until the next one is asked for, for
    a day at most; one that was deleted or overwritten before its turn is left out.

    Args:
        dirpath: The durable tier; it need not exist yet.
        after: Start: the greatest ``save_id`` that was processed before a restart; "" for all that exist. None for
            checkpoints that become durable from now on.
        idle_timeout_s: Seconds without a new one, after which this ends; None for never.
        stop: End when this is set.
        every_s: Interval between looks, seconds.
        clock: For all waits.
        options: Options of the durable tier, as for :func:`list_checkpoints`.

    Raises:
        ConfigError: A value is not allowed; or ``after`` is no save id; or a time is no number of seconds.
        StoreError: The durable tier refuses, or is unreachable at the first look; later, one line is logged, and the
            look is repeated.
    """
    # Here, and not at the first step of the iterator: an error of the call is raised by the call.
    if after not in (None, "") and not (isinstance(after, str) and ids.is_save_id(after.strip())):
        raise ConfigError(f"after is {after!r}", hint="allowed: the save_id of a checkpoint, '' for all, or None")
    every_s = seconds("every_s", every_s, above=0)
    if idle_timeout_s is not None:
        idle_timeout_s = seconds("idle_timeout_s", idle_timeout_s)
    tiers = Tiers(TieredCheckpointConfig.from_any(dirpath=dirpath, **options), clock=clock)
    return NewCheckpoints(tiers, after, _log.warning).each(every_s, idle_timeout_s, stop or threading.Event())


class NewCheckpoints:
    """Finds each durable save once: a further name, an alias or a copy, is not new."""

    def __init__(self, tiers: Tiers, after: str | None, warn: Callable[[str], object]) -> None:
        """Begins after the save ``after``, "" for all; None for checkpoints that the first look does not find."""
        self._tiers = tiers
        self._after = after
        self._warn = warn
        self._seen: set[str] = set()
        self._has_answered, self._trouble = False, ""

    def each(
        self, every_s: float, idle_timeout_s: float | None, stop: threading.Event
    ) -> Generator[CheckpointInfo, None, None]:
        """Yields the checkpoints as :func:`new_checkpoints` does."""
        clock = self._tiers.clock
        last = clock.monotonic()
        with contextlib.closing(self._tiers):
            while not stop.is_set():
                for each in self._new():
                    with self._held(each) as is_there:
                        if is_there:
                            yield each
                    last = clock.monotonic()
                    if stop.is_set():
                        return
                left = every_s if idle_timeout_s is None else min(every_s, last + idle_timeout_s - clock.monotonic())
                if left <= 0:
                    return
                clock.wait(stop, left)

    def _new(self) -> list[CheckpointInfo]:
        """Returns the new checkpoints of a look, in the order of their saves."""
        first: dict[str, CheckpointInfo] = {}
        # The checkpoint itself comes before its copies and aliases, which replace it if it is gone.
        for each in sorted(self._look(), key=lambda each: (each.order[0], not each.order[1], each.name)):
            if each.state == "durable" and "durable" in each.where:
                first.setdefault(each.order[0], each)
        begins, after = self._after is None, self._after or ""
        self._after = after
        new = [each for save, each in first.items() if save not in self._seen and save > after and not begins]
        # Checkpoints that this look did not find may only be hidden, such as while a file system is mounted again.
        self._seen |= set(first)
        return new

    def _look(self) -> list[CheckpointInfo]:
        """Returns the checkpoints; none while a tier that has answered before is unreachable, which is said once."""
        found, trouble, said = list[CheckpointInfo](), "", ""
        try:
            found = self._tiers.ask(self._tiers.look).checkpoints
        except CheckpointNotFoundError as error:
            then = "any more; asking again" if self._seen else "yet; waiting for the first checkpoint"
            trouble, said = "nothing", f"there is nothing at {error.key} {then}"
        except StoreError as error:
            if error.reason != "unavailable" or not self._has_answered:
                raise
            trouble, said = "silent", f"{error}; asking again"
        self._has_answered = True
        # An error's text may change from look to look.
        if trouble not in ("", self._trouble):
            self._warn(said)
        self._trouble = trouble
        return found

    @contextlib.contextmanager
    def _held(self, each: CheckpointInfo) -> Iterator[bool]:
        """Keeps a checkpoint from being deleted in the block; yields True if it is still there."""
        name, key = each.alias_of or each.name, None
        try:
            key = self._tiers.ask(lambda store: hold(store, name, each.save_id))
        except CheckpointNotFoundError:
            # If it was overwritten, the new checkpoint has a turn of its own.
            self._warn(f"{each.name} was deleted or overwritten before its turn came, and is left out")
            yield False
            return
        except StoreError as error:
            self._warn(f"{name} is not held, and may be deleted during the work on it: {error}")
        try:
            yield True
        finally:
            if key is not None:
                try:
                    self._tiers.ask(lambda store: release(store, key))
                except StoreError as error:
                    self._warn(f"{name} stays held, for a day at most: {error}")


__all__ = ["CheckpointInfo", "find_latest", "list_checkpoints", "new_checkpoints"]
