"""Retention in memory, stated as rules that hold for any content of a node's memory and any evidence."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tiered_checkpoint_io.engine.retention import Rules, complete_here, may_drop, outdated_replicas
from tiered_checkpoint_io.memory.parts import StoredPart
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part

RUNS = [ids.new_run_id(now=1_700_000_000 + number) for number in range(2)]
NOW = ids.save_id(RUNS[1], 99)
SERIES = ids.series_of("step_1")


def save_id(number, run=1):
    return ids.save_id(RUNS[run], number)


def part(
    number, rank=0, run=1, *, size=10, pending=False, replicated=False, name="", dirpath="d", payload="local", **more
):
    name = name or f"step_{number}"
    files = (FileEntry(f"{name}/x", size, 10, ()),)
    content = Content(save_id(number, run), number, -1, payload, 1.0, 2, {}, files, parts=2, **more)
    return StoredPart(Part(name, rank, content, dirpath, pending), Path(f"/saves/{number}/{rank}"), False, replicated)


def rules(rank=0, payload="local", series=SERIES, **more):
    return Rules(NOW, rank, payload, Place("d"), series, **more)


def parts(ranks=2, payload="local"):
    built = st.builds(
        part,
        st.integers(1, 6),
        st.integers(0, ranks - 1),
        st.integers(0, 1),
        size=st.integers(0, 100),
        pending=st.booleans(),
        replicated=st.booleans(),
        dirpath=st.sampled_from("dde"),
        payload=st.just(payload),
    )
    return st.lists(built, unique_by=lambda each: (each.save_id, each.part.rank))


def evidences(held, lacking, keep):
    """Returns the rules with the three kinds of evidence, and the saves that each takes for complete."""
    own = {each.save_id for each in held if rules().covers(each) and each.part.rank == 0}
    done, known = sorted({each.save_id for each in held})[1::2], complete_here(held, rules(keep=keep), lacking)
    return [
        (rules(keep=keep), sorted(own)),
        (known, known.completed),
        (rules(keep=keep, completed=tuple(done)), done),
    ]


def numbers(held):
    return [int(each.part.name.rpartition("_")[2]) for each in held]


# ------------------------------------------------------------------------------------------ properties
@given(parts(), st.integers(1, 4), st.sets(st.builds(save_id, st.integers(1, 6))))
def test_what_is_complete_stays_until_a_newer_one_is(held, keep, lacking):
    for known, completed in evidences(held, lacking, keep):
        gone = may_drop(held, known)
        covered = [each for each in held if known.covers(each)]
        safe = max((each.save_id for each in covered if each.replicated), default="")
        newest = max((each.save_id for each in covered), default="")
        for each in gone:
            assert each in covered, "of another job"
            assert not each.pending
            assert each.part.rank == 0 or each.save_id < RUNS[1], "another rank's"
            assert each.save_id not in completed[-keep:]
            # A complete save may also be one that a restore has loaded from elsewhere.
            assert each.save_id != newest or newest < completed[-1]
            # Either memory will never have all of it, or a newer one is complete.
            assert each.save_id in known.lacking or each.save_id < completed[-1]
            assert each.save_id in known.lacking or each.save_id != safe
            # The first complete save of a run may be incomplete on other nodes.
            assert each.save_id in known.lacking or completed != [save_id(1)] or each.save_id > RUNS[1]
        assert len({id(each) for each in gone}) == len(gone)


@given(parts(1, "full"), st.integers(1, 5))
def test_of_saves_of_one_part_the_newest_stay_and_nothing_else(held, keep):
    gone = may_drop(held, rules(payload="full", keep=keep))
    covered = sorted((each for each in held if each.part.dirpath == "d"), key=lambda each: each.save_id, reverse=True)
    safe = max((each.save_id for each in covered if each.replicated), default="")
    kept = [each for each in covered[keep:] if each.pending or each.save_id == safe]
    assert {each.save_id for each in covered} - {each.save_id for each in gone} == {
        each.save_id for each in covered[:keep] + kept
    }


@given(parts(), st.integers(1, 400), st.sets(st.builds(save_id, st.integers(1, 6))))
def test_room_is_made_from_the_oldest_never_from_the_newest_and_all_or_nothing(held, missing, retained):
    gone = may_drop(held, rules(retained=retained, completed=(save_id(3),)), missing=missing)
    own = [each for each in held if each.part.dirpath == "d" and (each.part.rank == 0 or each.save_id < RUNS[1])]
    assert not {each.save_id for each in gone} & {
        *retained,
        save_id(3),
        *(each.save_id for each in own if each.pending),
        max((each.save_id for each in own), default=""),
        max((each.save_id for each in own if each.replicated), default=""),
    }
    order = [each.save_id for each in gone]
    assert order == sorted(order)
    if gone:
        assert sum(each.part.content.size for each in gone) >= missing
        assert sum(each.part.content.size for each in gone[:-1]) < missing, "no more than needed"


@given(parts(), st.integers(1, 400))
def test_room_in_the_spill_is_made_from_what_the_durable_tier_has_even_the_newest(held, missing):
    drained = [replace(each, part=replace(each.part, durable=True), drained=True) for each in held[::2]]
    held = sorted([*drained, *held[1::2]], key=lambda each: each.save_id)
    gone = may_drop(held, rules(), missing=missing, is_spill=True)
    assert not any(each.pending for each in gone)
    assert not gone or sum(each.part.content.size for each in gone) >= missing
    others = [each for each in drained if each.part.dirpath == "d" and each.part.rank and each.save_id > RUNS[1]]
    assert not any(each in others for each in gone), "another rank's"
    enough = sum(each.part.content.size for each in drained if each not in others) >= missing
    assert bool(gone) >= enough
    newest = max((each.save_id for each in held if each.part.dirpath == "d"), default="")
    assert not [each for each in gone if each.save_id == newest and not each.part.durable and each.part.dirpath == "d"]


# -------------------------------------------------------------------------------------------- examples
def left(held, completed, keep):
    gone = may_drop(held, rules(keep=keep, completed=tuple(map(save_id, completed))))
    return numbers(each for each in held if each not in gone)


def test_what_was_saved_for_another_durable_tier_does_not_count_but_makes_room():
    held = [part(1, dirpath="e"), part(2), part(3)]
    assert left(held, [2, 3], 1) == [1, 3]
    assert numbers(may_drop(held, rules(), missing=10)) == [1]
    assert numbers(may_drop(held, rules(), missing=20)) == [1, 2]
    assert may_drop(held, rules(), missing=30) == [], "the newest of this one stays"


def test_averages_of_the_newest_step_stay_with_it():
    """NeMo saves two checkpoints of one step, and training resumes from both together."""
    held = [part(1, name="x-EMA"), part(2, name="x")]
    held = [replace(each, part=replace(each.part, content=replace(each.part.content, step=7))) for each in held]
    assert may_drop(held, rules(series=""), missing=10) == []
    older = part(0, name="step_0")
    assert may_drop([older, *held], rules(series=""), missing=10) == [older]


def test_an_earlier_run_with_another_payload_makes_room():
    old = [part(1, run=0, payload="sharded"), part(2, run=0, payload="sharded")]
    assert may_drop(old, rules(), missing=10) == [], "before this run has saved, all of it stays"
    held = [*old, part(3)]
    assert numbers(may_drop(held, rules(), missing=10)) == [1]
    assert may_drop(held, rules(), missing=20) == [], "this run's first may not be complete yet"
    held = [*old, part(3), part(4)]
    assert numbers(may_drop(held, rules(), missing=20)) == [1, 2]
    assert numbers(may_drop(held, rules(), missing=30)) == [1, 2, 3]
    assert may_drop(held, complete_here(held, rules())) == [held[2]], "they do not count"
    waiting = [replace(old[0], part=replace(old[0].part, durable=True)), *held[1:]]
    assert numbers(may_drop(waiting, rules(), missing=10)) == [2]


def test_a_process_group_beside_this_one_makes_room_only_of_what_is_durable():
    """The group may be of this run: each group has ids of its own."""
    other = [part(n, run=0, name=f"tp1/step_{n}") for n in (1, 2)]
    assert may_drop([*other, part(4)], rules(), missing=10) == []
    durable = [replace(each, part=replace(each.part, durable=True), drained=True) for each in other]
    assert numbers(may_drop([*durable, part(4)], rules(), missing=10)) == [1]
    assert may_drop([*durable, part(4)], rules(), missing=20) == [], "its newest stays"


def test_a_number_that_is_the_step_makes_no_other_series():
    names = ["checkpoint-{}/step_{}", "ckpt_{:06}", "global_step{}/x", "Iteration{}", "a/iter-{}-loss"]
    for name in names:
        assert len({ids.series_of(name.format(n, n), n) for n in (0, 1, 7, 10, 100, 2000)}) == 1, name
    assert ids.series_of("checkpoint-3/step_5", 5) != ids.series_of("checkpoint-4/step_5", 5), "not the step"
    # Process groups, models and values, whose number the step happens to have.
    for name in (
        "tp{}/step_{}",
        "fold-{}/step_{}",
        "a{}/step_{}",
        "mp_rank_00_{:03}/step_{}",
        "{}/step_{}",
        "v{}.5/step_{}",
    ):
        for number in (0, 1, 50, 100, 128, 2000):
            steps = (0, 1, 50, 100, 128, 2000)
            assert len({ids.series_of(name.format(number, step), step) for step in steps}) == 1, (name, number)


def test_a_load_makes_no_room_at_the_cost_of_another_payload():
    """An evaluation may load full checkpoints during a training that saves sharded ones."""
    shards = {"run": 1, "payload": "sharded"}
    held = [part(1, run=0, payload="full"), part(8, **shards), part(9, **shards), part(3, dirpath="e")]
    known = Rules.of_load(part(2, run=0, payload="full").part)
    assert sorted(numbers(may_drop(held, known, missing=20))) == [1, 3]
    assert may_drop(held, known, missing=30) == []
    assert may_drop(held, known, missing=30, is_spill=True) == []


# -------------------------------------------------------------------------------------------- replicas
def outdated(held, keep):
    return [f"{int(each.save_id.rpartition('-')[2])}r{each.part.rank}" for each in outdated_replicas(held, keep=keep)]


def test_numbers_in_names_do_not_keep_copies_for_ever():
    """Metrics, for example, would make each checkpoint the only one of its name, and so the newest."""
    names = {"full": "best-{n}-acc=0.{n}-{n}e-0{n}.ckpt", "sharded": "best-step={n}-loss=-0.{n}.ckpt"}
    for payload, name in names.items():
        held = [part(n, payload=payload, name=name.format(n=n), replicated=True) for n in range(1, 6)]
        assert outdated(held, 2) == ["1r0", "2r0", "3r0"], payload
        # The companion of each stays with it.
        beside = [part(n, payload=payload, name=f"x-{name}".format(n=n), replicated=True) for n in range(6, 9)]
        assert outdated(held + beside, 2) == ["1r0", "2r0", "3r0", "6r0"], payload


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), unique_by=lambda each: each[:2]),
    st.integers(1, 4),
)
def test_the_newest_safe_copy_of_a_rank_goes_only_if_a_newer_save_is_safe(saves, keep):
    held = [part(save, rank, replicated=safe, name="step_1") for save, rank, safe in saves]
    gone = outdated_replicas(held, keep=keep)
    left = [copy for copy in held if copy not in gone]
    newest_safe = max((copy.save_id for copy in held if copy.replicated), default="")
    for rank in range(3):
        mine = [copy for copy in held if copy.part.rank == rank]
        safe = max((copy.save_id for copy in mine if copy.replicated), default=None)
        if safe == newest_safe:
            assert any(copy in left for copy in mine if copy.save_id == safe)
        assert len([copy for copy in left if copy.part.rank == rank]) <= keep + 1


def test_weights_alone_do_not_replace_what_training_can_resume_from():
    held = [part(1), part(2), part(3, resumable=False), part(4, resumable=False)]
    for keep, gone in ((1, {1, 3}), (2, {1, 3}), (3, {1})):
        assert {each.part.content.step for each in may_drop(held, rules(keep=keep))} == gone
    assert {each.part.content.step for each in may_drop(held, rules(), missing=20)} == {1, 3}
