"""Work on many things: by a few threads, and without the garbage collector."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Small requests to the durable tier in flight at once.
_REQUESTS = 8
#: Large reads in flight at once while the network is fast, and how long one may take without more being worth it.
_FEW, _SLOW_S = 4, 0.1


def in_parallel(
    work: Callable[[_T], _R], items: Iterable[_T], concurrency: int = _REQUESTS, *, as_needed: bool = False
) -> list[_R]:
    """Does ``work`` on each item, a few at a time; returns the results, in order.

    The caller's thread works as well: on two cores, a third thread that hands out the work and waits for it would take
    turns with them. After the first failure, or an interrupt, no further job begins; none runs any more when the error
    is raised.

    With ``as_needed``, for large reads, few threads begin, and their number doubles whenever none is done for a while:
    a distant server sends little on one connection, but a few connections to a near one fill the network.
    """
    todo = list(items)
    if min(len(todo), concurrency) < 2:
        return [work(item) for item in todo]
    left = deque(enumerate(todo))
    done: dict[int, _R] = {}
    failed: dict[int, BaseException] = {}
    over = threading.Event()

    def take(number: int = 0) -> None:
        patience = (number // _FEW).bit_length() if as_needed else 0
        while left and patience:
            before = len(done)
            over.wait(_SLOW_S)
            patience -= len(done) == before
        while left:
            try:
                index, item = left.popleft()
            except IndexError:
                # Another thread was faster.
                return
            try:
                done[index] = work(item)
            except BaseException as error:
                left.clear()
                failed[index] = error

    # The caller's question and its bound hold for its threads.
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(take, number), name=f"tiered-parallel-{number}")
        for number in range(1, min(len(todo), concurrency))
    ]
    try:
        # If the system allows no more, those that there are do it all.
        with contextlib.suppress(RuntimeError):
            for thread in threads:
                thread.start()
        contextvars.copy_context().run(take)
    finally:
        left.clear()
        over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failed:
        raise _taken(failed)
    return [done[index] for index in range(len(todo))]


def _taken(failed: dict[int, BaseException]) -> BaseException:
    """Returns the first error; kept, it would keep the frames of its traceback until the garbage collector comes."""
    error = failed[min(failed)]
    failed.clear()
    return error


#: One for each block that has switched the collector off, and is to switch it on again.
_off: list[None] = []


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Pauses the garbage collector in the block; it would look at all objects of the process several times."""
    enabled = gc.isenabled()
    _off.extend([None] * enabled)
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
            del _off[-1:]


def _collect_in_child() -> None:
    # The thread that would switch it on again is not there.
    if _off:
        _off.clear()
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)
