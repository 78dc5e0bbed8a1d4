"""Killed with SIGKILL anywhere: what is durable stays whole, and the next drain finishes the work.

At every moment a reader sees the story behind its k-th operation, but for the names that the next
one changes: those are old or new. It never goes back behind what was told to be committed.
"""

import functools
import io
import random
import shutil
from pathlib import Path

import pytest
import torch
from support import sharded, story
from support.draining import Node, names, objects, readable
from support.killing import Zygote

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.engine.commit import verify
from tiered_checkpoint_io.engine.queue import Queue
from tiered_checkpoint_io.storage import open_store
from tiered_checkpoint_io.storage.memory import MemoryTier

MOMENTS = story.moments()
#: Above the smallest part size, so that uploads to S3 go in several parts.
LARGE = 18 << 20
WRITES = tuple(f"s3:{name}" for name in ("Put", "Delete", "Complete", "Upload", "Create"))


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


def points(seed, effects, dirpath, durable, others):
    """Behind which effects to kill, from 1: a seeded choice of those on the durable tier, and of the others."""
    chooser = random.Random(seed)
    on_tier = [n for n, what in enumerate(effects, start=1) if what.startswith((dirpath, *WRITES))]
    elsewhere = [n for n in range(1, len(effects) + 1) if n not in on_tier]
    assert len(on_tier) >= len(story.OPERATIONS)
    return [
        *chooser.sample(on_tier, min(durable, len(on_tier))),
        *chooser.sample(elsewhere, min(others, len(elsewhere))),
    ]


@functools.cache
def content(number):
    large = story.OPERATIONS[number - 1][1] == "deep/c.ckpt"
    return random.Random(number).randbytes(LARGE if large else 1000 + number)


def number_of(data):
    """Which save wrote ``data``: bytes of ours, or a state that torch saved."""
    if data is None:
        return None
    if data[:2] == b"PK":
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        expected = story.state(loaded["global_step"])
        assert torch.equal(loaded["w"], expected["w"])
        return loaded["global_step"]
    return next(number for number in range(1, len(MOMENTS)) if data == content(number))


def view(store):
    return {name: number_of(readable(store, name)) for name in names(store)}


def assert_a_moment(store, queue):
    """Some moment of the story, or a step into the next, and none before what was told."""
    told = [outcome.op_id for outcome in queue.outcomes() if outcome.state == "committed"]
    assert told == [story.op_id(number) for number in range(1, len(told) + 1)]
    seen = view(store)
    for k in range(len(told), len(MOMENTS)):
        now, then = MOMENTS[k][0], MOMENTS[min(k + 1, len(MOMENTS) - 1)][0]
        if all(seen.get(name) in (now.get(name), then.get(name)) for name in {*seen, *now, *then}):
            return
    raise AssertionError(f"{len(told)} operations were told to be done, but a reader sees {seen}")


def fill(node):
    for number, (action, name, target) in enumerate(story.OPERATIONS, start=1):
        node.save(name, content(number)) if action == "save" else node.request(action, name, target)


def killed_drains(zygote, memory_dir, dirpath_of, seed, durable, others):
    def one(kill_at, again_at):
        shutil.rmtree(Path(memory_dir), ignore_errors=True)
        Path(memory_dir).mkdir(mode=0o700)
        node = Node(memory_dir, dirpath_of(kill_at), chunk_size_MB=8, max_write_concurrency=1)
        fill(node)
        node.tier.close()
        store = open_store(node.config)
        try:
            effects = zygote.run("drain", kill_at=kill_at, root=str(node.root))
            assert (effects is None) == (kill_at > 0)
            assert_a_moment(store, node.queue)
            if again_at and zygote.run("drain", kill_at=again_at, root=str(node.root)) is None:
                assert_a_moment(store, node.queue)
            zygote.run("drain", root=str(node.root))
            assert (view(store), objects(store)) == MOMENTS[-1]
            assert node.states() == {story.op_id(n): "committed" for n in range(1, len(MOMENTS))}
            assert not [stored for stored in node.tier.parts() if stored.pending]
            assert not list((node.root / "requests").glob("[!.]*"))
        finally:
            store.close()
        return effects

    effects = one(0, 0)
    chooser = random.Random(seed)
    for kill_at in points(seed, effects, dirpath_of(0), durable, others):
        one(kill_at, chooser.choice([0, chooser.randrange(1, len(effects))]))


def test_a_drain_to_a_directory_killed_anywhere(zygote, memory_dir, tmp_path):
    killed_drains(zygote, memory_dir, lambda kill_at: str(tmp_path / str(kill_at)), seed=1, durable=50, others=5)


