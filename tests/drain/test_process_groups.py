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
    """Returns a rank's part of a stage's save."""
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


@pytest.mark.parametrize("series", ["", "stage0/step_#"])
def test_a_part_says_which_saves_its_own_is_one_of(series):
    """The ranks agreed on it: names do not show whether they are of one job."""
    facts = SaveFacts("stage0/step_1", ids.save_id(RUN, 1), 1, 2, True, series=series, coordinator=0)
    parts = [facts.describe(rank, Place("d"), (), created=1.0) for rank in (0, 1)]
    read = [Part.from_json(each.to_json(), where="here") for each in parts]
    assert {each.series_key for each in (*parts, *read)} == {(Place("d"), series, 0)}
