"""A rank fails in the middle of a restore: all go on to what is left, or fail alike, within seconds."""

import pytest

from tiered_checkpoint_io.errors import RestoreError

#: Far below ``wait_timeout_s``, by which a rank that hears nothing gives up.
SOON_S = 15.0
#: Which rank fails, and where: node a has lost its memory; b and c have copies, and b is the first to send.
FULL = [
    (1, "engine.restore.part_moves:reading", 1),
    (1, "engine.restore.part_moves:find_part", 1),
    (0, "model.manifest:FileEntry.check_chunk", 1),
    (0, "memory.tier:MemoryTier.acquire", 1),
    (0, "memory.tier:MemoryTier.commit", 1),
    (2, "engine.restore.restore:NodeFetcher.find", 1),
    (2, "engine.restore.part_moves:in_pieces", 1),
    (0, "engine.restore.search:choose", 1),
    (2, "engine.restore.restore:NodeFetcher.hold", 1),
]
SHARDED = [
    (1, "engine.restore.shard_files:opened", 1),
    (0, "model.manifest:FileEntry.check_chunk", 2),
    (0, "memory.tier:MemoryTier.acquire", 1),
    (0, "memory.tier:MemoryTier.commit", 1),
    (2, "engine.restore.search:look", 1),
    (1, "engine.restore.part_moves:moves_to_owners", 1),
    (0, "engine.restore.shard_files:ShardFiles.peek", 1),
    (1, "engine.restore.shard_files:ShardFiles.put", 1),
    (2, "engine.restore.shard_exchange:plan", 1),
    (1, "adapters.dcp_reader:PlanReader.spans", 1),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "failures"), [("full", FULL), ("sharded", SHARDED)], ids=["full", "sharded"])
def test_a_rank_that_fails_tells_the_others(ranks, kind, failures):
    save = [["save_full", n] if kind == "full" else ["save", n, {"rows": 260_000}] for n in (1, 2)]
    newest = 2
    loads = [["load_failing", kind, newest, *failure] for failure in failures]
    sound = ["load_failing", kind, newest, 0, "engine.trust:Trust.hint"]
    # With three copies of everything, nothing would be left for ranks to get from each other.
    told = ranks("abc", *save, *loads, sound, replication_factor=3 if kind == "full" else 2)[len(save) :]
    for failure, answers in zip([*failures, "none"], told, strict=True):
        assert max(answer["seconds"] for answer in answers) < SOON_S, failure
        errors = {answer.get("error") for answer in answers}
        assert len(errors) == 1, (failure, answers)
        if failure != "none":
            assert answers[failure[0]]["failed"], f"{failure} was never called"
        if errors == {None}:
            steps = {answer["step"] for answer in answers}
            assert len(steps) == 1, (failure, answers)
            assert all(answer["matches"] for answer in answers) == (steps == {newest}), (failure, answers)
        else:
            assert len({answer["message"] for answer in answers}) == 1, (failure, answers)
            assert "the disk is broken" in answers[0]["message"]
    assert all(answer["matches"] for answer in told[-1]), "what failed has done no harm"


@pytest.mark.matrix
def test_what_one_node_can_not_send_another_one_sends(ranks):
    """Both a and c have what b needs of rank 2's file; a, which keeps a copy, is asked first."""
    save = [["save", n, {"rows": 260_000}] for n in (1, 2)]
    peek = ["load_failing", "sharded", 2, 0, "engine.restore.shard_files:ShardFiles.peek", 1]
    cases = {
        "can't read it": {},
        "bytes change on the way": {"spoils": True},
        "none is left": {"also": [2], "lasts": True},
    }
    told = ranks("abc", *save, *([*peek, case] for case in cases.values()), replication_factor=2)[len(save) :]
    for case, answers in zip(cases, told, strict=True):
        assert [answer.get("error") for answer in answers] == [None] * 3, (case, answers)
        assert max(answer["seconds"] for answer in answers) < SOON_S, case
        assert answers[0]["failed"], case
        # Where no node has it any more, all go on to the save before, as ever.
        wanted = 1 if case == "none is left" else 2
        assert [answer["step"] for answer in answers] == [wanted] * 3, (case, answers)
        assert [answer["matches"] for answer in answers] == [wanted == 2] * 3, case
    why = [" ".join(answers[1]["rejected"]) for answers in told]
    assert "rank 0 could not send it" in why[0]
    assert "the disk is broken" in why[0]
    assert "differ from their hash" in why[1]


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.matrix)])
def test_a_rank_that_dies_while_it_sends_is_an_error_of_all_others(ranks, kind):
    save = ["save_full", 1] if kind == "full" else ["save", 1, {"rows": 260_000}]
    _, told = ranks(
        "abcd",
        save,
        ["load_failing", kind, 1, 1, "engine.ranks.rounds:status_of", 1, {"dies": True}],
        replication_factor=2,
        dead=[1],
    )
    for answer in (told[0], *told[2:]):
        # DCP tells all ranks of failures by an exchange of its own, which then fails as well.
        assert answer["error"] in (RestoreError.__name__, *(["RuntimeError"] if kind == "sharded" else []))
        assert answer["seconds"] < SOON_S
