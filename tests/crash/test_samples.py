"""Killed anywhere, and crashes of a machine: small samples of ``make test-crash`` and ``make test-crash-states``."""

import pytest
from support.killing import Zygote
from support.node_states import NODES, try_node
from support.sweeping import Place, Restore, Trainer, points_of
from support.swept_peers import Replication
from support.swept_states import STORIES, try_story

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


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.title)
def test_every_state_that_a_crash_may_leave_is_readable(story, memory_dir):
    tried, bad = try_story(story(), memory_dir, seed=1, sample=0.03)
    assert bad == []
    assert tried > 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", NODES, ids=lambda kind: kind.title)
def test_a_node_that_lost_its_power_takes_nothing_torn_for_intact_and_brings_back_nothing_deleted(kind, memory_dir):
    tried, bad = try_node(kind, memory_dir, seed=1, sample=0.06)
    assert bad == []
    assert tried > 20
