"""The same work on many things: in order, by as many threads as are asked for, and over when it returns."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref

import pytest
from support.tenants import no_more_threads

from tiered_checkpoint_io.formats import parallel
from tiered_checkpoint_io.formats.parallel import in_parallel, in_parallel_as_needed

_BOUND_S = 30


def test_what_it_gives_is_in_order_whoever_ends_first() -> None:
    last = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert last.wait(_BOUND_S)
        elif item == 9:
            last.set()
        return item * item

    assert in_parallel(work, iter(range(10)), 2) == [item * item for item in range(10)]


@pytest.mark.parametrize("concurrency", [2, 3, 5])
def test_the_caller_is_one_of_the_threads(concurrency: int) -> None:
    # Passed only by as many threads as there are items, all at once.
    together = threading.Barrier(concurrency, timeout=_BOUND_S)

    def work(_: int) -> str:
        together.wait()
        return threading.current_thread().name

    names = in_parallel(work, range(concurrency), concurrency)
    assert len(set(names)) == concurrency
    assert threading.current_thread().name in names


def test_one_thread_or_one_item_needs_no_other() -> None:
    here = threading.current_thread()
    assert in_parallel(lambda _: threading.current_thread(), range(3), 1) == [here] * 3
    assert in_parallel(lambda _: threading.current_thread(), [0], 8) == [here]
    assert in_parallel(lambda _: 0, [], 8) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_here", [True, False], ids=["caller", "other"])
def test_a_failure_stops_what_has_not_begun_and_waits_for_the_rest(
    error: type[BaseException], fails_here: bool
) -> None:
    both, failed = threading.Barrier(2, timeout=_BOUND_S), threading.Event()
    begun: list[int] = []
    ended: list[int] = []
    here = threading.current_thread()

    def work(item: int) -> None:
        begun.append(item)
        both.wait()
        if (threading.current_thread() is here) == fails_here:
            failed.set()
            raise error(f"of {item}")
        assert failed.wait(_BOUND_S)
        # It works for a while after the failure.
        threading.Event().wait(0.05)
        ended.append(item)

    with pytest.raises(error):
        in_parallel(work, range(100), 2)
    assert sorted(begun) == [0, 1]
    assert len(ended) == 1


def test_without_further_threads_the_callers_does_it_all() -> None:
    with no_more_threads():
        assert in_parallel(str, range(10), 4) == [str(number) for number in range(10)]


def test_of_two_failures_the_first_in_order_is_raised() -> None:
    both = threading.Barrier(2, timeout=_BOUND_S)

    def work(item: int) -> None:
        both.wait()
        raise ValueError(item)

    with pytest.raises(ValueError, match="^0$"):
        in_parallel(work, range(2), 2)


def test_a_failure_keeps_nothing_alive() -> None:
    class Thing:
        pass

    def fail(thing: Thing) -> None:
        raise ValueError

    gc.disable()
    try:
        things = [Thing() for _ in range(4)]
        kept = [weakref.ref(thing) for thing in things]
        try:
            in_parallel(fail, things, 2)
        except ValueError:
            pass
        del things
        assert [each() for each in kept] == [None] * 4
    finally:
        gc.enable()


def test_threads_have_the_callers_context_and_do_not_change_it() -> None:
    bound: contextvars.ContextVar[int] = contextvars.ContextVar("bound", default=0)
    both = threading.Barrier(2, timeout=_BOUND_S)

    def work(item: int) -> int:
        both.wait()
        found = bound.get()
        bound.set(100 + item)
        return found

    bound.set(7)
    assert in_parallel(work, range(2), 2) == [7, 7]
    assert bound.get() == 7


class Work:
    """Work that notes how many do it at once; it waits for ``held`` where that is given."""

    def __init__(self, held=None):
        self.most = self.now = 0
        self._lock = threading.Lock()
        self._held = held

    def __call__(self, item):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if self._held is not None:
            self._held(self)
        with self._lock:
            self.now -= 1
        return -item


def test_few_threads_do_what_is_quickly_done_and_all_is_given_in_order():
    work = Work()
    assert in_parallel_as_needed(work, range(100), 16) == [-item for item in range(100)]
    assert work.most <= parallel._FEW


def test_more_threads_come_where_none_gets_done(monkeypatch):
    monkeypatch.setattr(parallel, "_SLOW_S", 0.01)
    full = threading.Event()

    def held(work):
        if work.now == 13:
            full.set()
        assert full.wait(60)

    work = Work(held)
    assert in_parallel_as_needed(work, range(40), 13) == [-item for item in range(40)]
    assert work.most == 13


def test_a_failure_stops_what_was_not_handed_out():
    begun = []

    def work(item):
        begun.append(item)
        if item == 5:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_parallel_as_needed(work, range(1000), 16)
    assert len(begun) < 1000


def test_what_is_little_is_not_handed_out():
    here = threading.get_ident()
    assert in_parallel_as_needed(lambda _: threading.get_ident(), [1], 16) == [here]
    assert in_parallel_as_needed(lambda item: item, [], 16) == []
