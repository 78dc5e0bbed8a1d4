"""What memory keeps, stated as rules that hold for any content of the tier."""

from hypothesis import given
from hypothesis import strategies as st

from tiered_checkpoint_io.engine.staging.retention import Copy, Held, make_room, outdated_copies, surplus

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


# ----------------------------------------------------------------------------------- copies on peers
def test_what_is_safe_with_peers_stays_until_a_newer_save_is():
    held = [Held("1", 10, pending=False, replicated=True), *(Held(str(n), 10, pending=False) for n in (2, 3, 4))]
    assert surplus(held, keep_last=2) == ["2"]
    assert make_room(held, missing=25) == []
    assert make_room(held, missing=20) == ["2", "3"]
    newer = [*held[:3], Held("4", 10, pending=False, replicated=True)]
    assert surplus(newer, keep_last=2) == ["2", "1"]
    assert make_room(newer, missing=25) == ["1", "2", "3"]


def copies(*told, name="step=1.ckpt"):
    """Of ``"3r1+"``: save 3, rank 1's part, safe."""
    return [Copy(each[0], int(each[2]), name, each.endswith("+")) for each in told]


def ids_of(removed):
    return [f"{copy.save_id}r{copy.rank}" for copy in removed]


def test_of_each_ranks_copies_the_newest_stay_and_the_newest_that_is_safe():
    held = copies("1r0+", "2r0+", "3r0", "4r0", "2r1+", "4r1")
    assert ids_of(outdated_copies(held, keep_last=2)) == ["1r0"]
    assert ids_of(outdated_copies(held, keep_last=1)) == ["1r0", "3r0"]


def test_copies_for_ranks_that_send_here_no_longer_go_once_a_newer_save_is_safe():
    assert ids_of(outdated_copies(copies("1r0+", "2r1", "3r1"), keep_last=2)) == []
    assert ids_of(outdated_copies(copies("1r0+", "2r1", "3r1+"), keep_last=2)) == ["1r0"]


def test_process_groups_that_save_side_by_side_keep_their_own_copies():
    held = [*copies("1r0+", name="a/step_1"), *copies("2r0+", "3r0+", name="b/step_1")]
    assert outdated_copies(held, keep_last=2) == []


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), unique_by=lambda each: each[:2]),
    st.integers(1, 4),
)
def test_the_newest_safe_copy_of_a_rank_goes_only_if_a_newer_save_is_safe(told, keep_last):
    held = [Copy(str(save), rank, "step=1.ckpt", safe) for save, rank, safe in told]
    left = set(held) - set(outdated_copies(held, keep_last=keep_last))
    newest_safe = max((copy.save_id for copy in held if copy.replicated), default="")
    for rank in range(3):
        mine = [copy for copy in held if copy.rank == rank]
        safe = max((copy.save_id for copy in mine if copy.replicated), default=None)
        if safe == newest_safe:
            assert any(copy in left for copy in mine if copy.save_id == safe)
        assert len([copy for copy in left if copy.rank == rank]) <= keep_last + 1
