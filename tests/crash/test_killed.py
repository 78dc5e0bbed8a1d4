"""Killed with SIGKILL anywhere: a small sample of ``make test-crash``, which takes every point of every story."""

import functools

import pytest
from support.killing import Zygote
from support.sweeping import Place, Restore, Trainer, points_of
from support.swept_drains import FullDrain, ShardedDrain
from support.swept_peers import Replication, RestoreFromPeers, Training

SEED = 1
further = functools.partial(pytest.param, marks=pytest.mark.matrix)


@pytest.fixture(scope="module")
def zygote():
    with Zygote() as zygote:
        yield zygote


def sample(story, place, count, **options):
    found = [story.at(place, point) for point in points_of(story.rehearse(place), sample=count, seed=SEED, **options)]
    assert found
    assert [each for each in found if each is not None and each.why] == []


@pytest.mark.parametrize(
    "story",
    [
        further(Trainer("full", "thread", "trainer and drain")),
        further(Trainer("full", "process", "drain")),
        Trainer("sharded", "process", "trainer, then drain"),
        further(FullDrain()),
        further(ShardedDrain()),
        further(Restore("full", "the node lost")),
        Restore("sharded", "the newest damaged"),
        Replication("sender"),
        further(Replication("receiver")),
        further(Training("trainer-a")),
        further(RestoreFromPeers("full", "loader-a")),
        further(RestoreFromPeers("sharded", "loader-b")),
    ],
    ids=lambda story: story.title,
)
def test_a_sample(story, zygote, memory_dir, tmp_path):
    sample(story, Place(zygote, f"{memory_dir}/m", tmp_path), 2)


@pytest.mark.matrix
@pytest.mark.parametrize("drain", [FullDrain, further(ShardedDrain)])
def test_a_sample_on_s3(drain, zygote, memory_dir, s3_url):
    sample(drain(large=True), Place(zygote, f"{memory_dir}/m", s3_url, s3=True), 2, s3=True)
