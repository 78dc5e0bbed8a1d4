"""Simulated lives: a sample of ``make test-sim``, and that a seed tells the whole story."""

import pytest
from sim import drains
from sim.run import CALM, ROUGH


@pytest.mark.parametrize("fates", [CALM, ROUGH], ids=["calm", "rough"])
def test_no_life_loses_or_mixes_anything(fates):
    steps, found = 0, []
    for seed, world in drains.lives(range(20), fates):
        steps += world.steps
        found += [f"seed {seed}: {world.violation}"] if world.violation else []
    assert found == []
    assert steps > 1000


def test_a_seed_gives_the_same_life_again():
    (_, first), (_, again), (_, other) = (next(drains.lives([seed], ROUGH)) for seed in (7, 7, 8))
    assert first.history == again.history
    assert first.digest == again.digest != other.digest
