"""The same work on many things, by a few threads."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

#: Small requests to the durable tier in flight at once.
_REQUESTS = 8


def in_parallel(work: Callable[[_T], _R], items: Iterable[_T], concurrency: int = _REQUESTS) -> list[_R]:
    """Does ``work`` on each item, a few at a time; what it gave, in order.

    The first failure, or an interrupt, stops what has not begun; nothing runs any more when it is raised.
    """
    todo = list(items)
    if min(len(todo), concurrency) < 2:
        return [work(item) for item in todo]
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="tiered-parallel")
    try:
        # What the caller waits for, and how long, holds for its threads.
        jobs = [pool.submit(contextvars.copy_context().run, work, item) for item in todo]
        wait(jobs, return_when=FIRST_EXCEPTION)
    finally:
        pool.shutdown(cancel_futures=True)
    # What was cancelled had not begun, so it comes after what has failed.
    return [job.result() for job in jobs]
