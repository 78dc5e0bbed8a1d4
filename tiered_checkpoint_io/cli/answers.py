"""Asks a durable tier, waits a limited time for its answers, and holds its lease for a command that writes there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from tiered_checkpoint_io.cli.output import printable, say
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.leasing import LeaseKeeper
from tiered_checkpoint_io.errors import ConfigError, StoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import QUIET
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store
from tiered_checkpoint_io.stores.retry import answer_within

_T = TypeVar("_T")
#: Beyond the time after which a lease counts as dead: for the looks at it.
_PATIENCE_S = 30.0
_LOOK_S = 0.2


def ask(config: TieredCheckpointConfig, work: Callable[[Store], _T], dirpath: str | None = None) -> _T:
    """Opens the durable tier of a configuration, or ``dirpath`` with its options, and runs ``work`` on the store.

    A silent server is shown every five seconds; after ``durable_timeout_s`` it is a StoreError.
    """
    where = printable(dirpath or config.dirpath)

    def asked() -> _T:
        with contextlib.closing(open_store(config, dirpath)) as store:
            return work(store)

    def count_down(silent_s: float, left_s: float) -> None:
        say(f"{where} has not answered for {silent_s:.0f} s; giving up in {left_s:.0f} s", err=True)

    return answer_within(config.support.durable_timeout_s, asked, what=where, count_down=count_down)


# ----------------------------------------------------------------------------------------- lease
@contextlib.contextmanager
def claimed(
    config: TieredCheckpointConfig, stop: threading.Event, dirpath: str | None = None, *, makes_room: bool = False
) -> Iterator[bool]:
    """Holds the lease in the block; yields True if held, False if ``stop`` was set before.

    ``makes_room`` is true if the block only deletes: without room for a lease, only other leases are checked. Raises
    ConfigError if a live run holds the lease, or may hold it and there is no room to ask.
    """
    store = open_store(config, dirpath)
    namespace = config.namespace if dirpath is None else ids.namespace_of(dirpath)
    # A command raises a lease's trouble instead of logging it.
    keeper = LeaseKeeper(lambda: store, namespace, QUIET, owner=SYSTEM.token(8), clock=SYSTEM)
    try:
        keeper.start()
        yield _waits(config, keeper, stop, store.url, makes_room=makes_room)
    finally:
        keeper.close(float(config.support.durable_timeout_s))
        store.close()


def _waits(
    config: TieredCheckpointConfig, keeper: LeaseKeeper, stop: threading.Event, store_url: str, *, makes_room: bool
) -> bool:
    began, is_said = SYSTEM.monotonic(), False
    while not keeper.is_held and not stop.is_set():
        keeper.check(_LOOK_S)
        failure, waited = keeper.failure, SYSTEM.monotonic() - began
        if makes_room and isinstance(failure, StoreError) and failure.reason == "full":
            if other := keeper.other_that_may_live():
                raise ConfigError(
                    f"{other} may use this dirpath, and there is no room to ask it",
                    operation="claim",
                    tier="durable",
                    key=f"{store_url}/{ids.LEASE_KEY}",
                    hint="end that run, which frees its lease; if it has died, remove the lease, and try again",
                )
            # Once there is room, it would ask a run that is no more able to write its own than we were.
            keeper.close(float(config.support.durable_timeout_s))
            break
        if isinstance(failure, TieredCheckpointError) and not failure.retryable:
            # No later try can succeed.
            raise failure
        if not is_said and waited > SYSTEM.timing.lease_poll_s and not keeper.is_held:
            say(f"watching for up to {SYSTEM.timing.lease_ttl_s:.0f} s whether another run is alive", err=True)
            is_said = True
        if waited > SYSTEM.timing.lease_ttl_s + max(_PATIENCE_S, config.support.durable_timeout_s):
            raise StoreError(
                "could not check whether another run uses this dirpath, so nothing was changed",
                operation="claim",
                key=store_url,
                hint="try again once the server answers",
                reason="unavailable",
            )
        SYSTEM.wait(stop, 0.0 if keeper.is_held else _LOOK_S)
    return not stop.is_set()
