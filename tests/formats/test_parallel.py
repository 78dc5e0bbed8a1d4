"""The same work on many things: in order, by as many threads as are asked for, and over when it returns."""

from __future__ import annotations

import threading

import pytest

from tiered_checkpoint_io.formats.parallel import in_parallel

_BOUND_S = 30


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
