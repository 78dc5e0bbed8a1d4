"""A synchronous save returns once committed, of all kinds; coordinators, finalizing, full checkpoints at the end."""

import concurrent.futures
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from support.supporting import build, supported

from tiered_checkpoint_io import TieredStorageWriter, dcp
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.memory.node import release, try_lock
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

from .test_local import got

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KINDS = ["sharded", "local", "DCP's own"]


@pytest.fixture
def options(tmp_path, memory_dir):
    with supported(pending_timeout_s=60, max_pending=8):
        made = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
        yield made
        close_shared(settings_of(None, made))


def save(kind, number, options, **more):
    name, state = f"step_{number}", {"t": torch.full((1000,), float(number))}
    if kind == "DCP's own":
        writer = build(TieredStorageWriter, **options, **more)
        return stock.save(state, checkpoint_id=name, storage_writer=writer)
    return build(dcp.save, state, checkpoint_id=name, kind=kind, **options, **more)


def is_there(options, number):
    return (Path(options["dirpath"]) / ids.manifest_key(f"step_{number}")).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_durable_when_a_save_returns_and_not_waited_for_without_wait(kind, options):
    save(kind, 1, options)
    assert is_there(options, 1)
    elsewhere = {**options, "namespace": "another-node"}
    state = {"t": torch.zeros(1000)}
    build(dcp.load, state, kind="local" if kind == "local" else "sharded", **elsewhere).close()
    assert state["t"].unique().tolist() == [1.0]
    # While another holds this, no drain works.
    build(dcp.TieredStorageWriter, **options).close()
    root = MemoryTier.open(options["memory_dir"], ids.namespace_of(options["dirpath"])).root
    busy = try_lock(root / LOCK_FILE, patience_s=60)
    try:
        save(kind, 2, options, wait=False)
        assert not is_there(options, 2)
        if kind == "DCP's own":
            writer = build(TieredStorageWriter, **options)
            stock.async_save({"t": torch.ones(2)}, checkpoint_id="step_3", storage_writer=writer).result(60)
            assert not is_there(options, 3)
    finally:
        release(busy)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_does_not_get_there_is_an_error_or_a_line_of_the_log(kind, options, caplog, tmp_path):
    save(kind, 1, options)
    # A file is in the place of its folder.
    (tmp_path / "durable" / "step_2").write_text("a file")
    said = "step_2 is in memory, but not on the durable tier"
    saved = save(kind, 2, options)
    assert (saved is None) == (kind != "DCP's own"), "training continues"
    assert said in caplog.text
    strict = {**options, "on_save_error": "raise"}
    try:
        with pytest.raises((SaveError, stock.CheckpointException), match=said):
            save(kind, 2, strict)
        (tmp_path / "durable" / "step_2").unlink()
        save(kind, 3, strict)
        assert is_there(options, 3)
    finally:
        close_shared(build(settings_of, None, strict))


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_all_ranks_return_after_the_commit_or_get_the_error(kind, job, tmp_path):
    late = {"late": 0} if kind == "local" else {}
    first, spoilt = job(2, ["save_now", 1, kind, late], ["save_spoilt", 2, kind], nodes="ab", on_save_error="raise")
    assert got(first) == [{"saved": True, "there": True}] * 2
    assert [answer["error"] for answer in spoilt] == ["SaveError"] * 2
    for answer in spoilt:
        assert "not on the durable tier" in answer["message"]


def test_any_rank_coordinates(job, tmp_path):
    by_last, by_global, local = job(
        3,
        ["save_by", 1, [0, 1, 2], 2],
        # SMP names the coordinator by its global rank.
        ["save_by", 2, [1, 2], 2],
        ["save_local", 3],
    )
    for answers, number, coordinator in ((by_last, 1, 2), (by_global[1:], 2, 1)):
        for answer in got(answers):
            assert answer["early"] == [], "saves of another group are not waited for"
            assert answer["ended"] == [f"step_{number}"]
            assert answer["metadata"]
            assert answer["loaded"] == [float(number)] * 4 + [number]
            assert coordinator in answer["coordinators"]
        assert (tmp_path / "durable" / f"step_{number}" / ".metadata").exists()
    assert by_global[0]["got"] is None
    assert [answer["ended"] for answer in got(local)] == [["step_3"]] * 3


@pytest.mark.parametrize("kind", ["sharded", "local"])
@pytest.mark.parametrize("shown_by", ["finalize", "next save", "future"])
def test_a_failed_upload_is_shown_once(kind, shown_by, memory_dir, tmp_path):
    options = {
        "dirpath": str(tmp_path / "durable"),
        "memory_dir": memory_dir,
        "on_save_error": "raise",
        "kind": kind,
    }
    state = {"t": torch.ones(3)}
    # Of this process' earlier saves nothing is wanted here.
    dcp.maybe_finalize_async_calls(blocking=True)
    future = build(dcp.async_save, state, checkpoint_id="step_1", **options)
    (ended,) = dcp.maybe_finalize_async_calls(blocking=True)
    assert (ended is future, ended.name, ended.step) == (True, "step_1", 1)
    assert dcp.maybe_finalize_async_calls(blocking=True) == []
    # A file is in the place of the next checkpoint's folder.
    (tmp_path / "durable" / "step_2").write_text("a file")
    future = build(dcp.async_save, state, checkpoint_id="step_2", **options)
    if shown_by == "finalize":
        with pytest.raises(SaveError, match="step_2 did not reach the durable tier"):
            dcp.maybe_finalize_async_calls(blocking=True)
    elif shown_by == "future":
        assert "step_2 did not reach" in str(future.exception(60))
        assert dcp.maybe_finalize_async_calls(blocking=True) == [future]
    else:
        concurrent.futures.wait([future], 60)
        with pytest.raises(SaveError, match="step_2 did not reach the durable tier"):
            build(dcp.async_save, state, checkpoint_id="step_3", **options)
    assert [save.name for save in dcp.maybe_finalize_async_calls() if not save.shown] == []
    (tmp_path / "durable" / "step_2").unlink()
    build(dcp.async_save, state, checkpoint_id="step_4", **options).result(60)
    dcp.maybe_finalize_async_calls(blocking=True)
    writer = build(dcp.TieredStorageWriter, **{key: value for key, value in options.items() if key != "kind"})
    assert writer.session.counts["failed"] == (0 if shown_by == "future" else 1)
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_too_many_others_leave_no_room_for_is_an_error_where_these_are_raised(kind, options, caplog):
    save(kind, 1, options)
    build(dcp.TieredStorageWriter, **options).close()
    memory = MemoryTier.open(options["memory_dir"], build(settings_of, None, options).config.namespace)
    busy = try_lock(memory.root / LOCK_FILE, patience_s=60)
    full = {**options, "pending_timeout_s": 1, "max_pending": 1}
    strict = {**full, "on_save_error": "raise"}
    try:
        save(kind, 2, full, wait=False)
        assert save(kind, 3, full) is not None
        assert "step_3 stays in memory: too many saves wait for the durable tier" in caplog.text
        for step in (4, 5):
            said = f"step_{step} is in memory, but not on the durable tier: too many saves wait for it"
            with pytest.raises((SaveError, stock.CheckpointException), match=said):
                save(kind, step, strict)
    finally:
        release(busy)
        for used in (full, strict):
            close_shared(build(settings_of, None, used))
    assert [step for step in range(1, 6) if is_there(options, step)] == [1, 2]
    assert {stored.part.name for stored in memory.parts()} >= {"step_5"}
    memory.close()
