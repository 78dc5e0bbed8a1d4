"""The drain, in this process."""

import logging
import os
import threading
import time

import pytest
from support.draining import Node, names, objects, readable
from support.faulty import Injected

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain import log, queue, status
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.locks import is_locked, release, try_lock
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.memory.space import MemoryFullError
from tiered_checkpoint_io.stores.directory import DirectoryStore

LOG = logging.getLogger("test")


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path / "durable"))


@pytest.fixture
def node(memory_dir, store):
    return Node(memory_dir, store.url)


@pytest.fixture
def handle_of():
    handles = []

    def make(node, **changes):
        handle = DrainHandle(node.tier, node.config, LOG, **changes)
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        handle.close(timeout_s=30)


def until(condition, what, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.005)


class Broken:
    """A store that refuses the uploads for which ``refuse`` gives an error."""

    def __init__(self, store, refuse):
        self._store = store
        self._refuse = refuse
        self.attempts = []

    def upload(self, key, data, **options):
        self.attempts.append(key)
        if (error := self._refuse(key)) is not None:
            raise error
        self._store.upload(key, data, **options)

    def upload_if(self, key, data, expected, *, look=None, **options):
        self.upload(key, data, **options)

    def __getattr__(self, name):
        return getattr(self._store, name)


def drain(node, store=None, **options):
    opened = (lambda config, dirpath: store) if store is not None else None
    return Drain(node.root, logger=LOG, **({"open_store": opened} if opened else {}), **options)


# ------------------------------------------------------------------------------------- its work
def test_a_queue_is_carried_out_in_order_and_every_part_is_marked(node, store):
    ops = [
        node.save("a.ckpt", b"A" * 1000),
        node.alias("last.ckpt", "a.ckpt"),
        node.save("b.ckpt", b"B" * 2000),
        node.alias("last.ckpt", "b.ckpt"),
        node.delete("a.ckpt"),
        node.save("b.ckpt", b"again"),
    ]
    assert drain(node).run(once=True)
    assert node.states() == dict.fromkeys(ops, "committed")
    assert names(store) == ["b.ckpt", "last.ckpt"]
    assert objects(store) == ["b.ckpt"]
    assert readable(store, "last.ckpt") == readable(store, "b.ckpt") == b"again"
    assert all(stored.drained for stored in node.tier.parts())
    progress = node.queue.progress()
    assert progress.counters["committed"] == 6
    assert progress.counters["bytes.up"] >= 3005
    assert (progress.pid, progress.name) == (os.getpid(), "")
    assert not (node.root / LOCK_FILE).read_bytes()
    assert not is_locked(node.root / LOCK_FILE)


def test_an_alias_that_comes_with_its_target_while_the_drain_looks_waits_for_it(node, store, monkeypatch):
    """Found by the kill sweep: the drain has listed the saves, and not yet the requests."""
    worker, ops = drain(node), []
    look = worker._tier.parts

    def looking():
        found = look()
        if not ops:
            ops.extend([node.save("a.ckpt", b"A"), node.alias("last.ckpt", "a.ckpt")])
        return found

    monkeypatch.setattr(worker._tier, "parts", looking)
    worker.run(once=True)
    assert worker.run(once=True)
    assert node.states() == dict.fromkeys(ops, "committed")
    assert names(store) == ["a.ckpt", "last.ckpt"]


def test_a_corrupt_part_is_set_aside_and_what_it_was_to_replace_stays(node, store):
    node.save("old.ckpt", b"old")
    bad = node.save("new.ckpt", b"new")
    held = node.delete("old.ckpt")
    later_alias = node.alias("last.ckpt", "new.ckpt")
    next(part for part in node.tier.parts() if part.save_id == bad).file("new.ckpt").write_bytes(b"neW")
    drain(node).run(once=True)
    outcome = node.queue.outcome(bad)
    assert (outcome.state, outcome.error_type) == ("failed", "damaged_in_memory")
    assert node.queue.outcome(later_alias).state == "skipped"
    assert node.queue.outcome(held) is None
    assert names(store) == ["old.ckpt"]
    assert readable(store, "old.ckpt") == b"old"
    assert [folder.name.rpartition(".")[0] for folder in node.tier.quarantined()] == [f"{bad}.rank-00000"]
    # Another drain, later, knows it still; what replaces the lost save sets the delete free.
    drain(node).run(once=True)
    assert names(store) == ["old.ckpt"]
    node.save("newer.ckpt", b"newer")
    drain(node).run(once=True)
    assert names(store) == objects(store) == ["newer.ckpt"]


