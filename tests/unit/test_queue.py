"""The order of the work, against a model, and what trainer and drain tell each other by the log."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.story import op_id

from tiered_checkpoint_io.engine.drain import queue as module
from tiered_checkpoint_io.engine.drain.operations import (
    Outcome,
    Request,
    blocked_by_failures,
    held_back,
    in_order,
    needed,
    next_operation,
    superseded,
    unreplaced,
)
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.place import Server


@pytest.fixture
def queue(tmp_path):
    return Queue(tmp_path)


def save(number, name="", dirpath="d"):
    return Request(op_id(number), "save", name or f"{number}.ckpt", dirpath)


def part(number, rank, name="", dirpath="d"):
    op = ids.part_op_id(op_id(number), rank, commits=False)
    return Request(op, "part", name or f"{number}.ckpt", dirpath)


def delete(number, name, dirpath="d", target=""):
    return Request(op_id(number), "delete", name, dirpath, target)


def alias(number, name, target, dirpath="d"):
    return Request(op_id(number), "alias", name, dirpath, target)


def ended(number, state, dirpath="d", rank=None):
    if rank is not None:
        return Outcome(part(number, rank).op_id, "part", f"{number}.ckpt", number, state, dirpath=dirpath)
    return Outcome(op_id(number), "save", f"{number}.ckpt", number, state, dirpath=dirpath)


def test_a_look_at_the_outcomes_costs_what_is_new(queue, tmp_path, monkeypatch):
    """After hundreds of saves as after a few: training waits for these looks."""
    parsed, parse = [], module._parsed
    monkeypatch.setattr(module, "_parsed", lambda kind, raw: (parsed.append(raw), parse(kind, raw))[1])
    trainer = Queue(tmp_path)
    for number in range(1, 101):
        queue.finish(ended(number, "failed"), final=False)
        assert trainer.outcomes()[-1].state == "failed"
        queue.finish(ended(number, "committed"))
        assert [each.state for each in trainer.outcomes()[-2:]] == ["committed"] * min(number, 2)
    assert len(parsed) == 200


def test_a_look_at_what_is_queued_costs_what_is_new(queue, memory_dir, monkeypatch):
    """A durable tier may be away for days: aliases and deletes pile up, and training waits for these looks."""
    parsed, parse = [], module._parsed
    monkeypatch.setattr(module, "_parsed", lambda kind, raw: (parsed.append(raw), parse(kind, raw))[1])
    tier = MemoryTier.open(memory_dir, "job")
    queue.finish(ended(1, "skipped"))
    compared, is_equal = [], Request.__eq__
    monkeypatch.setattr(Request, "__eq__", lambda one, other: (compared.append(one), is_equal(one, other))[1])
    for number in range(2, 102):
        queue.submit(delete(number, f"{number}.ckpt"))
        assert len(queue.look(tier)) == number - 1
        assert queue.doable(tier) == [], "they wait for a save that is committed"
    assert sum("target" in each for each in parsed) == 100
    assert len(compared) <= 200


# ------------------------------------------------------------------------------------------ order
def test_operations_go_in_their_order():
    operations = [save(1), alias(2, "last", "1.ckpt"), delete(3, "0.ckpt")]
    assert next_operation(operations, ()) == operations[0]
    assert next_operation(operations[1:], ()) == operations[1]
    assert next_operation(operations[2:], ()) == operations[2]
    assert next_operation([], ()) is None


def test_a_save_that_waits_lets_saves_pass_but_neither_deletes_nor_its_alias():
    first, last, old, second = save(1), alias(2, "last", "1.ckpt"), delete(3, "0.ckpt"), save(4)
    waiting = {first.op_id}
    assert next_operation([first, last, old, second], waiting) == second
    assert next_operation([first, last, old], waiting) is None
    other = alias(5, "best", "0.ckpt")
    assert next_operation([first, last, other], waiting) == other


def test_what_concerns_one_name_stays_in_order():
    first, old, new = save(1), alias(2, "last", "1.ckpt"), alias(3, "last", "0.ckpt")
    assert next_operation([first, old, new], {first.op_id}) is None
    assert next_operation([old, new], {old.op_id}) is None


def test_an_alias_does_not_overtake_a_save_of_its_own_name():
    """Or else that save would come later, and make older content current."""
    first, newer, last = save(1, "last"), save(2, "2.ckpt"), alias(3, "last", "2.ckpt")
    assert next_operation([first, last], {first.op_id}) is None
    assert next_operation([first, newer, last], {first.op_id}) == newer
    assert blocked_by_failures([first, last], {first.op_id}) == {last.op_id}
    assert next_operation([save(1, "last", "other"), last], {first.op_id}) == last


def test_what_waits_behind_failed_saves_is_what_would_not_be_taken_up():
    first, last, old, second = save(1), alias(2, "last", "1.ckpt"), delete(3, "0.ckpt"), save(4)
    other, moved = delete(5, "0.ckpt", "other"), alias(6, "last", "4.ckpt")
    operations = [first, last, old, second, other, moved]
    assert blocked_by_failures(operations, {first.op_id}) == {last.op_id, old.op_id, moved.op_id}
    assert blocked_by_failures(operations, {second.op_id}) == {moved.op_id}
    assert blocked_by_failures(operations, ()) == set()


def test_a_delete_is_held_until_something_newer_than_the_lost_save_is_committed():
    operations = [delete(2, "0.ckpt")]
    for lost in ("failed", "skipped"):
        outcomes = [ended(0, "committed"), ended(1, lost)]
        assert next_operation(operations, (), unreplaced(outcomes)) is None
        assert held_back(operations, unreplaced(outcomes)) == operations
        assert next_operation(operations, (), unreplaced([*outcomes, ended(3, "committed")])) == operations[0]
    # A save lost behind the delete, or on another durable tier, is none of its business.
    assert next_operation(operations, (), unreplaced([ended(3, "skipped")])) == operations[0]
    assert next_operation(operations, (), unreplaced([ended(1, "skipped", "other")])) == operations[0]


def test_a_delete_waits_for_the_save_that_replaces_what_it_deletes_and_for_no_other():
    other, own, old = save(1), save(2), delete(3, "0.ckpt", target=op_id(2))
    assert next_operation([other, own, old], {own.op_id}) == other
    assert next_operation([own, old, save(4)], {own.op_id}) == save(4)
    assert next_operation([own, old], {own.op_id}) is None
    assert blocked_by_failures([own, old], {own.op_id}) == {old.op_id}
    assert next_operation([other, old], {other.op_id}) == old
    assert next_operation([old], (), unreplaced([ended(1, "failed")])) == old
    # Of its own name, in order.
    assert next_operation([save(1, "0.ckpt"), old], {op_id(1)}) is None


def test_a_save_for_which_a_delete_waits_is_not_superseded_unless_another_replaces_it_in_turn():
    operations = [save(1), save(2), delete(3, "0.ckpt", target=op_id(2)), save(4)]
    failed = {op_id(1), op_id(2)}
    assert needed(operations) == {op_id(2)}
    assert superseded(operations, failed, save(4)) == [save(1)]
    assert needed([*operations, delete(5, "2.ckpt", target=op_id(4))]) == {op_id(4)}
    assert superseded([*operations, delete(5, "2.ckpt", target=op_id(4))], failed, save(4)) == [save(1), save(2)]


def test_a_cancel_goes_first():
    cancel = Request(op_id(9), "cancel", "cancel", "d", op_id(1))
    assert next_operation([save(1), save(2), cancel], {op_id(1)}) == cancel
    # One that failed is tried again as all else is, and not at once.
    assert next_operation([save(1), save(2), cancel], {cancel.op_id}) == save(1)


def test_only_older_failed_saves_of_the_same_tier_are_superseded():
    operations = [save(1), save(2), save(3, dirpath="other"), save(5)]
    failed = {op_id(1), op_id(3), op_id(5)}
    assert superseded(operations, failed, save(4)) == [operations[0]]


def test_of_one_save_the_part_that_commits_goes_last():
    operations = [save(1), part(1, 3), part(1, 10), delete(2, "1.ckpt"), save(3), part(3, 3)]
    ordered = [part(1, 3), part(1, 10), save(1), delete(2, "1.ckpt"), part(3, 3), save(3)]
    assert in_order(operations) == ordered
    for skipped in range(len(ordered)):
        assert next_operation(ordered[skipped:], ()) == ordered[skipped]


def test_a_part_on_its_way_holds_deletes_and_aliases_as_a_save_does_and_lets_saves_pass():
    first, own, old, last, second = part(1, 3), save(1), delete(2, "0.ckpt"), alias(3, "last", "1.ckpt"), save(4)
    operations = [first, own, old, last, second]
    assert next_operation(operations, {first.op_id}) == own
    assert next_operation(operations, {first.op_id, own.op_id}) == second
    assert next_operation([first, old, last], {first.op_id}) is None
    assert next_operation([own, old, last], {own.op_id}) is None


def test_a_part_that_arrived_makes_up_for_lost_parts_but_not_for_a_lost_save():
    operations = [delete(2, "0.ckpt")]
    for outcomes in (
        [ended(1, "failed"), ended(1, "committed", rank=3)],
        [ended(1, "failed"), ended(3, "committed", rank=3)],
    ):
        assert held_back(operations, unreplaced(outcomes)) == operations
    lost = [ended(1, "skipped", rank=3)]
    assert held_back(operations, unreplaced(lost)) == operations
    assert not held_back(operations, unreplaced([*lost, ended(3, "committed", rank=3)]))
    assert not held_back(operations, unreplaced([*lost, ended(1, "failed"), ended(3, "committed")]))


def test_a_part_that_arrived_supersedes_parts_and_a_save_both():
    operations = [part(1, 3), save(1), part(2, 3), save(2), save(3, dirpath="other")]
    failed = {operation.op_id for operation in operations}
    assert superseded(operations, failed, part(2, 5)) == [part(1, 3)]
    assert superseded(operations, failed, save(2)) == [part(1, 3), save(1)]


NAMES = ("a", "b", "c")
LINES = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.sampled_from(NAMES), st.just("")),
        st.tuples(st.just("delete"), st.sampled_from(NAMES), st.just("")),
        st.tuples(st.just("alias"), st.just("last"), st.sampled_from(NAMES)),
    ),
    max_size=12,
)


@given(LINES, st.data())
def test_whatever_fails_no_delete_passes_a_save_that_is_neither_committed_nor_replaced(lines, data):
    """Carries out random operations, of which any may fail for good; the rule is checked at each delete."""
    operations = [
        Request(op_id(number), action, name, "d", target) for number, (action, name, target) in enumerate(lines)
    ]
    saves = {operation.op_id for operation in operations if operation.action == "save"}
    left, outcomes, waiting = list(operations), {}, set()
    while True:
        operation = next_operation(left, waiting, unreplaced(outcomes.values()))
        if operation is None:
            break
        fate = data.draw(st.sampled_from(["committed", "skipped", "waits"]))
        if operation.action == "delete":
            committed = max((op for op, outcome in outcomes.items() if outcome.state == "committed"), default="")
            before = {op for op in saves if op < operation.op_id}
            assert all(op in outcomes and (outcomes[op].state == "committed" or op < committed) for op in before)
        if fate == "waits":
            waiting.add(operation.op_id)
            continue
        left.remove(operation)
        if operation.action == "save":
            outcomes[operation.op_id] = Outcome(operation.op_id, "save", operation.name, 0, fate, dirpath="d")
    # What is left waits for a reason: itself, a save, a name, or a save still to come.
    if not waiting:
        assert left == held_back(left, unreplaced(outcomes.values())) or any(
            operation.action == "alias" for operation in left
        )
        assert not any(operation.action == "save" for operation in left)


# ---------------------------------------------------------------------------------------- the log
def test_requests_come_back_in_order_and_leave_with_their_outcome(queue):
    second, first = delete(2, "a/b=1.ckpt"), alias(1, "last.ckpt", "ä.ckpt")
    queue.submit(second)
    queue.submit(first)
    assert queue.requests() == [first, second]
    queue.finish(Outcome(first.op_id, "alias", "last.ckpt", -1, "failed", "no"), final=False)
    assert queue.requests() == [first, second]
    queue.finish(Outcome(first.op_id, "alias", "last.ckpt", -1, "committed"))
    assert queue.requests() == [second]
    assert queue.outcome(first.op_id).state == "committed"
    assert queue.outcome(second.op_id) is None


def test_outcomes_are_seen_as_they_change_and_only_the_newest_are_kept(queue, tmp_path, monkeypatch):
    other = Queue(tmp_path)
    for number in range(30):
        queue.finish(ended(number, "failed"))
    assert [outcome.state for outcome in other.outcomes()] == ["failed"] * 30
    queue.finish(ended(29, "committed"))
    assert other.outcomes()[-1].state == "committed"
    monkeypatch.setattr(module, "_KEEP", 10)
    queue.finish(ended(29, "committed"))
    assert [outcome.op_id for outcome in other.outcomes()] == [op_id(number) for number in range(20, 30)]


def test_outcomes_of_the_parts_of_one_save_are_kept_and_dropped_together(queue, monkeypatch):
    monkeypatch.setattr(module, "_KEEP", 10)
    for number in range(10):
        for rank in (0, 1):
            queue.finish(ended(number, "committed", rank=rank))
        queue.finish(ended(number, "committed"))
    queue.finish(ended(9, "committed"))
    kept = [outcome.op_id for outcome in queue.outcomes()]
    assert len(kept) == 3 * 4
    assert min(kept) == op_id(6)
    assert queue.outcome(part(7, 1).op_id).action == "part"


def test_a_reader_sees_what_the_drain_last_said_and_waits_wake_for_operations_alone(queue, tmp_path):
    reader = Queue(tmp_path)
    assert reader.progress() == DrainProgress()
    queue.open()
    before = reader.version()
    queue.write_progress(DrainProgress(pid=1, counters={"committed": 3}, last_error="x" * 10_000))
    assert reader.progress().counters == {"committed": 3}
    assert reader.version() == before
    queue.ring()
    assert reader.version() != before


def test_notes_of_work_in_progress_outlive_their_writer(queue, tmp_path):
    journal = queue.journal(op_id(1))
    assert journal.read() is None
    journal.write({"upload_id": "x", "parts": [1, 2]})
    assert Queue(tmp_path).journal(op_id(1)).read() == {"upload_id": "x", "parts": [1, 2]}
    journal.clear()
    journal.clear()
    assert Queue(tmp_path).journal(op_id(1)).read() is None
    # One that would fill the log stays in this process.
    journal.write({"objects": ["x" * 1000] * 1000})
    assert len(queue.journal(op_id(1)).read()["objects"]) == 1000
    assert Queue(tmp_path).journal(op_id(1)).read() is None
    journal.write({"few": 1})
    queue.finish(ended(1, "failed"), final=False)
    assert Queue(tmp_path).journal(op_id(1)).read() == {"few": 1}
    queue.finish(ended(1, "skipped"))
    assert Queue(tmp_path).journal(op_id(1)).read() is None


def test_a_server_is_noted_with_requests_and_outcomes(queue):
    there, here = Server("http://a", "eu-west-1", "p"), Server("http://b")
    asked = replace(alias(2, "last.ckpt", "2.ckpt", "s3://bucket"), server=there)
    queue.submit(asked)
    assert queue.requests() == [asked]
    assert queue.requests()[0].server.profile == "p"
    done = replace(ended(1, "committed", "s3://bucket"), server=there)
    queue.finish(done)
    assert (queue.outcome(done.op_id), queue.outcomes()) == (done, [done])
    # On one server nothing of another is replaced, held back or waited for.
    other = replace(ended(1, "failed", "s3://bucket"), server=here)
    assert unreplaced([other, replace(ended(2, "committed", "s3://bucket"), server=there)]) == [other]
    assert not held_back([replace(delete(3, "a", "s3://bucket"), server=there)], [other])