def test_a_drain_to_s3_killed_anywhere(zygote, memory_dir, s3_url):
    killed_drains(zygote, memory_dir, lambda kill_at: f"{s3_url}/{kill_at}", seed=2, durable=12, others=3)


def killed_drains_of_parts(zygote, memory_dir, dirpath_of, seed, durable, others):
    """Two ranks of one node: a save, another over it, an alias, a third save, and a delete."""

    def one(kill_at):
        shutil.rmtree(Path(memory_dir), ignore_errors=True)
        Path(memory_dir).mkdir(mode=0o700)
        node = Node(memory_dir, dirpath_of(kill_at), chunk_size_MB=8, max_write_concurrency=1)
        for number, name, size in ((1, "a", 1000), (2, "a", sharded.LARGE), (4, "b", 1000)):
            for rank in (1, 0):
                node.part(name, number, rank, suffix=f"-{number}", size=size)
            if number == 2:
                node.alias("last", "a")
        node.delete("a")
        node.tier.close()
        store = open_store(node.config)
        try:
            effects = zygote.run("drain", kill_at=kill_at, root=str(node.root))
            assert (effects is None) == (kill_at > 0)
            seen = {name: sharded.readable(store, name) for name in ("a", "last", "b")}
            told = [number for number in range(1, 6) if node.states().get(story.op_id(number)) == "committed"]
            assert told == list(range(1, len(told) + 1))
            later = [(None, None, None), (1, None, None), (2, None, None), (2, 2, None), (2, 2, 4), (None, 2, 4)]
            assert tuple(seen.values()) in later[len(told) : len(told) + 2]
            zygote.run("drain", root=str(node.root))
            assert (names(store), sharded.readable(store, "last"), sharded.readable(store, "b")) == (
                ["b", "last"],
                2,
                4,
            )
            kept = {f"{name}/.metadata" for name in "ab"}
            kept |= {
                f"{name}/__{f}-{n}.distcp" for name, n in (("a", 2), ("b", 4)) for f in ("0_0", "0_1", "1_0", "1_1")
            }
            assert set(objects(store)) == kept
            assert not list(store.list(ids.PART_PREFIX))
            assert set(node.states().values()) == {"committed"}
            assert not [stored for stored in node.tier.parts() if stored.pending]
            assert not list((node.root / "requests").glob("[!.]*"))
        finally:
            store.close()
        return effects

    for kill_at in points(seed, one(0), dirpath_of(0), durable, others):
        one(kill_at)


def test_a_drain_of_parts_to_a_directory_killed_anywhere(zygote, memory_dir, tmp_path):
    killed_drains_of_parts(zygote, memory_dir, lambda kill_at: str(tmp_path / str(kill_at)), 4, durable=25, others=5)


def test_a_drain_of_parts_to_s3_killed_anywhere(zygote, memory_dir, s3_url):
    killed_drains_of_parts(zygote, memory_dir, lambda kill_at: f"{s3_url}/{kill_at}", 5, durable=8, others=2)


def test_a_trainer_killed_anywhere_with_its_drain(zygote, memory_dir, tmp_path):
    def one(kill_at):
        memory, dirpath = Path(memory_dir) / str(kill_at), tmp_path / str(kill_at)
        memory.mkdir()
        effects = zygote.run("trainer", kill_at=kill_at, memory_dir=str(memory), dirpath=str(dirpath))
        roots = list(memory.glob("tiered-*/default"))
        if effects is None and (not roots or not (roots[0] / "drain.json").exists()):
            # Before anything was saved.
            assert not dirpath.exists() or not any(dirpath.iterdir())
            return effects
        tier, queue = MemoryTier.open(str(memory), "default"), Queue(roots[0])
        store = open_store(Node.config_of(str(memory), str(dirpath)))
        assert_a_moment(store, queue)
        assert not tier.damaged()
        reached = {outcome.op_id for outcome in queue.outcomes()} | {request.op_id for request in queue.requests()}
        for stored in tier.parts():
            reached.add(stored.save_id)
            with tier.reading(stored) as views:
                for entry in stored.part.content.files:
                    verify(entry, views[entry.basename], tier="memory", where=entry.path)
                    assert number_of(bytes(views[entry.basename])) == stored.part.content.step
        zygote.run("drain", root=str(tier.root))
        k = len(reached)
        assert reached == {story.op_id(number) for number in range(1, k + 1)}
        assert (view(store), objects(store)) == MOMENTS[k]
        tier.close()
        return effects

    effects = one(0)
    assert effects is not None
    for kill_at in points(3, effects, str(tmp_path), durable=9, others=9):
        one(kill_at)
