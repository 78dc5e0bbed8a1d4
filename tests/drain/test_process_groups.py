"""Process groups that save side by side, such as stages of a pipeline: one drain, and neither has to do with the other."""

# ruff: noqa: F811 - a fixture of another module is an argument here

import os

import pytest
from support.draining import Node, names
from support.sharded import readable
from support.story import op_id

from tiered_checkpoint_io.engine.drain import queue
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.model.place import Place

from .test_drain_sharded import Refusing, drain, left, pending, store  # noqa: F401 - fixtures

RUN = ids.run_id_of(op_id(1))
#: Of one process that coordinates both groups, and of two.
RUNS = (
    ("20260101T000000.000000-aaaaaaaa",) * 2,
    ("20260101T000000.000000-aaaaaaaa", "20260101T000001.000000-bbbbbbbb"),
)


@pytest.fixture
def node(memory_dir, store):
    """Makes a node of a name."""

    def make(name):
        os.mkdir(f"{memory_dir}/{name}")
        return Node(f"{memory_dir}/{name}", store.url)

    return make


def stage(node, which, number, rank, run=RUN, **options):
    """A rank's part of a stage's save."""
    series = f"stage{which}/step_#"
    return node.part(f"stage{which}/step_{number}", number, rank, run=run, series=series, **options)


@pytest.mark.parametrize("runs", RUNS)
def test_the_save_of_one_group_waits_for_its_parts_whatever_another_one_has_committed(node, store, runs):
    first, second, third = node("first"), node("second"), node("third")
    for which in (0, 1):
        stage(first, which, which + 1, 0, runs[which], world_size=3)
        stage(second, which, which + 1, 1, runs[which], world_size=3)
    assert drain(second).run(once=True)
    stage(third, 1, 2, 2, runs[1], world_size=3)
    assert drain(third).run(once=True)
    assert drain(first).run(once=True)
    assert names(store) == ["stage1/step_2"]
    assert pending(first) == [ids.save_id(runs[0], 1)]
    stage(third, 0, 1, 2, runs[0], world_size=3)
    assert drain(third).run(once=True)
    assert drain(first).run(once=True)
    assert [readable(store, f"stage{which}/step_{which + 1}") for which in (0, 1)] == [1, 2]
    assert (left(store), pending(first)) == ([], [])


@pytest.mark.parametrize("is_queued", [True, False])
def test_what_has_come_of_a_save_stays_although_another_group_has_got_through(node, store, is_queued):
    """Also where the coordinator's part, of the process that coordinates both, is not there yet: it seals that last."""
    here, other = node("here"), node("other")
    for which in (0, 1):
        stage(other, which, which + 1, 1)
    assert drain(other).run(once=True)
    worker = drain(here, Away(store, "stage0"))
    if is_queued:
        stage(here, 0, 1, 0)
    stage(here, 1, 2, 0)
    assert worker.run(once=True)
    assert names(store) == ["stage1/step_2"]
    if not is_queued:
        stage(here, 0, 1, 0)
    assert drain(here).run(once=True)
    assert [readable(store, f"stage{which}/step_{which + 1}") for which in (0, 1)] == [1, 2]
    assert left(store) == []


class Away(Refusing):
    """A store that is away for the files of some names."""

    def upload(self, key, data, **options):
        if key.startswith(self._names):
            raise StoreError("away", reason="unavailable")
        self._store.upload(key, data, **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_failed_once_is_tried_again_although_another_group_has_got_through(node, store, rank):
    here = node("here")
    ops = [stage(here, which, which + 1, rank) for which in (0, 1)]
    if rank == 0:
        other = node("other")
        for which in (0, 1):
            stage(other, which, which + 1, 1)
        assert drain(other).run(once=True)
    assert drain(here, Away(store, "stage0")).run(once=True)
    assert here.states() == {ops[0]: "failed", ops[1]: "committed"}
    assert drain(here).run(once=True)
    assert set(here.states().values()) == {"committed"}
    assert pending(here) == []


def test_a_delete_waits_for_a_further_save_of_the_group_that_has_lost_one(node, store):
    """What is deleted may be the last good checkpoint of that group."""
    here = node("here")
    stage(here, 0, 1, 0, world_size=1)
    assert drain(here).run(once=True)
    lost = stage(here, 0, 2, 0, world_size=1)
    here.cancel(lost)
    old = here.delete("stage0/step_1")
    stage(here, 1, 5, 0, world_size=1)
    assert drain(here).run(once=True)
    assert names(store) == ["stage0/step_1", "stage1/step_5"]
    assert old not in here.states()
    stage(here, 0, 6, 0, world_size=1)
    assert drain(here).run(once=True)
    assert names(store) == ["stage0/step_6", "stage1/step_5"]


@pytest.mark.parametrize("is_queued", [True, False])
@pytest.mark.parametrize("lost", ["final", "stage1/step_3"])
def test_no_delete_waits_for_a_save_that_may_have_no_successor(node, store, lost, is_queued):
    """A name that is saved once, or a group that is gone after a restart: only deletes of the same series wait."""
    here = node("here")
    stage(here, 0, 1, 0, world_size=1)
    stage(here, 0, 2, 0, world_size=1)
    assert drain(here).run(once=True)
    lost = here.part(lost, 3, 0, world_size=1, series=ids.series_of(lost))
    if not is_queued:
        here.cancel(lost)
    old = here.delete("stage0/step_1")
    assert drain(here, Refusing(store, "final", "stage1")).run(once=True)
    assert here.states()[lost] == ("failed" if is_queued else "skipped")
    assert here.states()[old] == "committed"
    assert names(store) == ["stage0/step_2"]


@pytest.mark.parametrize("named", ["stage0/step_{}", "checkpoint-{}"])
def test_a_delete_waits_no_longer_where_another_rank_commits_or_no_step_is_known(node, store, named):
    """After a restart on fewer nodes, another rank may coordinate; where the step is not known, each name is a series."""
    here = node("here")

    def save(number, rank=0):
        name = named.format(number)
        return here.part(name, number, rank, world_size=1 + rank, coordinator=rank, series=ids.series_of(name))

    save(1)
    assert drain(here).run(once=True)
    here.cancel(save(2))
    here.delete(named.format(1))
    assert drain(here).run(once=True)
    assert names(store) == [named.format(1)]
    here.part(named.format(6), 6, 0, world_size=2, coordinator=1, series=ids.series_of(named.format(6)))
    save(6, rank=1)
    assert drain(here).run(once=True)
    assert names(store) == [named.format(6)]


def test_what_failed_in_ever_new_series_does_not_fill_the_log(node, monkeypatch):
    monkeypatch.setattr(queue, "_KEEP", 8)
    here = node("here")
    for number in range(1, 101):
        lost = Outcome(op_id(number), "save", f"final{number}", -1, "skipped", series=f"final{number}")
        here.queue.finish(lost)
    assert len(here.queue.outcomes()) < 8 + 64 + 2


@pytest.mark.parametrize("series", ["", "stage0/step_#"])
def test_a_part_says_which_saves_its_own_is_one_of(series):
    """As its ranks agreed: names do not tell whether they are those of one job."""
    facts = SaveFacts("stage0/step_1", ids.save_id(RUN, 1), 1, 2, True, series=series, coordinator=0)
    parts = [facts.describe(rank, Place("d"), (), created=1.0) for rank in (0, 1)]
    read = [Part.from_json(each.to_json(), where="here") for each in parts]
    assert {each.series_key for each in (*parts, *read)} == {(Place("d"), series, 0)}