def test_a_save_that_no_store_takes_is_superseded_by_the_next_one(node, store):
    broken = Broken(store, lambda key: StoreError("no", reason="access") if key == "a.ckpt" else None)
    first, old, second = node.save("a.ckpt", b"A"), node.delete("none.ckpt"), node.save("b.ckpt", b"B")
    drain(node, broken).run(once=True)
    assert node.states() == {first: "skipped", old: "committed", second: "committed"}
    assert names(store) == ["b.ckpt"]
    assert not [stored for stored in node.tier.parts() if stored.pending]
    assert node.queue.outcome(first).attempts == 1


def test_a_failing_save_is_told_at_once_and_tried_again_when_something_new_comes(node, store):
    mended = threading.Event()
    broken = Broken(store, lambda key: None if mended.is_set() else StoreError("no rights", reason="access"))
    first = node.save("a.ckpt", b"A")
    stop = threading.Event()
    thread = threading.Thread(target=drain(node, broken, stop=stop, stay=True).run)
    thread.start()
    try:
        until(lambda: node.states() == {first: "failed"}, "the failure is told")
        assert "no rights" in node.queue.outcome(first).error
        mended.set()
        last = node.alias("last.ckpt", "a.ckpt")
        until(lambda: node.states() == {first: "committed", last: "committed"}, "both are done")
        assert node.queue.outcome(first).attempts == 2
    finally:
        stop.set()
        thread.join()


def test_what_may_pass_is_retried_by_itself(node, store):
    failures = iter([Injected("1"), Injected("2"), Injected("3")])
    broken = Broken(store, lambda key: next(failures, None))
    first = node.save("a.ckpt", b"A")
    assert drain(node, broken, clock=Clock(Timing(redo_first_s=0.01))).run()
    assert node.queue.outcome(first).attempts == 4
    assert readable(store, "a.ckpt") == b"A"


def test_an_error_that_nobody_thought_of_is_one_operations_error(node, store):
    broken = Broken(store, lambda key: ZeroDivisionError("bug") if key == "a.ckpt" else None)
    first, second = node.save("a.ckpt", b"A"), node.save("b.ckpt", b"B")
    drain(node, broken).run(once=True)
    assert node.states() == {first: "skipped", second: "committed"}


def test_a_cancelled_save_is_given_up_and_holds_deletes_back(node, store):
    broken = Broken(store, lambda key: StoreError("no", reason="access") if key == "b.ckpt" else None)
    node.save("a.ckpt", b"A")
    lost, held = node.save("b.ckpt", b"B"), node.delete("a.ckpt")
    drain(node, broken).run(once=True)
    node.cancel(lost)
    # Nobody waits for what only a further save can set free.
    assert drain(node, broken).run()
    assert node.queue.outcome(lost).state == "skipped"
    assert readable(store, "a.ckpt") == b"A"
    assert [request.op_id for request in node.queue.requests()] == [held]


def test_a_delete_waits_for_a_later_save_however_many_have_failed_meanwhile(node, store, monkeypatch):
    """Outcomes are kept of the newest saves alone, but for the first failure since what was good."""
    monkeypatch.setattr(queue, "_KEEP", 8)
    node.save("good.ckpt", b"A")
    drain(node).run(once=True)
    broken, before = Broken(store, lambda key: StoreError("no", reason="access")), "good.ckpt"
    for number in range(12):
        lost, _ = node.save(f"{number}.ckpt", b"B"), node.delete(before)
        before = f"{number}.ckpt"
        node.cancel(lost)
        drain(node, broken).run(once=True)
        assert names(store) == ["good.ckpt"], f"after {number + 1} that failed"
    assert len(node.queue.outcomes()) <= 10
    node.save("new.ckpt", b"C")
    drain(node).run(once=True)
    assert names(store) == objects(store) == ["new.ckpt"]
    assert not node.queue.requests()


def test_what_failed_is_forgotten_once_it_is_replaced(node, store, monkeypatch):
    monkeypatch.setattr(queue, "_KEEP", 4)
    node.cancel(node.save("lost.ckpt", b"A"))
    for number in range(8):
        node.save(f"{number}.ckpt", b"B")
        drain(node).run(once=True)
    assert {outcome.state for outcome in node.queue.outcomes()} == {"committed"}
    assert len(node.queue.outcomes()) <= 5


