"""The calls of the SageMaker library's users: coordinators, finalizing, and the full checkpoint at the end."""

import concurrent.futures
from types import SimpleNamespace

import pytest
import torch
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO, dcp
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of
from tiered_checkpoint_io.engine.ranks.coordination import device_of
from tiered_checkpoint_io.errors import SaveError

from .test_local import got

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_any_rank_coordinates_and_a_full_checkpoint_ends_the_training(job, tmp_path, memory_dir):
    by_last, by_global, local, refused, whole = job(
        3,
        ["save_by", 1, [0, 1, 2], 2],
        # SMP names the coordinator by its global rank.
        ["save_by", 2, [1, 2], 2],
        ["save_local", 3],
        ["save_whole", 4, 1, 2],
        ["save_whole", 5, 1],
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
    for answer in refused:
        assert "this rank's loader has ended" in answer["message"], "an object of one rank, and no rank waits"
    assert [answer["saved"] for answer in got(whole)] == [False, True, False]
    io = TieredCheckpointIO(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir)
    for loaded in (torch.load(tmp_path / "durable" / "export" / "model.pt"), io.load_checkpoint("export/model.pt")):
        assert (loaded["step"], loaded["of"]) == (5, {"loader": {"position": 7}})
        found = {key: value.double().sum().item() for key, value in loaded["model"].items()}
        assert found.items() <= got(whole)[0]["totals"].items()
        assert all(type(value) is torch.Tensor for value in loaded["model"].values())
    io.teardown()


def test_a_full_checkpoint_has_all_numbers_of_sharded_tensors_or_fails_on_all_ranks(job, tmp_path):
    by_sender, by_coordinator, lacking, whole = job(
        3,
        ["save_shards", [1, 2], 2, [1]],
        ["save_shards", [1, 2], 2, [2]],
        ["save_shards", [0, 1, 2], 2, [], [1, 2]],
        ["save_shards", [1, 2], 2],
    )
    assert all("on ranks that do not take part" in answer["message"] for answer in lacking[1:])
    for answers in (by_sender, by_coordinator):
        assert all("can't allocate memory" in answer["message"] for answer in answers[1:])
    assert got(whole) == [None, False, True]
    loaded = torch.load(tmp_path / "durable" / "export" / "shards.pt")
    rows = torch.tensor([0, 0, 1, 1])
    assert torch.equal(loaded["double"][:, 0], torch.tensor([0.1, 0.1, 1.1, 1.1], dtype=torch.float64))
    assert torch.equal(loaded["long"][:, 1], 2**53 + 1 + rows)
    assert torch.equal(loaded["complex"][:, 0], (1 + 2j * rows).to(torch.complex64))
    assert {each.shape for each in loaded.values()} == {torch.Size([4, 2])}


@pytest.mark.parametrize("kind", ["sharded", "local"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "durable tier alone"])
def test_a_restart_passes_by_the_full_checkpoint_that_ended_the_training(kind, memory, memory_dir, tmp_path):
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
    build(dcp.save, {"t": torch.full((3,), 1.0)}, checkpoint_id="step_1", kind=kind, **options)
    # An export is on no schedule.
    report = build(
        dcp.save,
        {"t": torch.full((3,), 9.0)},
        kind="full",
        checkpoint_id="export/step_7.pt",
        s3_every_n_steps=5,
        **options,
    )
    assert report is not None
    assert (tmp_path / "durable" / "export" / "step_7.pt").exists()
    if not memory:
        close_shared(build(settings_of, None, options))
        options["namespace"] = "another-node"
    state = {"t": torch.zeros(3)}
    build(dcp.load, state, kind=kind, **options)
    assert state["t"].tolist() == [1.0] * 3
    close_shared(build(settings_of, None, options))


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


def test_ranks_send_by_way_of_the_device_that_their_group_is_of():
    groups = [
        SimpleNamespace(_device_types=list(map(torch.device, each))) for each in (["cuda"], ["cpu", "cuda"], ["cpu"])
    ]
    assert [device_of(each) for each in groups] == ["cuda", "cpu", "cpu"]
