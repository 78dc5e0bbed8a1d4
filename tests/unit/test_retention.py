"""What memory keeps, stated as rules that hold for any content of the tier."""

from hypothesis import given
from hypothesis import strategies as st

from tiered_checkpoint_io.engine.retention import Held, make_room, surplus

IDS = [f"{number:02d}" for number in range(12)]
held_parts = st.lists(
    st.builds(Held, st.sampled_from(IDS), st.integers(0, 100), st.booleans()), unique_by=lambda part: part.save_id
)
protected = st.sets(st.sampled_from(IDS))


def newest_first(held):
    return sorted((part.save_id for part in held), reverse=True)


def untouchable(held, protect):
    return {part.save_id for part in held if part.pending} | set(protect)


@given(held_parts, st.integers(1, 5), protected)
def test_surplus_keeps_the_newest_the_pending_and_the_protected(held, keep_last, protect):
    removed = surplus(held, keep_last=keep_last, protect=protect)
    kept_by_age = set(newest_first(held)[:keep_last])
    assert not set(removed) & (kept_by_age | untouchable(held, protect))
    assert set(newest_first(held)) - set(removed) <= kept_by_age | untouchable(held, protect), "nothing else is kept"
    assert len(set(removed)) == len(removed)


@given(held_parts, st.integers(1, 400), protected)
def test_room_is_made_from_the_oldest_never_from_the_newest_and_all_or_nothing(held, missing, protect):
    removed = make_room(held, missing=missing, protect=protect)
    sizes = {part.save_id: part.size for part in held}
    free_to_go = sorted(set(newest_first(held)[1:]) - untouchable(held, protect))
    if sum(sizes[save_id] for save_id in free_to_go) < missing:
        assert removed == []
        return
    assert removed == free_to_go[: len(removed)], "the oldest first"
    assert sum(sizes[save_id] for save_id in removed) >= missing
    assert sum(sizes[save_id] for save_id in removed[:-1]) < missing, "and no more than needed"


def test_nothing_held_nothing_removed():
    assert surplus([], keep_last=1) == []
    assert make_room([], missing=1) == []
