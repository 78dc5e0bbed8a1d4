"""What a rank may let go of local checkpoints, stated as rules that hold for any content of a node's memory."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.sharded import make_part

from tiered_checkpoint_io.engine.staging.local_retention import Mine, surplus, whole_saves
from tiered_checkpoint_io.memory.tier import StoredPart
from tiered_checkpoint_io.model import ids

RUNS = [ids.new_run_id(now=1_700_000_000 + number) for number in range(2)]
SERIES = ids.series_of("step_1")
MINE = Mine(0, ids.save_id(RUNS[1], 99), SERIES)


def stored(number, rank, run=1, pending=False, replicated=False):
    part, _ = make_part(f"step_{number}", number, rank, kind="local", run=RUNS[run])
    return StoredPart(part, Path(f"/saves/{number}/{rank}"), not pending, replicated)


held_parts = st.lists(
    st.builds(stored, st.integers(1, 6), st.integers(0, 1), st.integers(0, 1), st.booleans(), st.booleans()),
    unique_by=lambda each: (each.save_id, each.part.rank),
)
lacking_ids = st.sets(st.builds(lambda number: ids.save_id(RUNS[1], number), st.integers(1, 6)))


@given(held_parts, st.integers(1, 4), lacking_ids)
def test_what_is_whole_stays_until_a_newer_one_is(held, keep_last, lacking):
    gone = surplus(held, MINE, keep_last, lacking)
    of_run = [each for each in held if MINE.of_this_run(each)]
    whole = whole_saves(of_run, SERIES, lacking)
    newest = max((each.save_id for each in of_run), default="")
    for each in gone:
        assert not each.pending
        assert MINE(each), "another rank's"
        assert each.save_id not in whole[-max(1, keep_last - 1) :]
        assert each.save_id != newest
        # Either no memory will ever make it whole, or a newer one is.
        assert each.save_id in lacking or (whole and each.save_id < whole[-1])
        assert MINE.of_this_run(each) or len(whole) >= 2, "of an earlier start"
    assert len({id(each) for each in gone}) == len(gone)


def test_a_save_that_some_node_has_no_room_for_lets_no_older_one_go():
    held = [stored(number, 0) for number in (1, 2, 3)]
    lacking = {ids.save_id(RUNS[1], number) for number in (2, 3)}
    assert [each.part.name for each in surplus(held, MINE, 2)] == ["step_1", "step_2"]
    assert [each.part.name for each in surplus(held, MINE, 2, lacking)] == ["step_2"], "of no use to anybody"
    assert whole_saves(held, SERIES, lacking) == [ids.save_id(RUNS[1], 1)]
