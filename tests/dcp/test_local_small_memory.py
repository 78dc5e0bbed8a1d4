"""Local checkpoints of ranks whose node memory has no room for them: spilled, or else streamed, and whole."""

import concurrent.futures
import os
import time

import pytest
import torch
from support.sharded import incomplete
from support.supporting import build
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest
from tiered_checkpoint_io.stores.directory import DirectoryStore

from .test_local import got, job  # noqa: F401
from .test_small_memory import small  # noqa: F401

#: Some 4 MB a shard, on nodes of 3 MiB.
LARGE = {"large": 1_000_000}
MEMORY = {"save_to_s3": False}


def names_of(parts):
    return sorted({name for name, *_ in parts})


@pytest.mark.parametrize("spill", ["auto", pytest.param(None, marks=pytest.mark.matrix)], ids=["spilled", "streamed"])
@pytest.mark.parametrize(
    "nodes",
    ["a", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("b", "ab"))],
    ids=["shard 0", "other shard", "both"],
)
def test_a_durable_save_that_memory_has_no_room_for(job, small, request, tmp_path, nodes, spill):  # noqa: F811
    # One of them by a real S3 server, whose client takes long to import.
    dirpath = request.getfixturevalue("s3_url") if nodes == "a" else str(tmp_path / "durable")
    for node in nodes:
        small(node)
    options = {"nodes": "ab", "dirpath": dirpath, "wait_timeout_s": 60, "on_save_error": "raise", "spill_dir": spill}
    first, _, waited, _, nowhere, _, behind, _, held, newest, named = job(
        2,
        ["save_local", 1, MEMORY],
        ["meet"],
        ["save_local", 2, {**LARGE, "sync": True}],
        ["meet"],
        ["save_local", 3, {**LARGE, **MEMORY}],
        # What waits for the durable tier stays in memory until it is there.
        ["wait"],
        ["save_local", 4, LARGE],
        ["meet"],
        ["parts"],
        ["load_local", 4, LARGE],
        ["load_local", 2, {**LARGE, "checkpoint_id": "step_2"}],
        **options,
    )
    assert [answer["tiers"] for answer in got(first)] == [["memory"]] * 2
    for node, two, three, four, parts in zip("ab", got(waited), got(nowhere), got(behind), got(held), strict=True):
        streams = node in nodes and spill is None
        assert two["tiers"] == four["tiers"] == (["durable"] if streams else ["durable", "memory"])
        assert four["ended"] == ["step_4"]
        assert (two["calls"], four["calls"]) == ([], [])
        assert three["saved"] == (node not in nodes), "of memory alone, it is skipped where there is no room"
        # What is complete on all nodes is kept, whoever has no part of later ones.
        kept = ["step_1"] if spill is None else ["step_2"]
        assert names_of(parts) == [*kept, *([] if node in nodes else ["step_3"]), *([] if streams else ["step_4"])]
    assert [(answer["same"], answer["step"], answer["rejected"]) for answer in got(newest)] == [(True, 4, [])] * 2
    assert [answer["same"] for answer in got(named)] == [True, True]

    # A restart finds the newest, and the one before it, whatever memory has; and so do nodes that lost theirs.
    before = [1, {"checkpoint_id": "step_1"}] if spill is None else [2, {**LARGE, "checkpoint_id": "step_2"}]
    newest, named = job(2, ["load_local", 4, LARGE], ["load_local", *before], **options)
    assert [(answer["same"], answer["step"]) for answer in got(newest)] == [(True, 4)] * 2
    assert [(answer["same"], answer["rejected"]) for answer in got(named)] == [(True, [])] * 2
    (elsewhere,) = job(2, ["load_local", 4, LARGE], **{**options, "nodes": "cd"})
    assert [(answer["same"], answer["step"]) for answer in got(elsewhere)] == [(True, 4)] * 2


def test_ranks_of_one_node_whose_memory_has_room_for_one_shard_alone(job, small):  # noqa: F811
    """The shard that fits waits in the queue for the other one, which must not wait for that queue."""
    small("a")
    half = {"save_to_s3": True, "spill_dir": None, "sync": True, "wait": False, "large": 500_000}
    first, _, second, waited, _, loaded = job(
        2,
        ["save_local", 1, {**half, "only": [0]}],
        ["meet"],
        ["save_local", 1, {**half, "only": [1]}],
        ["wait"],
        ["meet"],
        ["load_local", 1, {"large": 500_000}],
        nodes="aa",
        wait_timeout_s=40,
        on_save_error="raise",
    )
    assert got(first)[0]["tiers"] == ["durable", "memory"]
    assert got(second)[1]["tiers"] == ["durable"]
    assert got(second)[1]["seconds"] < 20
    got(waited)
    assert [(answer["same"], answer["step"]) for answer in got(loaded)] == [(True, 1)] * 2


