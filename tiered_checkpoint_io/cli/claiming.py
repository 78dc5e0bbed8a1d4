"""Holds the lease of a dirpath for a command that writes there, as a run does, so that neither meets the other."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from tiered_checkpoint_io.cli.output import say
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.leasing.lease_keeper import LeaseKeeper
from tiered_checkpoint_io.errors import StoreFullError, StoreUnavailableError, TieredCheckpointError, UsageError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

#: Beyond the time after which a lease counts as dead: for the looks at it.
_PATIENCE_S = 30.0
_LOOK_S = 0.2


@contextlib.contextmanager
def claimed(
    config: TieredCheckpointConfig, stop: threading.Event, dirpath: str | None = None, *, makes_room: bool = False
) -> Iterator[bool]:
    """A block that holds the lease; gives whether it does: it does not where ``stop`` was set before.

    Args:
        config: How to reach the durable tier.
        stop: Ends the wait.
        dirpath: Another than the configured one.
        makes_room: Whether the block only deletes: where there is no room for a lease, it then goes by those of others.

    Raises:
        UsageError: A live run holds it, or may hold it and there is no room to ask.
        StoreError: The tier does not answer, or refuses.
    """
    store = open_store(config, dirpath)
    namespace = config.namespace if dirpath is None else ids.namespace_of(dirpath)
    keeper = LeaseKeeper(lambda: store, namespace, _quiet(), owner=SYSTEM.token(8), clock=SYSTEM)
    try:
        keeper.start()
        yield _waits(config, keeper, stop, store.url, makes_room=makes_room)
    finally:
        keeper.close(float(config.support.durable_timeout_s))
        store.close()


def _waits(
    config: TieredCheckpointConfig, keeper: LeaseKeeper, stop: threading.Event, store_url: str, *, makes_room: bool
) -> bool:
    began, told = SYSTEM.monotonic(), False
    while not keeper.is_held and not stop.is_set():
        keeper.check(_LOOK_S)
        failure, waited = keeper.failure, SYSTEM.monotonic() - began
        if makes_room and isinstance(failure, StoreFullError):
            _refuse_others(keeper, store_url)
            # Once there is room, it would ask a run that is no more able to write its own than we were.
            keeper.close(float(config.support.durable_timeout_s))
            break
        if isinstance(failure, TieredCheckpointError) and not failure.retryable:
            # No later try mends it.
            raise failure
        if not told and waited > SYSTEM.timing.lease_poll_s and not keeper.is_held:
            say(f"watching for up to {SYSTEM.timing.lease_ttl_s:.0f} s whether another run is alive", err=True)
            told = True
        if waited > SYSTEM.timing.lease_ttl_s + max(_PATIENCE_S, config.support.durable_timeout_s):
            raise StoreUnavailableError(
                "could not check whether another run uses this dirpath, so nothing was changed",
                operation="claim",
                key=store_url,
                hint="try again once the server answers",
            )
        SYSTEM.wait(stop, 0.0 if keeper.is_held else _LOOK_S)
    return not stop.is_set()


def _refuse_others(keeper: LeaseKeeper, store_url: str) -> None:
    other = keeper.may_be_alive()
    if other is not None:
        raise UsageError(
            f"{other.who} may use this dirpath, and there is no room to ask it",
            operation="claim",
            tier="durable",
            key=f"{store_url}/{other.key}",
            hint="end that run, which removes its lease; where it has died, remove the lease, and try again",
        )


def _quiet() -> logging.Logger:
    """What a lease has to say is raised here."""
    log = logging.getLogger("tiered_checkpoint_io.claiming")
    log.propagate = False
    log.addHandler(logging.NullHandler())
    return log
