"""Killed with SIGKILL anywhere: a small sample of ``make test-crash``, which takes every point of every story."""

import pytest
from support.killing import Zygote
from support.sweeping import Place, Restore, Trainer, points_of
from support.swept_peers import Replication

SEED = 1


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as zygote:
        yield zygote


@pytest.mark.parametrize(
    "story",
    [
        Trainer("sharded", "process", "trainer, then drain"),
        Restore("sharded", "the newest damaged"),
        Replication("sender"),
    ],
    ids=lambda story: story.title,
)
def test_a_sample(story, zygote, memory_dir, durable_dir):
    place = Place(zygote, f"{memory_dir}/m", durable_dir)
    found = [story.at(place, point) for point in points_of(story.rehearse(place), sample=2, seed=SEED)]
    assert any(found)
    assert [each for each in found if each is not None and each.why] == []