@pytest.mark.matrix
def test_a_shard_that_does_not_come_holds_up_nobody_for_long(job, small, tmp_path):  # noqa: F811
    small("a")
    before, _, told, _, after = job(
        2,
        ["save_local", 1, LARGE],
        ["meet"],
        # Shard 1 says that it has failed; shard 0 need not wait for it.
        ["save_local", 2, {**LARGE, "fail": 1, "sync": True}],
        ["meet"],
        ["save_local", 3, LARGE],
        nodes="ab",
        spill_dir=None,
        wait_timeout_s=1800,
        on_save_error="raise",
    )
    assert [answer["ended"] for answer in got(before)] == [["step_1"]] * 2
    assert "this rank's memory is gone" in told[1]["message"]
    assert "are not there, and some were given up: 1" in told[0]["message"]
    assert told[0]["seconds"] < 15
    assert [answer["ended"] for answer in got(after)] == [["step_3"]] * 2
    assert not incomplete(DirectoryStore(str(tmp_path / "durable"))), "what did not become complete is gone"
    assert not list((tmp_path / "durable" / "step_2").glob("*.pt"))


@pytest.mark.matrix
def test_the_wait_for_shards_of_which_nothing_is_heard_is_bounded(job, small, tmp_path):  # noqa: F811
    small("a")
    alone, _, loaded = job(
        2,
        ["save_local", 1, {**LARGE, "only": [0], "sync": True}],
        ["meet"],
        ["load_local", 1, LARGE],
        nodes="ab",
        spill_dir=None,
        wait_timeout_s=4,
        on_save_error="raise",
    )
    assert "the parts of 1 of 2 ranks have not come within 4 s: 1" in alone[0]["message"]
    assert alone[0]["seconds"] < 15
    assert [answer["error"] for answer in loaded] == ["CheckpointNotFoundError"] * 2


@pytest.mark.matrix
def test_a_process_that_dies_on_the_way_leaves_the_one_before_and_what_is_swept(job, small, tmp_path):  # noqa: F811
    small("a")
    options = {"nodes": "ab", "wait_timeout_s": 3, "spill_dir": None}
    job(2, ["save_local", 1, LARGE], **options)
    # Its part is there, and the checkpoint is not.
    job(2, ["save_local", 2, {**LARGE, "dies": 0}], **options)
    store = DirectoryStore(str(tmp_path / "durable"))
    left = [tmp_path / "durable" / key for key in incomplete(store)]
    assert any(path.name == "rank-00000.json" for path in left)
    assert not (tmp_path / "durable" / ids.manifest_key("step_2")).exists()
    for path in left:
        # As if that had been a while ago.
        os.utime(path, (1, 1))
    loaded, saved, _ = job(2, ["load_local", 1, LARGE], ["save_local", 3, LARGE], ["meet"], **options)
    assert [(answer["same"], answer["step"]) for answer in got(loaded)] == [(True, 1)] * 2
    assert [answer["ended"] for answer in got(saved)] == [["step_3"]] * 2
    (loaded,) = job(2, ["load_local", 3, LARGE], **options)
    assert [(answer["same"], answer["step"]) for answer in got(loaded)] == [(True, 3)] * 2
    assert not incomplete(store)
    assert not list((tmp_path / "durable" / "step_2").glob("*.pt"))


@pytest.mark.matrix
def test_memory_keeps_what_is_whole_while_other_nodes_have_no_room(job, small, tmp_path):  # noqa: F811
    """Not bounded by a count of saves: what no memory will ever make whole goes as soon as a newer one is there."""
    small("b")
    steps = []
    for number in range(2, 7):
        steps += [["save_local", number, LARGE], ["wait"]]
    *_, held, named = job(
        2,
        ["save_local", 1, MEMORY],
        ["meet"],
        *steps,
        ["parts"],
        ["load_local", 1, {"checkpoint_id": "step_1"}],
        nodes="ab",
        spill_dir=None,
        memory_keep_last=2,
    )
    assert [names_of(parts) for parts in got(held)] == [["step_1", "step_5", "step_6"], ["step_1"]]
    assert [answer["same"] for answer in got(named)] == [True, True]


@pytest.mark.matrix
def test_a_small_memory_overwrites_a_name_that_went_through_it_before(small, memory_dir, tmp_path, warned):  # noqa: F811
    small("a")
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": f"{memory_dir}/a", "require_step": False}
    options["spill_dir"] = None
    with warned("the memory tier can't hold") as told:
        for number, size in ((1, 10), (2, 1_000_000), (3, 10), (4, 1_000_000)):
            state = {"n": number, "w": torch.full((size,), float(number))}
            future = dcp.async_save(state, checkpoint_id="latest", kind="local", **options)
            state["w"].zero_()
        assert future.result(60).tiers == {"durable"}
    assert len(told) == 2, "said again after one that had room"
    dcp.maybe_finalize_async_calls(blocking=True)
    # Each is whole, in its turn, and leaves nothing of the one before.
    (file,) = (tmp_path / "durable" / "latest").iterdir()
    assert torch.equal(torch.load(file)["w"], torch.full((1_000_000,), 4.0))
    state = {"n": 0, "w": torch.zeros(1_000_000)}
    reader = dcp.load(state, kind="local", **{key: value for key, value in options.items() if key != "require_step"})
    assert (state["n"], reader.opened.name) == (4, "latest")
    reader.close()


