"""A rank fails in the middle of a restore: all take the next candidate, or fail alike, within seconds."""

import pytest

#: Far below ``wait_timeout_s``, after which a rank without an answer gives up.
SOON_S = 15.0
#: Rank that fails, and the place: node a has lost its memory; b and c have copies, and serve them.
FULL = [
    (1, "engine.drain.client:DrainHandle.serve"),
    (0, "engine.restore.peers:Peers.part"),
    (0, "model.manifest:FileEntry.check_digest"),
    (0, "memory.tier:MemoryTier.acquire"),
    (0, "memory.tier:MemoryTier.commit"),
    (2, "engine.restore.restore:NodeFetcher.find"),
    (0, "engine.restore.search:choose"),
    (2, "engine.restore.restore:NodeFetcher.hold"),
]
SHARDED = [
    (1, "engine.restore.shards:opened"),
    (1, "engine.session:Session.serve"),
    (2, "engine.restore.search:look"),
    (0, "model.manifest:FileEntry.check_digest"),
    (0, "engine.restore.peers:Peers.part"),
    (0, "engine.restore.peers:Peers.copies"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "failures"), [("full", FULL), ("sharded", SHARDED)], ids=["full", "sharded"])
def test_a_rank_that_fails_tells_the_others(ranks, kind, failures):
    save = [["save_full", n] if kind == "full" else ["save", n, {"rows": 260_000}] for n in (1, 2)]
    newest = 2
    loads = [["load_failing", kind, newest, *failure] for failure in failures]
    sound = ["load_failing", kind, newest, 0, "engine.trust:Trust.hint"]
    # With three copies of everything, nothing would be left for ranks to get from each other.
    ranks("abc", *save, ["close"], replication_factor=3 if kind == "full" else 2)
    # Without replication, node a does not get its parts back by itself.
    by_step = ranks("abc", *loads, sound)
    for failure, answers in zip([*failures, "none"], by_step, strict=True):
        assert max(answer["seconds"] for answer in answers) < SOON_S, failure
        errors = {answer.get("error") for answer in answers}
        assert len(errors) == 1, (failure, answers)
        if failure != "none":
            assert answers[failure[0]].get("failed"), (failure, answers)
        if errors == {None}:
            steps = {answer["step"] for answer in answers}
            assert len(steps) == 1, (failure, answers)
            assert all(answer["matches"] for answer in answers) == (steps == {newest}), (failure, answers)
        else:
            assert len({answer["message"] for answer in answers}) == 1, (failure, answers)
            assert "the disk is broken" in answers[0]["message"]
    assert all(answer["matches"] for answer in by_step[-1]), "what failed has done no harm"


def test_a_rank_that_dies_while_all_load_is_an_error_of_all_others(ranks):
    _, by_step = ranks(
        "abcd",
        ["save_full", 1],
        ["load_failing", "full", 1, 1, "engine.session:Session.serve", {"dies": True}],
        replication_factor=2,
        dead=[1],
    )
    for answer in (by_step[0], *by_step[2:]):
        assert answer["error"] == "RestoreError"
        assert answer["seconds"] < SOON_S
