"""Simulated lives: a sample of ``make test-sim``, and that a seed tells the whole story."""

import os

import pytest
from sim import drains, two_groups, two_runs
from sim.defects import DEFECTS, ROOT
from sim.run import CALM, ROUGH


@pytest.mark.parametrize("fates", [pytest.param(CALM, marks=pytest.mark.matrix), ROUGH], ids=["calm", "rough"])
def test_no_life_loses_or_mixes_anything(fates):
    steps, found = 0, []
    for seed, world in drains.lives(range(15), fates):
        steps += world.steps
        found += [f"seed {seed}: {world.violation}"] if world.violation else []
    assert found == []
    assert steps > 500


@pytest.mark.parametrize("fates", [pytest.param(CALM, marks=pytest.mark.matrix), ROUGH], ids=["calm", "rough"])
def test_two_runs_on_the_same_names_are_as_one_after_the_other(fates, memory_dir):
    found = []
    for seed in range(10):
        os.mkdir(f"{memory_dir}/{seed}", 0o700)
        world = two_runs.life(seed, fates, folder=f"{memory_dir}/{seed}")
        found += [f"seed {seed}: {world.violation}"] if world.violation else []
    assert found == []


def test_no_group_removes_parts_of_a_live_save_of_another(memory_dir):
    found = []
    for seed in range(5):
        os.mkdir(f"{memory_dir}/{seed}", 0o700)
        world = two_groups.life(seed, folder=f"{memory_dir}/{seed}")
        found += [f"seed {seed}: {world.violation}"] if world.violation else []
    assert found == []


def test_a_seed_gives_the_same_life_again():
    (_, first), (_, again), (_, other) = (next(drains.lives([seed], ROUGH)) for seed in (7, 7, 8))
    assert first.history == again.history
    assert first.digest == again.digest != other.digest


def test_each_defect_that_the_simulation_is_tried_with_has_its_line():
    sources = {where: (ROOT / "tiered_checkpoint_io" / where).read_text() for _, where, _, _ in DEFECTS}
    assert [what for what, where, text, _ in DEFECTS if sources[where].count(text) != 1] == []