@pytest.mark.matrix
def test_two_saves_of_a_name_do_not_commit_at_once(small, memory_dir, tmp_path):  # noqa: F811
    small("a")
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": f"{memory_dir}/a", "drain": "thread"}
    options["spill_dir"] = None
    name = {"checkpoint_id": "latest", "kind": "local", "require_step": False}
    manifest = tmp_path / "durable" / ids.manifest_key("latest")
    tier = MemoryTier.open(options["memory_dir"], ids.namespace_of(options["dirpath"]))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        # As long as this is held, no drain works: the first one waits in memory, and the second for it.
        busy = try_lock(tier.root / LOCK_FILE)
        first = build(dcp.async_save, {"n": 1}, **name, **options)
        second = thread.submit(build, dcp.save, {"n": 2, "w": torch.ones(1_000_000)}, **name, **options)
        time.sleep(1.0)
        assert not (first.done() or second.done() or manifest.exists())
        release(busy)
        assert [future.result(60).tiers for future in (first, second)] == [{"memory", "durable"}, {"durable"}]
    assert Manifest.from_json(manifest.read_bytes(), where="").content.save_id == second.result().save_id
    assert len(list((tmp_path / "durable" / "latest").iterdir())) == 1
    build(dcp.TieredStorageWriter, **options).close()


@pytest.mark.matrix
def test_an_earlier_save_of_the_name_that_never_became_whole_is_in_nobodys_way(job, small):  # noqa: F811
    small("a")
    lost, _, saved, _, loaded = job(
        2,
        ["save_local", 1, {"fail": 1}],
        ["meet"],
        # The drain would try shard 0 of the one before again and again.
        ["save_local", 1, {"content": 5, **LARGE}],
        ["meet"],
        ["load_local", 5, LARGE],
        nodes="ab",
        spill_dir=None,
        wait_timeout_s=5,
        on_save_error="raise",
    )
    assert [answer["error"] for answer in lost] == ["SaveError"] * 2
    assert [answer["tiers"] for answer in got(saved)] == [["durable"], ["durable", "memory"]]
    assert [answer["ended"] for answer in got(saved)] == [["step_1"]] * 2
    assert [(answer["same"], answer["rejected"]) for answer in got(loaded)] == [(True, [])] * 2


def test_nothing_goes_for_a_save_that_does_not_fit_all_the_same(memory_dir, tmp_path):
    options = {"dirpath": str(tmp_path / "durable"), "memory_keep_last": 2, "spill_dir": None}
    with mounted_tmpfs(f"{memory_dir}/a", 16 << 20) as folder:
        options["memory_dir"] = str(folder)
        for number in (1, 2):
            dcp.save({"n": number}, checkpoint_id=f"step_{number}", kind="local", save_to_s3=False, **options)
        report = dcp.save({"w": torch.ones(6_000_000)}, checkpoint_id="step_3", kind="local", **options)
        assert report.tiers == {"durable"}
        tier = MemoryTier.open(options["memory_dir"], ids.namespace_of(options["dirpath"]))
        assert [stored.part.name for stored in tier.parts()] == ["step_1", "step_2"]
        dcp.save({"n": 4}, checkpoint_id="step_4", kind="local", save_to_s3=False, **options)
        assert [stored.part.name for stored in tier.parts()] == ["step_2", "step_4"]
        dcp.TieredStorageWriter(**options).close()


def test_what_can_not_be_streamed_is_said_at_once(small, memory_dir, tmp_path):  # noqa: F811
    small("a")
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": f"{memory_dir}/a", "on_save_error": "raise"}
    options["spill_dir"] = None
    state = {"w": torch.ones(1_000_000)}
    dcp.async_save({"n": 1}, checkpoint_id="step_1", kind="local", **options).result(60)
    # Something is in the way where its folder is to be.
    (tmp_path / "durable" / "step_2").write_text("a file")
    with pytest.raises(SaveError, match="shard 0 of step_2 did not reach the durable tier, and memory has no room"):
        dcp.async_save(state, checkpoint_id="step_2", kind="local", **options)
    # What was there is there still, and the next save goes as if nothing had been.
    found = {"n": 0}
    dcp.load(found, kind="local", **options).close()
    assert found == {"n": 1}
    (tmp_path / "durable" / "step_2").unlink()
    report = dcp.save(state, checkpoint_id="step_4", kind="local", **options)
    assert report.tiers == {"durable"}
    dcp.TieredStorageWriter(**options).close()
