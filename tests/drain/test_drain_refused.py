"""What the drain does where a server refuses some of what it asks for: uploads come first, and what fails waits its turn."""

import threading

from support.draining import names, readable
from support.faulty import FaultyStore
from support.story import op_id

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.status import NewOutcomes
from tiered_checkpoint_io.engine.drain.unfinished import Begun
from tiered_checkpoint_io.errors import StoreError

from .test_drain import drain, node, store, until  # noqa: F401 - fixtures


class Undeletable:
    """A store that refuses deletes while ``refuses`` is set, and counts them."""

    def __init__(self, store):  # noqa: F811
        self._store = store
        self.refuses, self.asked = True, 0

    def delete_if(self, key, expected):
        self.asked += 1
        if self.refuses:
            raise StoreError("no", reason="access")
        self._store.delete_if(key, expected)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_save_goes_before_a_delete_that_was_refused(node, store):  # noqa: F811
    """Where each save adds one, to try them all takes longer, some day, than until the first one's turn comes again."""
    node.save("0.ckpt", b"A")
    node.delete("0.ckpt")
    locked, stop = Undeletable(store), threading.Event()
    clock = Clock(Timing(redo_permanent_s=0.0))
    thread = threading.Thread(target=drain(node, locked, stop=stop, stay=True, clock=clock).run)
    thread.start()
    try:
        until(lambda: locked.asked, "it was refused")
        saved = node.save("1.ckpt", b"B")
        until(lambda: node.states().get(saved) == "committed", "the save", timeout_s=10)
    finally:
        stop.set()
        thread.join()


def test_what_has_failed_a_thousand_times_is_tried_again():
    """A right that is missing for a day ended the drain."""
    begun, clock = Begun(), Clock()
    for error in (StoreError("no", reason="access"), StoreError("away", reason="unavailable")):
        for _ in range(1100):
            begun.failed(error, clock)
        assert 0 < begun.due - clock.monotonic() <= 60


def test_deletes_that_are_refused_are_tried_one_at_a_time_until_one_is_not(node, store):  # noqa: F811
    for number in range(20):
        node.save(f"{number}.ckpt", b"A")
        node.delete(f"{number}.ckpt")
    locked, stop = Undeletable(store), threading.Event()
    thread = threading.Thread(target=drain(node, locked, stop=stop, stay=True).run)
    thread.start()

    def save(name):
        saved = node.save(name, b"B")
        until(lambda: node.states().get(saved) == "committed", "the save")

    try:
        until(lambda: locked.asked >= 20, "each was tried once")
        for number in range(3):
            asked = locked.asked
            save(f"new-{number}.ckpt")
            until(lambda: locked.asked > asked, "one of them is tried again")
        assert locked.asked <= 20 + 2 * 3
        locked.refuses = False
        save("last.ckpt")
        until(lambda: not node.queue.requests(), "all are done")
    finally:
        stop.set()
        thread.join()
    assert names(store) == ["last.ckpt", "new-0.ckpt", "new-1.ckpt", "new-2.ckpt"]


class Unnamed:
    """A store that fails to write the manifest of ``last.ckpt``, ``left`` times; ``sending`` is called at each upload."""

    def __init__(self, store, error, left, sending=lambda: None):  # noqa: F811
        self._store, self._error, self._sending = store, error, sending
        self.left = left

    def put_if(self, key, data, expected):
        if "last.ckpt" in key and self.left:
            self.left -= 1
            raise self._error
        return self._store.put_if(key, data, expected)

    def upload_if(self, *arguments, **options):
        self._sending()
        return self._store.upload_if(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_an_alias_that_failed_once_is_set_though_the_queue_is_never_empty(node, store):  # noqa: F811
    """Where the line is slower than the saves, what waited for an empty queue was never done."""
    seen = []

    def save():
        if len(seen) < 20:
            seen.append(readable(store, "last.ckpt"))
            node.save(f"{len(seen)}.ckpt", b"A")
            node.alias("last.ckpt", f"{len(seen)}.ckpt")

    save()
    clock = Clock(Timing(redo_first_s=0.0, redo_max_s=0.0))
    drain(node, Unnamed(store, StoreError("away", reason="unavailable"), 1, sending=save), clock=clock).run(once=True)
    assert seen[-1] == b"A"
    assert not node.queue.requests()


def test_an_alias_that_was_refused_once_does_not_wait_behind_deletes_that_are_refused(node, store):  # noqa: F811
    """``last`` stayed behind for as many saves as there were such deletes: one of all of them was tried at each."""
    locked, stop = Undeletable(Unnamed(store, StoreError("no", reason="access"), 1)), threading.Event()
    for number in range(10):
        node.save(f"{number}.ckpt", b"A")
        node.delete(f"{number}.ckpt")
    node.save("a.ckpt", b"B")
    node.alias("last.ckpt", "a.ckpt")
    thread = threading.Thread(target=drain(node, locked, stop=stop, stay=True).run)
    thread.start()
    try:
        until(lambda: not locked.left, "it was refused")
        saved = node.save("b.ckpt", b"C")
        alias = node.alias("last.ckpt", "b.ckpt")
        until(lambda: node.states().get(saved) == "committed", "the save")
        until(lambda: node.states().get(alias) == "committed", "the alias", timeout_s=10)
    finally:
        stop.set()
        thread.join()
    assert readable(store, "last.ckpt") == b"C"


def test_what_failed_last_is_said_until_all_that_failed_is_done(node, store):  # noqa: F811
    faulty = FaultyStore(store, fail_at=1, once=True, only=lambda what, key: "1.ckpt" in key)
    node.save("1.ckpt", b"1")
    worker = drain(node, faulty)
    assert worker.run(once=True)
    assert node.queue.progress().last_error
    until(
        lambda: worker.run(once=True) and not [each for each in node.tier.parts() if each.pending], "it is tried again"
    )
    assert node.queue.progress().last_error == ""


def test_a_failure_for_another_reason_is_news(node):  # noqa: F811
    news, told = NewOutcomes(node.queue), []
    for kind in ("unavailable", "access", "access"):
        node.queue.finish(Outcome(op_id(1), "save", "1.ckpt", 1, "failed", "why", kind), final=False)
        told.append([each.error_type for each in news.take()[0]])
    assert told == [["unavailable"], ["access"], []]
