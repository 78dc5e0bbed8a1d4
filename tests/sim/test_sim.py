"""Simulated lives: a sample of ``make test-sim``, and that a seed gives the same life again."""

import os

import pytest
from sim import drains, peers, runs, two_groups, two_runs
from sim.defects import DEFECTS, ROOT
from sim.run import CALM, ROUGH

#: Lives, their kind, how many seeds, and what has to happen in some of them.
SAMPLES = {
    "drains": (drains, ROUGH, 10, ["is killed", "fails behind"]),
    "two runs": (two_runs, ROUGH, 8, ["is killed", "fails behind"]),
    "two groups": (two_groups, CALM, 2, ["is slow"]),
    "runs": (runs, runs.FATAL, 24, ["is killed", "is lost", "is damaged"]),
    "peers": (peers, peers.ROUGH, 12, ["is lost", "is stopped", "no network", "no room for replicas", "has fetched"]),
}


def lived(lives, seed, kind, folder):
    os.mkdir(f"{folder}/{seed}", 0o700)
    return lives.life(seed, kind, folder=f"{folder}/{seed}")


@pytest.mark.parametrize("which", SAMPLES)
def test_no_life_loses_mixes_or_passes_over_anything(which, memory_dir):
    lives, kind, count, happenings = SAMPLES[which]
    worlds = [lived(lives, seed, kind, memory_dir) for seed in range(count)]
    assert [f"seed {seed}: {world.violation}" for seed, world in enumerate(worlds) if world.violation] == []
    assert sum(world.steps for world in worlds) > 300
    history = "".join(line for world in worlds for line in world.history)
    assert [what for what in happenings if what not in history] == []


@pytest.mark.parametrize("which", ["drains", "runs", "peers"])
def test_a_seed_gives_the_same_life_again(which, memory_dir):
    lives, kind, *_ = SAMPLES[which]
    first, other = lived(lives, 7, kind, memory_dir), lived(lives, 8, kind, memory_dir)
    os.mkdir(f"{memory_dir}/again", 0o700)
    again = lived(lives, 7, kind, f"{memory_dir}/again")
    assert first.history == again.history
    assert first.digest == again.digest != other.digest


def test_each_defect_that_the_simulation_is_tried_with_has_its_line():
    sources = {where: (ROOT / "tiered_checkpoint_io" / where).read_text() for _, where, _, _ in DEFECTS}
    assert [what for what, where, text, _ in DEFECTS if sources[where].count(text) != 1] == []
