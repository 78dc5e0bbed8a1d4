"""Waits of a drain for the parts of other nodes: as long as any come, and then more rarely."""

import dataclasses

import pytest
from support.sharded import make_part, views_of

from tiered_checkpoint_io.clock import Timing
from tiered_checkpoint_io.engine.drain.unfinished import Unfinished
from tiered_checkpoint_io.engine.durable.commit import put_part
from tiered_checkpoint_io.errors import CorruptCheckpointError, DrainError
from tiered_checkpoint_io.model import ids

PATIENCE_S = 1800.0


@dataclasses.dataclass
class Hours:
    """A clock that only a test moves."""

    now: float = 0.0
    timing: Timing = dataclasses.field(default_factory=Timing)

    def monotonic(self):
        return self.now


def test_to_wait_is_no_failure_while_parts_come_and_one_failure_where_none_does(store):
    clock, begun = Hours(), Unfinished()
    parts = [make_part("a.ckpt", 1, rank, world_size=4) for rank in range(4)]

    def send(rank):
        put_part(store, parts[rank][0], views_of(parts[rank][1]))

    def look():
        try:
            return begun.gather(store, parts[0][0], PATIENCE_S, clock)
        except DrainError as late:
            begun[parts[0][0].save_id].failed(late, clock)
            return str(late)

    send(0)
    for rank in (1, 2):
        assert look() is None
        clock.now += PATIENCE_S - 1
        send(rank)
        assert look() is None, "a part has come"
    clock.now += PATIENCE_S - 1
    assert look() is None
    clock.now += 2
    assert "the parts of 1 of 4 ranks are missing, and none of them has come for 1800 s: 3" in look()
    mine = begun[parts[0][0].save_id]
    assert mine.permanent, "a drain without a trainer need not stay"
    for _ in range(20):
        assert 0 < mine.due - clock.now <= clock.timing.redo_max_s, "the looks go on"
        clock.now = mine.due
        assert look() is None, "it is said once"
        assert mine.permanent
    assert mine.failures == 1
    send(3)
    assert sorted(look()) == [0, 1, 2, 3]


def test_a_damaged_description_of_an_older_save_that_waits_holds_up_no_later_one(store):
    clock, begun = Hours(), Unfinished()
    (older, _), *_ = made = [make_part("a.ckpt", number, rank, world_size=2) for number in (1, 2) for rank in (0, 1)]
    for part, content in (made[0], *made[2:]):
        put_part(store, part, views_of(content))
    assert begun.gather(store, older, PATIENCE_S, clock) is None
    store.put(ids.description_key(older.save_id, 1), b"{")
    assert sorted(begun.gather(store, made[2][0], PATIENCE_S, clock)) == [0, 1]
    with pytest.raises(CorruptCheckpointError):
        begun.gather(store, older, PATIENCE_S, clock)
