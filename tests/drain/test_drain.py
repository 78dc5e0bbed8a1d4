"""The drain, in this process: its work, what is refused, and its end."""

import pytest
from support.draining import drain, names, readable
from support.faulty import FaultyStore, Injected, refusing

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.drain import status
from tiered_checkpoint_io.errors import StoreError


def of(operation, name="", times=None):
    """Returns a filter of these operations on this name, true for the first ``times``."""
    left = iter(range(times)) if times else iter(int, 1)
    return lambda what, key: what == operation and name in key and next(left, None) is not None


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
    assert node.queue.outcome(held).state == "skipped"
    assert "old.ckpt stays, as" in node.queue.outcome(held).error
    assert "`tiered-ckpt prune`" in node.queue.outcome(held).error
    assert names(store) == ["old.ckpt"]
    assert readable(store, "old.ckpt") == b"old"
    assert [folder.name.rpartition(".")[0] for folder in node.tier.quarantined()] == [f"{bad}.rank-00000"]


@pytest.mark.parametrize("error", [StoreError("no", reason="access"), ZeroDivisionError("a bug")], ids=["no", "bug"])
def test_a_save_that_no_store_takes_is_superseded_by_the_next_one(node, store, error):
    first, second = node.save("a.ckpt", b"A"), node.save("b.ckpt", b"B")
    drain(node, refusing(store, of("upload", "a.ckpt"), error)).run(once=True)
    assert node.states() == {first: "skipped", second: "committed"}
    assert names(store) == ["b.ckpt"]
    assert not [stored for stored in node.tier.parts() if stored.pending]
    assert node.queue.outcome(first).attempts == 1


def test_what_may_pass_is_retried_by_itself_and_said_until_it_is_done(node, store):
    faulty = refusing(store, of("upload", times=3), Injected("away"))
    first, worker = node.save("a.ckpt", b"A"), drain(node, faulty, clock=Clock(Timing(redo_first_s=0.01)))
    worker.run(once=True)
    assert "away" in node.queue.progress().last_error
    assert worker.run()
    assert (node.queue.outcome(first).attempts, node.queue.progress().last_error) == (4, "")
    assert readable(store, "a.ckpt") == b"A"


def test_the_log_of_its_process_does_not_grow_for_ever(node):
    """Processes that have opened the file still append to it."""
    path = node.root / status.LOG
    with path.open("ab", buffering=0) as log:
        log.write(b"".join(b"line %d of what is logged\n" % number for number in range(40_000)))
        before = path.stat().st_size
        node.save("a.ckpt", b"A")
        drain(node).run(once=True)
        log.write(b"the end\n")
    lines = path.read_text().splitlines()
    assert path.stat().st_size < before * 2 / 3
    assert lines[-2:] == ["line 39999 of what is logged", "the end"]
    assert lines[0].startswith("line ")


def test_deletes_that_are_refused_are_tried_one_at_a_time_until_one_is_not(node, store):
    """A save, and an alias that was refused once, do not wait behind them."""
    for number in range(20):
        node.save(f"{number}.ckpt", b"A")
        node.delete(f"{number}.ckpt")
    is_locked = True
    locked = refusing(store, lambda what, key: what == "delete" and is_locked)
    worker = drain(node, refusing(locked, of("put", "last.ckpt", times=1)))

    def done(*ops):
        worker.run(once=True)
        return [node.states()[op] for op in ops]

    worker.run(once=True)
    assert locked.operations == 20, "each was tried once"
    assert done(node.save("0.new", b"B"), node.alias("last.ckpt", "0.new")) == ["committed", "failed"]
    assert done(node.save("1.new", b"B"), node.alias("last.ckpt", "1.new")) == ["committed", "committed"]
    tried = locked.operations
    for number in (2, 3):
        assert done(node.save(f"{number}.new", b"B")) == ["committed"]
        assert locked.operations == (tried := tried + 1)
    is_locked = False
    assert done(node.save("4.new", b"B")) == ["committed"]
    assert not node.queue.requests()
    assert names(store) == [*(f"{number}.new" for number in range(5)), "last.ckpt"]


@pytest.mark.parametrize(
    ("error", "patience_s"),
    [(Injected("it was refused"), 0.2), (StoreError("it was refused", reason="access"), None)],
    ids=["unreachable", "no rights"],
)
def test_with_no_trainer_and_no_store_it_gives_up_and_leaves_all_to_the_next(node, store, caplog, error, patience_s):
    """At once if it has no rights: the credentials are those of its trainer, and the next one may have better ones.

    If several fail, one of them is always due.
    """
    queued = [node.save("a.ckpt", b"A"), node.alias("last.ckpt", "a.ckpt"), node.save("b.ckpt", b"B")]
    clock = Clock(Timing(drain_give_up_s=patience_s, redo_max_s=0)) if patience_s else Clock()
    assert drain(node, refusing(store, of("upload"), error), clock=clock).run()
    assert "it was refused" in caplog.text
    assert drain(node).run()
    assert node.states() == dict.fromkeys(queued, "committed")
    assert readable(store, "a.ckpt") == b"A"


def test_an_alias_that_failed_once_is_set_though_the_queue_is_never_empty(node, store):
    """If the line is slower than the saves, an alias that waits for an empty queue is never done."""
    seen = []

    class Slow(FaultyStore):
        def upload_if(self, *arguments, **options):
            save()
            return super().upload_if(*arguments, **options)

    def save():
        if len(seen) < 20:
            seen.append(readable(store, "last.ckpt"))
            node.save(f"{len(seen)}.ckpt", b"A")
            node.alias("last.ckpt", f"{len(seen)}.ckpt")

    save()
    clock = Clock(Timing(redo_first_s=0.0, redo_max_s=0.0))
    drain(node, Slow(store, fail_at=1, only=of("put", "last.ckpt", times=1)), clock=clock).run(once=True)
    assert seen[-1] == b"A"
    assert not node.queue.requests()
