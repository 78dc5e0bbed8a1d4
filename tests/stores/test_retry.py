"""Retry decides only by the error, is bounded, counts, and can be cut short."""

import contextlib
import errno
import functools
import gc
import os
import threading
import time
import weakref

import pytest
from support.clocks import VirtualClock, quick
from support.failing import failing

from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import Metrics
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.stores.retry import Progress, Retry

AWAY = functools.partial(StoreError, reason="unavailable")


class Flaky:
    def __init__(self, failures, error=AWAY):
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return "done"


QUICK = quick(retry_first_wait_s=0.001, retry_max_wait_s=0.01)


def test_what_may_pass_is_repeated_and_counted(caplog):
    metrics, flaky = Metrics(), Flaky(5)
    assert Retry(metrics, QUICK)(flaky) == "done"
    assert flaky.calls == 6
    assert metrics.snapshot() == {"retries": 5, "answers": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("kind", [StoreError, StoreNotFoundError, ValueError])
def test_what_will_not_pass_is_raised_at_once(kind):
    metrics, flaky = Metrics(), Flaky(1, kind)
    with pytest.raises(kind, match="failure 1"):
        Retry(metrics, QUICK)(flaky)
    assert flaky.calls == 1
    assert metrics.snapshot() == {"answers": 1}


def test_the_deadline_ends_it_with_the_last_error():
    flaky = Flaky(10**9)
    begun = time.monotonic()
    with failing("unavailable") as caught:
        Retry(Metrics(), quick(retry_deadline_s=0.2, retry_first_wait_s=0.001))(flaky)
    assert 0.2 <= time.monotonic() - begun < 10
    assert caught.value.message == f"failure {flaky.calls}"
    assert flaky.calls > 2


def test_a_long_first_attempt_may_be_repeated_too():
    """Sending one part can take longer than the deadline; the deadline is for the failures."""
    moments = iter([0.3, 0.0])
    flaky = Flaky(1)

    def slow():
        time.sleep(next(moments))
        return flaky()

    assert Retry(Metrics(), quick(retry_deadline_s=0.1, retry_first_wait_s=0.001))(slow) == "done"


def test_a_wait_can_be_cut_short():
    cancelled, flaky = threading.Event(), Flaky(10**9)

    def fail_then_cancel():
        threading.Timer(0.05, cancelled.set).start()
        return flaky()

    with failing("unavailable", match="failure 1"):
        Retry(Metrics(), VirtualClock())(fail_then_cancel, cancelled=cancelled)
    assert flaky.calls == 1


def test_progress_tells_no_byte_twice():
    seen = []
    progress = Progress(seen.append)
    for attempt in ([4, 3], [4], [4, 3, 3]):
        progress.restart()
        for count in attempt:
            progress.add(count)
    assert sum(seen) == 10


@pytest.mark.parametrize("error", [None, StoreNotFoundError])
def test_what_a_call_and_its_error_hold_is_free_at_once(error):
    """The collector, which may come late, is not needed."""

    class Held:
        pass

    def ask():
        held = Held()

        def call():
            assert held
            if error is not None:
                raise error("x")

        with contextlib.suppress(StoreError):
            Retry(Metrics())(call)
        return weakref.ref(held)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_an_upload_to_a_directory_that_was_interrupted_is_repeated_and_told_once(tmp_path, monkeypatch):
    store, writes, seen, write = DirectoryStore(str(tmp_path), clock=QUICK), [], [], os.write

    def stale_once(descriptor, data):
        writes.append(len(data))
        if len(writes) == 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", stale_once)
    store.upload("y", memoryview(bytes(20 << 20)), progress=seen.append)
    assert store.size("y") == sum(seen) == 20 << 20
    assert store.metrics.snapshot()["retries"] == 1
