"""The same work on many things, by a few threads."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Small requests to the durable tier in flight at once.
_REQUESTS = 8
#: Large reads in flight at once while the network is fast, and how long one may take without more being worth it.
_FEW, _SLOW_S = 4, 0.1


def in_parallel(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int = _REQUESTS) -> list[_R]:
    """Does ``work`` on each item, a few at a time; returns the results, in order.

    The caller's thread works as well: on two cores, a third thread that hands out the work and waits for it would take
    turns with them. After the first failure, or an interrupt, no further job begins; none runs any more when the error
    is raised.
    """
    todo = list(items)
    if min(len(todo), concurrency) < 2:
        return [work(item) for item in todo]
    left = deque(enumerate(todo))
    done: dict[int, _R] = {}
    failed: dict[int, BaseException] = {}

    def take() -> None:
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
        threading.Thread(target=contextvars.copy_context().run, args=(take,), name=f"tiered-parallel-{number}")
        for number in range(1, min(len(todo), concurrency))
    ]
    begun: list[threading.Thread] = []
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:
                # The system allows no more: those that there are do it all.
                break
            begun.append(thread)
        contextvars.copy_context().run(take)
    finally:
        left.clear()
        for thread in begun:
            thread.join()
    if failed:
        error = failed[min(failed)]
        # Or else it would keep the frames of its traceback until the garbage collector comes.
        failed.clear()
        try:
            raise error
        finally:
            del error
    return [done[index] for index in range(len(todo))]


def in_parallel_as_needed(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int) -> list[_R]:
    """Does :func:`in_parallel` for large reads: with few threads at first, and more as long as none is done.

    A distant server sends little on one connection. A few connections to a near server fill the network, and more
    threads only wait for the interpreter.
    """
    todo = list(items)
    if min(len(todo), concurrency) <= _FEW:
        return in_parallel(work, todo, concurrency)
    left, allowed = iter(todo), _FEW
    jobs: list[Future[_R]] = []
    running: set[Future[_R]] = set()
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="tiered-parallel")
    try:
        while len(jobs) < len(todo) or running:
            for item in islice(left, allowed - len(running)):
                jobs.append(pool.submit(contextvars.copy_context().run, work, item))
                running.add(jobs[-1])
            done, running = wait(running, timeout=_SLOW_S, return_when=FIRST_COMPLETED)
            if any(job.exception() is not None for job in done):
                break
            if not done:
                allowed = min(2 * allowed, concurrency)
    finally:
        pool.shutdown(cancel_futures=True)
    return [job.result() for job in jobs]
