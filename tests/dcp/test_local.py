"""Local checkpoints by real ranks: each its own state, saves without collectives; and under an agent of torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.failing import failing
from support.losing import lose_memory
from support.sharded import incomplete

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.engine.durable.files import files_of
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.directory import DirectoryStore


def got(answers):
    for answer in answers:
        assert "got" in answer, answer
    return [answer["got"] for answer in answers]


def manifest(tmp_path, name):
    path = tmp_path / "durable" / ids.manifest_key(name)
    return Manifest.from_json(path.read_bytes(), where=str(path)) if path.exists() else None


def test_ranks_save_alone_and_load_the_same_over_restarts_and_overwrites(job, tmp_path, memory_dir):
    memory = {"save_to_s3": False}
    # Ranks that train together are never more than one save apart.
    saved_1, _, saved_2, _, failed, half, held, loaded, _, again, fsdp = job(
        2,
        ["save_local", 1, memory],
        ["meet"],
        ["save_local", 2, memory],
        ["meet"],
        ["save_local", 3, {"fails": [1, "commit"], **memory}],
        ["save_local", 4, {"only": [0], **memory}],
        ["parts"],
        ["load_local", 2],
        ["meet"],
        ["load_local", 1, {"checkpoint_id": "step_1"}],
        ["fsdp_local", 30, {}],
        memory_keep_last=3,
        save_to_s3=False,
    )
    for answers in (saved_1, saved_2):
        assert [answer["calls"] for answer in got(answers)] == [[], []]
        assert [answer["saved"] for answer in got(answers)] == [True, True]
    assert [answer["saved"] for answer in got(failed)] == [True, False]
    assert got(half)[1] is None
    by_name = {}
    for name, rank, save_id, durable in got(held)[0]:
        assert not durable
        by_name.setdefault(name, {})[rank] = save_id
    assert {name: sorted(of) for name, of in by_name.items()} == {
        "step_1": [0, 1],
        "step_2": [0, 1],
        "step_3": [0],
        "step_4": [0],
    }
    ordered = [max(by_name[f"step_{step}"].values()) for step in (1, 2, 3, 4)]
    assert ordered == sorted(set(ordered)), "ids sort in the order of the saves"
    assert all(len(set(of.values())) == 1 for of in by_name.values()), "one id for all ranks"
    for answer in got(loaded):
        assert (answer["same"], answer["step"]) == (True, 2), "the newest that is whole"
    assert [answer["same"] for answer in got(again)] == [True, True]
    assert got(fsdp) == [True, True]

    # A new start: a save of only one rank does not mix with a new save under its name.
    loaded, redone, _, held, _, repaired, over, _, final, _, _, _, older, apart = job(
        2,
        ["load_local", 2, {"checkpoint_id": "step_2"}],
        ["save_local", 4, {"content": 7}],
        ["meet"],
        ["parts"],
        ["damage", 1, "step_4"],
        ["load_local", 7, {"checkpoint_id": "step_4"}],
        ["save_local", 4, {"content": 8}],
        ["meet"],
        ["load_local", 8, {"checkpoint_id": "step_4"}],
        ["save_local", 5, memory],
        ["meet"],
        ["damage", 1, "step_5"],
        ["load_local", 8],
        ["load_local", 8, {"checkpoint_id": ["step_4", "step_2"]}],
        memory_keep_last=3,
    )
    assert [answer["same"] for answer in got(loaded)] == [True, True]
    assert [answer["ended"] for answer in got(redone)] == [["step_4"], ["step_4"]]
    new = [(rank, save_id) for name, rank, save_id, durable in got(held)[0] if name == "step_4" and durable]
    assert [rank for rank, _ in new] == [0, 1]
    assert len({save_id for _, save_id in new}) == 1
    assert new[0][1] > ordered[-1]
    for answer in got(repaired):
        assert (answer["same"], answer["step"]) == (True, 4)
        assert answer["rejected"], "all ranks know of the flipped byte"
    assert [answer["saved"] for answer in got(over)] == [True, True]
    assert [(answer["same"], answer["rejected"]) for answer in got(final)] == [(True, []), (True, [])]
    assert [(answer["same"], answer["step"]) for answer in got(older)] == [(True, 4)] * 2, "one is damaged on rank 1"
    for answer in apart:
        assert "the ranks ask for different checkpoints: ['step_2', 'step_4']" in answer["message"]
    found = manifest(tmp_path, "step_4")
    assert (found.content.kind, found.content.world_size, found.previous) == ("local", 2, ())
    store = DirectoryStore(str(tmp_path / "durable"))
    files = files_of(store, found.content)
    assert sorted(os.listdir(tmp_path / "durable" / "step_4")) == sorted(f.basename for f in files.all())
    (mine,) = files.of_rank(1)
    assert mine.basename.startswith("rank-00001-")
    plain = torch.load(tmp_path / "durable" / mine.path)
    assert plain["text"] == "shard 1 of 2, 8"
    assert not incomplete(store)

    # Another number of shards, and another kind: refused, and said so.
    state = {"text": ""}
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
    with pytest.raises(RestoreError, match="of 2 shards, and 1 are to load it.*shard degree has to stay"):
        dcp.load(state, kind="local", **options)
    with pytest.raises(CheckpointNotFoundError, match="'step_9'"):
        dcp.load(state, checkpoint_id="step_9", kind="local", **options)
    dcp.save({"t": torch.ones(2)}, checkpoint_id="step_11", **options, save_to_s3=False)
    with failing("other_kind", match="step_11 is a sharded checkpoint"):
        dcp.load(state, checkpoint_id="step_11", kind="local", **options)
    dcp.TieredStorageWriter(**options).close()


def test_a_save_that_fails_on_one_rank_before_it_has_begun_leaves_later_ones_in_step(job, tmp_path):
    """The name has no step, so each rank has to count all saves of it: else parts of two would make one checkpoint."""
    name = {"name": "last", "require_step": False}
    first, _, failed, _, loaded, _, saved, _, again = job(
        2,
        ["save_local", 1, name],
        ["meet"],
        ["save_local", 2, {**name, "sync": True, "fails": [1, "parts"]}],
        ["meet"],
        ["load_local", 1, {"checkpoint_id": "last"}],
        ["meet"],
        ["save_local", 3, name],
        ["meet"],
        ["load_local", 3, {"checkpoint_id": "last"}],
        on_save_error="raise",
        wait_timeout_s=40,
    )
    assert [answer["ended"] for answer in got(first)] == [["last"]] * 2
    assert "too many open files" in failed[1]["message"]
    assert "a rank has no part of it" in failed[0]["message"], "it does not wait for that part"
    assert failed[0]["seconds"] < 20
    assert [answer["same"] for answer in got(loaded)] == [True, True], "the checkpoint before is as it was"
    assert [answer["ended"] for answer in got(saved)] == [["last"]] * 2
    assert [answer["same"] for answer in got(again)] == [True, True]
    assert (tmp_path / "durable" / ids.manifest_key("last")).exists()


def test_one_rank_of_each_replication_group_writes_and_all_load_what_all_can_get(job, tmp_path, memory_dir):
    # Ranks 0 and 1 on node a, their replicas on node b.
    saved, held, _, loaded, brought, reported, _, named, _, only_together = job(
        4,
        ["save_replicated", 5, [[0, 2], [1, 3]]],
        ["parts"],
        ["meet"],
        ["load_replicated", 5, [[0, 2], [1, 3]]],
        ["parts"],
        ["save_told", 6, [[0, 2], [1, 3]], [[0, 1], [2, 3]], [2, 1]],
        ["meet"],
        ["load_replicated", 6, [[0, 2], [1, 3]], {"checkpoint_id": "step_6"}],
        ["meet"],
        ["save_told", 7, [[0, 2], [1, 3]], [[0, 1], [2, 3]], [2, 1], {"save_to_s3": False}],
        nodes="aabb",
    )
    assert [answer["saved"] for answer in got(saved)] == [True, True, False, False]
    assert [answer["calls"] for answer in got(saved)] == [[]] * 4
    assert [len(parts) for parts in got(held)] == [2, 2, 0, 0]
    assert [answer["same"] for answer in got(loaded)] == [True] * 4
    assert [[rank for _, rank, _, _ in parts] for parts in got(brought)] == [[0, 1]] * 4, "fetched once a node"
    assert manifest(tmp_path, "step_5").content.world_size == 2
    assert [answer["saved"] for answer in got(reported) + got(only_together)] == [False, True, True, False] * 2
    assert [answer["same"] for answer in got(named)] == [True] * 4
    # Of step 7, each node's memory has one part, and no other tier has any.
    loaded, _ = job(4, ["load_replicated", 7, [[0, 2], [1, 3]]], ["meet"], nodes="aabb")
    assert [(answer["same"], answer["step"], answer["rejected"]) for answer in got(loaded)] == [(True, 7, [])] * 4
    # Fewer replicas may resume from it: only the shard degree counts.
    lose_memory(f"{memory_dir}/a")
    os.makedirs(f"{memory_dir}/a")
    (loaded,) = job(2, ["load_local", 6], nodes="aa")
    assert [(answer["same"], answer["step"]) for answer in got(loaded)] == [(True, 6)] * 2


@pytest.mark.parametrize("kind", ["full", "Local"])
def test_other_kinds_are_refused(kind, memory_dir):
    with pytest.raises(ConfigError, match="allowed: 'sharded', 'local'"):
        dcp.async_save({}, checkpoint_id="step_1", kind=kind, memory_dir=memory_dir)


WORKER = Path(__file__).with_name("elastic_worker.py")
DIES_AT, LAST = 2, 5


@pytest.mark.matrix
def test_all_ranks_of_an_attempt_save_and_load_the_same(tmp_path, memory_dir):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    line += ["--monitor-interval=0.1", str(WORKER), str(tmp_path), memory_dir, str(DIES_AT), str(LAST)]
    # Else torchrun keeps a store in which gloo reads the addresses of dead ranks.
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    said = [[*map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())] for rank in (0, 1)]
    before = next(each["save_id"] for each in said[0] if "saved" in each)
    last = [[each for each in of_rank if "loaded" in each] for of_rank in said]
    assert [of_rank[1:] for of_rank in last] == [[{"loaded": DIES_AT, "x": DIES_AT}]] * 2
    for step in range(DIES_AT + 1, LAST + 1):
        saved = [each["save_id"] for of_rank in said for each in of_rank if each.get("saved") == step]
        manifest = tmp_path / "durable" / ids.manifest_key(f"step_{step}")
        content = Manifest.from_json(manifest.read_bytes(), where=str(manifest)).content
        assert saved == [content.save_id] * 2
        assert ids.line_of(content.save_id) != ids.line_of(before)
