"""Asks a durable tier, and waits only so long for one that does not answer."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from tiered_checkpoint_io.cli.output import printable, say
from tiered_checkpoint_io.engine.drain.ending import GRACE_S
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store, open_store
from tiered_checkpoint_io.stores.silence import answer_within, moving

_T = TypeVar("_T")
#: The threads that asked, or still do.
_asking: set[threading.Thread] = set()


def is_waiting() -> bool:
    """Whether a question that was given up still waits for its answer."""
    return any(thread.is_alive() for thread in list(_asking))


def counter(operation: str, key: str, stop: threading.Event, shown: Callable[[int], None]) -> Callable[[int], None]:
    """Within :func:`ask`, what long work calls with the bytes that it has done; ends it where ``stop`` is set."""
    heard = moving()

    def count(amount: int) -> None:
        if stop.is_set():
            raise StoreError("interrupted", operation=operation, tier="durable", key=key)
        heard()
        shown(amount)

    return count


def ask(
    config: TieredCheckpointConfig,
    work: Callable[[Store], _T],
    dirpath: str | None = None,
    *,
    stop: threading.Event | None = None,
    quiet: bool = False,
) -> _T:
    """Opens the durable tier of a configuration, or another with its options, and asks it what ``work`` asks.

    Args:
        config: How to reach it.
        work: What to ask.
        dirpath: Another than the configured one.
        stop: Is set where this leaves before ``work`` has ended, which has a moment to clear up; SIGTERM ends it as
            Ctrl-C does.
        quiet: Whether nothing is shown while the server is silent.

    Raises:
        StoreUnavailableError: It was silent for ``durable_timeout_s``; every five seconds of that are shown.
        BaseException: What ``work`` raises.
    """

    def open_and_ask() -> _T:
        with contextlib.closing(open_store(config, dirpath)) as store:
            return work(store)

    return answer(config, dirpath or config.dirpath, open_and_ask, stop=stop, quiet=quiet)


def answer(
    config: TieredCheckpointConfig,
    where: str,
    work: Callable[[], _T],
    *,
    stop: threading.Event | None = None,
    quiet: bool = False,
) -> _T:
    """What ``work`` gives, which asks the durable tier ``where``; raises as :func:`ask` does."""
    where = printable(where)

    def noted() -> _T:
        _asking.add(threading.current_thread())
        try:
            return work()
        finally:
            _asking.discard(threading.current_thread())

    def count_down(silent_s: float, left_s: float) -> None:
        say(f"{where} has not answered for {silent_s:.0f} s; giving up in {left_s:.0f} s", err=True)

    patience_s, shown = config.support.durable_timeout_s, None if quiet else count_down
    if stop is None:
        return answer_within(patience_s, noted, what=where, count_down=shown)
    # By SIGTERM schedulers end a job, which then must leave nothing.
    with raising(KeyboardInterrupt):
        try:
            return answer_within(patience_s, noted, what=where, count_down=shown)
        except BaseException:
            stop.set()
            for thread in list(_asking):
                thread.join(GRACE_S)
            raise


@contextlib.contextmanager
def raising(exception: type[BaseException]) -> Iterator[None]:
    """A block in which SIGTERM raises an exception; off the main thread, where Python can't, does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise exception

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
