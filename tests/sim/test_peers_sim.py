"""Simulated lives with replicas on other machines: a sample of ``make test-sim``."""

import os

import pytest
from sim import peers


def lived(seed, kind, folder):
    os.mkdir(f"{folder}/{seed}", 0o700)
    return peers.life(seed, kind, folder=f"{folder}/{seed}")


@pytest.mark.parametrize(
    "kind", [pytest.param(peers.CALM, marks=pytest.mark.matrix), peers.ROUGH], ids=["calm", "rough"]
)
def test_no_loss_of_a_machine_takes_what_was_marked_as_replicated(kind, memory_dir):
    worlds = [lived(seed, kind, memory_dir) for seed in range(20)]
    assert [f"seed {seed}: {world.violation}" for seed, world in enumerate(worlds) if world.violation] == []
    history = "".join(line for world in worlds for line in world.history)
    # The lives are about something.
    for what in ("is lost", "is stopped", "no network", "no room for replicas", "True 0", "marked as replicated"):
        assert what in history, f"in no life: {what}"


def test_a_seed_gives_the_same_replicas_again(memory_dir):
    first, other = lived(7, peers.ROUGH, memory_dir), lived(8, peers.ROUGH, memory_dir)
    os.mkdir(f"{memory_dir}/again", 0o700)
    again = lived(7, peers.ROUGH, f"{memory_dir}/again")
    assert first.history == again.history
    assert first.digest == again.digest != other.digest
