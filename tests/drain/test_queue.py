"""The order of the work, against a model; the messages of trainer and drain in the log."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.story import op_id
from support.tenants import Tenant, descriptors_to_spare, mounted_tmpfs

from tiered_checkpoint_io.engine.drain import queue as queue_module
from tiered_checkpoint_io.engine.drain.log import OperationLog
from tiered_checkpoint_io.engine.drain.operations import (
    Outcome,
    Request,
    next_operation,
)
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids


@pytest.fixture
def queue(tmp_path):
    return Queue(tmp_path)


def part(number, rank, name="", dirpath="d"):
    op = ids.part_op_id(op_id(number), rank, commits=False)
    return Request(op, "part", name or f"{number}.ckpt", dirpath)


def delete(number, name):
    return Request(op_id(number), "delete", name, "d", "")


def ended(number, state, dirpath="d", rank=None):
    if rank is not None:
        return Outcome(part(number, rank).op_id, "part", f"{number}.ckpt", number, state, dirpath=dirpath)
    return Outcome(op_id(number), "save", f"{number}.ckpt", number, state, dirpath=dirpath)


def test_a_look_costs_what_is_new(queue, tmp_path, memory_dir, monkeypatch):
    """A durable tier may be away for days: requests and outcomes pile up, and training waits for these looks."""
    tier, trainer, parsed, parse = MemoryTier.open(memory_dir, "job"), Queue(tmp_path), [], queue_module.server_in
    monkeypatch.setattr(queue_module, "server_in", lambda raw: parsed.append(raw) or parse(raw))
    queue.finish(ended(1, "skipped"))
    for number in range(2, 102):
        queue.submit(delete(number, f"{number}.ckpt"))
        assert len(trainer.look(tier)) == number - 1
        queue.finish(ended(number, "failed"), final=False)
        assert trainer.outcomes()[-1].state == "failed"
    assert len(parsed) < 500


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
def test_whatever_fails_no_delete_passes_what_it_waits_for(lines, data):
    """Carries out random operations, of which any may have to wait; the rule is checked at each delete."""
    left, waiting, newest = [], set(), ""
    for number, (action, name, target) in enumerate(lines):
        newest = op_id(number) if action == "save" else newest
        left.append(Request(op_id(number), action, name, "d", newest if action == "delete" else target))
    while (operation := next_operation(left, waiting)) is not None:
        if operation.action == "delete":
            before = [each for each in left if each.op_id < operation.op_id]
            assert operation.target not in [each.op_id for each in before]
            assert not [each for each in before if each.action == "alias" or each.name == operation.name]
        if data.draw(st.booleans()):
            waiting.add(operation.op_id)
        else:
            left.remove(operation)
    assert waiting or not left


def test_only_the_newest_outcomes_are_kept_and_those_of_one_save_together(queue, tmp_path):
    other, ranks = Queue(tmp_path), range(8)
    for number in range(70):
        queue.finish(ended(number, "failed"), final=False)
        assert other.outcomes()[-1].state == "failed"
        for rank in ranks:
            queue.finish(ended(number, "committed", rank=rank))
        queue.finish(ended(number, "committed"))
    kept = other.outcomes()
    assert 100 < len(kept) < 600
    assert len(kept) % 9 == 0
    assert {each.state for each in kept} == {"committed"}
    assert other.outcome(part(69, 1).op_id).action == "part"


BODY = "y" * 300
#: Start of the two halves of a log, and the length of each.
HALVES, HALF = 8192, 1 << 20


@pytest.fixture
def path(memory_dir):
    return f"{memory_dir}/log"


def numbers(log, prefix):
    return sorted(int(number) for number in log.entries(prefix))


@pytest.mark.parametrize("what", ["space", "files", "descriptors"])
def test_it_goes_on_for_ever_where_nothing_is_left(what, tmp_path):
    with mounted_tmpfs(tmp_path / "tight", 4 << 20, inodes=40) as folder:
        log, tenant = OperationLog(folder / "log"), Tenant(folder)
        log.write({"first": 1})
        # In a process of its own: a server's thread of another test needs descriptors.
        child = os.fork()
        if not child:
            try:
                mine = OperationLog(folder / "log")
                mine.open()
                {"space": tenant.fills, "files": tenant.takes_all_inodes, "descriptors": lambda: None}[what]()
                with descriptors_to_spare(0 if what == "descriptors" else 10):
                    for number in range(1000):
                        mine.write({f"now/{number}": BODY, f"now/{number - 20}": None})
                        mine.beat(str(number).encode())
                os._exit(0 if mine.heartbeat() == b"999" else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert numbers(OperationLog(folder / "log"), "now/") == list(range(980, 1000))


@pytest.mark.parametrize("at", [0, 20, 40, HALVES, HALVES + HALF, HALVES + 3000, HALVES + HALF + 3000])
def test_damage_costs_records_with_a_warning_and_all_processes_agree_again(at, path, caplog):
    live = OperationLog(path)
    for number in range(20):
        live.write({f"now/{number}": BODY})
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * 16)
    fresh = OperationLog(path)
    fresh.write({"fresh": 1})
    live.write({"live": 1})
    late = OperationLog(path)
    assert fresh.entries("") == live.entries("") == late.entries("")
    found = numbers(late, "now/")
    assert found == list(range(len(found))), "up to the damage"
    assert {"fresh", "live"} <= set(late.entries(""))
    assert len(found) == 20 or "is damaged" in caplog.text
