"""Process groups that save side by side, such as stages of a pipeline: one drain, and neither has to do with the other."""

import pytest
from support.draining import drain, names
from support.faulty import Injected, refusing
from support.sharded import readable
from support.story import op_id

from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.place import Place

from .test_drain_sharded import left, pending

RUN = ids.run_id_of(op_id(1))


def stage(node, which, number, rank=0, world_size=1):
    """A rank's part of a stage's save."""
    name, series = f"stage{which}/step_{number}", f"stage{which}/step_#"
    return node.part(name, number, rank, series=series, world_size=world_size)


@pytest.mark.parametrize("why", ["it has failed", "a part has not come"])
def test_a_save_is_not_given_up_where_another_group_has_got_through(nodes, store, why):
    """One process coordinates both groups here; groups on nodes of their own are simulated in tests/sim."""
    here, other = nodes
    missing = stage(here, 0, 1, 0, 2)
    stage(here, 1, 2, 0, 2)
    stage(other, 1, 2, 1, 2)
    if why == "it has failed":
        stage(other, 0, 1, 1, 2)
    assert drain(other).run(once=True)
    away = refusing(store, lambda what, key: key.startswith("stage0") and why == "it has failed", Injected("away"))
    assert drain(here, away).run(once=True)
    assert names(store) == ["stage1/step_2"]
    assert pending(here) == [missing]
    if why != "it has failed":
        stage(other, 0, 1, 1, 2)
        assert drain(other).run(once=True)
    assert drain(here).run(once=True)
    assert [readable(store, f"stage{which}/step_{which + 1}") for which in (0, 1)] == [1, 2]
    assert (left(store), pending(here)) == ([], [])


def test_a_delete_waits_for_a_further_save_of_the_group_that_has_lost_one(node, store):
    """The deleted checkpoint may be the last good one of that group."""
    stage(node, 0, 1)
    assert drain(node).run(once=True)
    lost = stage(node, 0, 2)
    node.cancel(lost)
    old = node.delete("stage0/step_1")
    stage(node, 1, 5)
    # Nobody waits for what only a further save can set free.
    assert drain(node).run()
    assert names(store) == ["stage0/step_1", "stage1/step_5"]
    assert old not in node.states()
    stage(node, 0, 6)
    assert drain(node).run(once=True)
    assert names(store) == ["stage0/step_6", "stage1/step_5"]


@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("lost", ["final", "stage1/step_3"])
def test_no_delete_waits_for_a_save_that_may_have_no_successor(node, store, lost, is_queued):
    """A name that is saved once, or a group that is gone after a restart: only deletes of the same series wait."""
    stage(node, 0, 1)
    stage(node, 0, 2)
    assert drain(node).run(once=True)
    lost = node.part(lost, 3, 0, world_size=1, series=ids.series_of(lost))
    if not is_queued:
        node.cancel(lost)
    old = node.delete("stage0/step_1")
    assert drain(node, refusing(store, lambda what, key: key.startswith(("final", "stage1")))).run(once=True)
    assert node.states()[lost] == ("failed" if is_queued else "skipped")
    assert node.states()[old] == "committed"
    assert names(store) == ["stage0/step_2"]


@pytest.mark.parametrize("named", ["stage0/step_{}", "checkpoint-{}"])
def test_a_delete_waits_no_longer_where_another_rank_commits_or_no_step_is_known(node, store, named):
    """After a restart on fewer nodes, another rank may coordinate; if the step is not known, each name is a series."""

    def save(number, rank=0):
        name = named.format(number)
        return node.part(name, number, rank, world_size=1 + rank, coordinator=rank, series=ids.series_of(name))

    save(1)
    assert drain(node).run(once=True)
    node.cancel(save(2))
    node.delete(named.format(1))
    assert drain(node).run(once=True)
    assert names(store) == [named.format(1)]
    node.part(named.format(6), 6, 0, world_size=2, coordinator=1, series=ids.series_of(named.format(6)))
    save(6, rank=1)
    assert drain(node).run(once=True)
    assert names(store) == [named.format(6)]


@pytest.mark.parametrize("series", ["", "stage0/step_#"])
def test_a_part_says_which_saves_its_own_is_one_of(series):
    """As its ranks agreed: names do not tell whether they are those of one job."""
    facts = SaveFacts("stage0/step_1", ids.save_id(RUN, 1), 1, 2, True, series=series, coordinator=0)
    parts = [facts.describe(rank, Place("d"), (), created=1.0) for rank in (0, 1)]
    read = [Part.from_json(each.to_json(), where="here") for each in parts]
    assert {each.series_key for each in (*parts, *read)} == {(Place("d"), series, 0)}
