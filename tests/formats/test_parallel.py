"""The same work on many things: in order, by as many threads as are asked for, and over when it returns."""

from __future__ import annotations

import threading

import pytest
from support.tenants import no_more_threads

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


@pytest.mark.parametrize("work", [in_parallel, in_parallel_as_needed])
def test_one_thread_or_one_item_needs_no_other(work) -> None:
    here = threading.current_thread()
    assert work(lambda _: threading.current_thread(), range(3), 1) == [here] * 3
    assert work(lambda _: threading.current_thread(), [0], 8) == [here]
    assert work(lambda _: 0, [], 8) == []
    with no_more_threads():
        assert in_parallel(str, range(10), 4) == [str(number) for number in range(10)]


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
        # The thread works for a while after the failure.
        threading.Event().wait(0.05)
        ended.append(item)

    with pytest.raises(error):
        in_parallel(work, range(100), 2)
    assert sorted(begun) == [0, 1]
    assert len(ended) == 1