@pytest.mark.parametrize("spare", [8, 1 << 30], ids=["", "without-a-reserve"])
def test_a_log_that_is_full_of_requests_empties_again(spare, node, store, monkeypatch):
    """An outcome is larger than its request: where it found no room, the same request was carried out for ever."""
    monkeypatch.setattr(log, "_HALF", 1 << 14)
    monkeypatch.setattr(log, "_SPARE", spare)
    monkeypatch.setattr(queue, "_LEAST", 4)
    with pytest.raises(MemoryFullError, match="too much is queued"):
        for number in range(1000):
            node.delete(f"{number}.ckpt")
    assert number > 40
    saved, stop = node.save("a.ckpt", b"A"), threading.Event()
    thread = threading.Thread(target=drain(node, stop=stop, stay=True).run)
    thread.start()
    try:
        until(lambda: not node.queue.requests(), "all is done")
        until(lambda: node.queue.outcome(saved), "the save too")
    finally:
        stop.set()
        thread.join()
    assert names(store) == ["a.ckpt"]
    assert {outcome.state for outcome in node.queue.outcomes()} == {"committed"}


def test_a_death_between_commit_and_mark_still_tells_the_outcome(node, store, monkeypatch):
    first = node.save("a.ckpt", b"A")
    worker = drain(node)

    def die(stored):
        raise SystemExit

    monkeypatch.setattr(worker._tier, "mark_drained", die)
    with pytest.raises(SystemExit):
        worker.run(once=True)
    assert node.states() == {first: "committed"}
    drain(node).run(once=True)
    assert node.states() == {first: "committed"}
    assert not [stored for stored in node.tier.parts() if stored.pending]


def test_the_log_of_its_process_does_not_grow_for_ever(node, store):
    """Whoever has opened it appends to it as before."""
    path = node.root / status.LOG
    with path.open("ab", buffering=0) as log:
        for number in range(40_000):
            log.write(b"line %d of what is logged\n" % number)
        before = path.stat().st_size
        node.save("a.ckpt", b"A")
        drain(node).run(once=True)
        log.write(b"the end\n")
    lines = path.read_text().splitlines()
    assert path.stat().st_size < before * 2 / 3
    assert lines[-2:] == ["line 39999 of what is logged", "the end"]
    assert lines[0].startswith("line ")


# ----------------------------------------------------------------------------------- its leaving
def test_it_stays_while_a_trainer_lives_and_leaves_with_the_last(node, store):
    trainer = try_lock(node.root / TRAINERS_FILE, shared=True)
    thread = threading.Thread(target=drain(node).run)
    thread.start()
    first = node.save("a.ckpt", b"A")
    until(lambda: node.queue.outcome(first), "the save is durable")
    assert thread.is_alive()
    release(trainer)
    thread.join(10)
    assert not thread.is_alive()


def test_with_no_trainer_and_no_store_it_gives_up_and_leaves_all_to_the_next(node, store, caplog):
    node.save("a.ckpt", b"A")
    started = time.monotonic()
    assert drain(
        node, Broken(store, lambda key: Injected("unreachable")), clock=Clock(Timing(drain_give_up_s=0.5))
    ).run()
    assert 0.5 < time.monotonic() - started < 20
    assert "unreachable" in caplog.text
    drain(node).run()
    assert readable(store, "a.ckpt") == b"A"


def test_with_no_trainer_and_a_store_that_refuses_it_leaves_at_once(node, store, caplog):
    """Its credentials are those of the trainer that started it; the next one may bring better ones."""
    first, second = node.save("a.ckpt", b"A"), node.alias("last.ckpt", "a.ckpt")
    assert drain(node, Broken(store, lambda key: StoreError("no rights", reason="access"))).run()
    assert "no rights" in caplog.text
    assert drain(node).run()
    assert node.states() == {first: "committed", second: "committed"}


def test_one_drain_a_node(node):
    lock = try_lock(node.root / LOCK_FILE)
    assert not drain(node).run(once=True)
    release(lock)
    assert drain(node).run(once=True)


def test_a_forked_child_keeps_no_lock_alive(node):
    """A worker of a DataLoader that outlives its trainer must not pass for one."""
    lock = try_lock(node.root / TRAINERS_FILE, shared=True)
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    os.close(ready)
    try:
        assert try_lock(node.root / TRAINERS_FILE) is None
        release(lock)
        # Ours is gone; the child's copy must not count. It may still be on its way out of fork.
        alone = try_lock(node.root / TRAINERS_FILE, patience_s=10)
        assert alone is not None
        release(alone)
    finally:
        os.close(go)
        os.waitpid(child, 0)
