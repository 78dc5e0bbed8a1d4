"""Sharded strategies through the tiers: real ranks, as Lightning launches them, on the CPU over gloo."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, model_parallel
from support.launch import launch, said
from support.restoring import flip
from support.training import Model, wipe

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy

WORKER = Path(__file__).with_name("sharded_worker.py")
LAUNCH_TIMEOUT_S = 100
pytestmark = pytest.mark.timeout(4 * LAUNCH_TIMEOUT_S)


@pytest.fixture
def fit(tmp_path, memory_dir, monkeypatch):
    """Trains as told; the answers of the ranks."""
    monkeypatch.chdir(tmp_path)

    def fit(steps, *, strategy="fsdp2", ranks=2, dirpath=tmp_path / "durable", **more):
        told = {"strategy": strategy, "ranks": ranks, "steps": steps, "dirpath": str(dirpath), **more}
        jobs = [{**told, "memory_dir": memory_dir}] * ranks
        answers = launch(tmp_path, jobs, worker=WORKER, deadline_s=LAUNCH_TIMEOUT_S)
        for rank, answer in enumerate(answers):
            assert answer is not None, said(tmp_path, rank)
            assert "error" not in answer or "fails" in more, said(tmp_path, rank)
            # JSON knows no numbers as keys.
            answer["losses"] = {int(index): loss for index, loss in answer.get("losses", {}).items()}
        return answers

    return fit


@pytest.mark.matrix
def test_a_sharded_run_goes_on_as_if_it_had_not_stopped(fit, s3_url, memory_dir):
    """From memory, from S3, on fewer and on more ranks; with gradient accumulation and a sharded average."""
    more = {"dirpath": s3_url, "accumulate": 2, "average": True}
    (whole, _) = fit(12, **{**more, "dirpath": s3_url + "-whole"})
    wipe(memory_dir)
    fit(5, **more)
    first, second = fit(7, **more)
    # Some releases of Lightning save the last step once more when training ends.
    assert first["from"] in (["step=4.ckpt", 4, "memory"], ["last.ckpt", 5, "memory"])
    (alone,) = fit(9, ranks=1, **more)
    # Step 6 was in memory alone when training ended.
    assert alone["from"] in (["end_of_training.ckpt", 7, "memory"], ["last.ckpt", 7, "memory"])
    wipe(memory_dir)
    last, other = fit(12, **more)
    assert last["from"] in (["step=8.ckpt", 8, "durable"], ["last.ckpt", 9, "durable"])
    # Rank 0 alone looks what is there, who else writes here, and which names are taken; both read what they need.
    assert last["asked"]["requests.list"] == 3
    assert "requests.list" not in other["asked"]
    for answer in (first, second, alone, last, other):
        for index, loss in answer["losses"].items():
            assert loss == pytest.approx(whole["losses"][index], rel=1e-5)
    assert last["mean"] == pytest.approx(whole["mean"], rel=1e-4)
    assert {index: whole["losses"][index] for index in first["losses"]} == first["losses"], "bit for bit"


def test_a_sharded_state_of_memory_alone_becomes_durable_where_nothing_is_left_to_train(fit, tmp_path):
    manifest = tmp_path / "durable/.tiered/manifests/end_of_training.ckpt.json"
    fit(6, held=True, config={"save_on_train_end": False})
    assert not manifest.exists()
    again, _ = fit(6)
    assert again["from"] == ["memory/epoch=0-step=6.ckpt", 6, "memory"]
    assert manifest.exists()


def test_a_sharded_save_that_overlaps_training_is_the_state_at_its_moment(fit, memory_dir, tmp_path):
    """Captures begin only when the optimizer waits for them; a resume from memory, and one from the durable tier."""
    (whole, _) = fit(8, dirpath=tmp_path / "whole")
    wipe(memory_dir)
    begun, _ = fit(5, staging="overlapped")
    assert begun["overlapped"] >= 2, "steps 2 and 4"
    assert begun["told"] == [True] * begun["overlapped"], "each call tells that it has saved"
    first, second = fit(7, staging="overlapped")
    assert first["from"] in (["step=4.ckpt", 4, "memory"], ["last.ckpt", 5, "memory"])
    wipe(memory_dir)
    last, _ = fit(8)
    assert last["from"][2] == "durable"
    for answer in (begun, first, second, last):
        assert answer["losses"] == {index: whole["losses"][index] for index in answer["losses"]}, "bit for bit"


def test_where_one_rank_cannot_save_beside_training_no_rank_does(fit, tmp_path):
    """Else one would wait for the part of another, which completes it when the save has ended."""
    for answer in fit(5, staging="overlapped", refuses=1):
        assert answer["overlapped"] == 0
    assert (tmp_path / "durable" / "step=4.ckpt" / ".metadata").exists()


@pytest.mark.parametrize("saves_end", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_what_too_many_uploads_leave_out_beside_training_replaces_nothing(saves_end, fit, tmp_path):
    """The call of an overlapped save has told by then that it goes to the durable tier."""
    config = {"max_pending": 1, "pending_timeout_s": 1, "drain": "thread", "save_on_train_end": saves_end}
    (answer,) = fit(8, ranks=1, staging="overlapped", held=True, config=config)
    assert answer["told"] == [True] * 4
    kept = sorted(each.name for each in (tmp_path / "durable").glob("*.ckpt"))
    assert kept == (["end_of_training.ckpt"] if saves_end else ["step=4.ckpt"])


@pytest.mark.matrix
def test_a_callbacks_sharded_tensor_that_cannot_be_described_fails_the_save_and_training_goes_on(fit, tmp_path):
    answers = fit(9, undescribed=4, on_save_error="warn")
    assert [sorted(answer["losses"]) for answer in answers] == [list(range(9))] * 2
    assert "saving step=4.ckpt failed on ranks [0, 1]: a callback's state holds a sharded tensor" in said(tmp_path, 0)
    assert (tmp_path / "durable" / "step=8.ckpt" / ".metadata").exists()


@pytest.mark.parametrize("grid", ["tensor parallel", pytest.param("the module's", marks=pytest.mark.matrix)])
def test_a_callbacks_average_goes_on_where_two_dimensions_of_a_mesh_cut_the_weights(grid, fit, memory_dir, tmp_path):
    """FSDP2 on top of tensor parallel cuts one dimension twice; a module may shard over a mesh that it has made itself."""
    more = {"grid": grid, "average": True}
    whole, _ = fit(8, dirpath=tmp_path / "whole", **more)
    wipe(memory_dir)
    fit(5, **more)
    last, _ = fit(8, **more)
    assert last["from"] is not None
    assert last["mean"] == whole["mean"]
    assert last["losses"] == {index: whole["losses"][index] for index in last["losses"]}, "bit for bit"


@pytest.mark.parametrize("before", ["tensor parallel", pytest.param("", marks=pytest.mark.matrix)])
def test_a_callbacks_average_goes_on_over_another_mesh(before, fit, memory_dir, tmp_path):
    """It is reckoned with the weights, and lies over the mesh that they have now."""
    whole, _ = fit(8, dirpath=tmp_path / "whole", grid=before, average=True)
    wipe(memory_dir)
    fit(5, grid=before, average=True)
    last, _ = fit(8, grid="" if before else "tensor parallel", average=True)
    assert last["from"] is not None
    assert last["mean"] == pytest.approx(whole["mean"], rel=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("staging", ["eager", "overlapped"])
def test_what_rank_0_cannot_pickle_fails_the_save_on_all_ranks_and_training_goes_on(fit, tmp_path, staging):
    answers = fit(9, unpicklable=4, on_save_error="warn", staging=staging)
    assert [sorted(answer["losses"]) for answer in answers] == [list(range(9))] * 2
    assert not (tmp_path / "durable" / "step=4.ckpt").exists()
    assert (tmp_path / "durable" / "step=8.ckpt" / ".metadata").exists()
    for answer in fit(13, unpicklable=12, fails=True):
        assert (
            "saving step=12.ckpt failed on ranks [0]: TypeError: cannot pickle '_thread.lock' object" in answer["error"]
        )


@pytest.mark.matrix
def test_a_last_save_that_one_rank_lost_in_the_background_is_made_up_for(fit, tmp_path, memory_dir):
    """Its rank 0 takes it for saved; and the save after one that failed is not made, but the next is."""
    fit(8, unsealed="step=8.ckpt", on_save_error="warn")
    assert (tmp_path / "durable" / "end_of_training.ckpt" / ".metadata").exists()
    wipe(memory_dir)
    first, _ = fit(9)
    assert first["from"] == ["end_of_training.ckpt", 8, "durable"]


@pytest.mark.matrix
def test_full_checkpoints_of_a_sharded_model_and_sharded_ones_replace_each_other(fit, tmp_path, memory_dir):
    (whole, _) = fit(12, dirpath=tmp_path / "whole")
    wipe(memory_dir)
    fit(4, full=True)
    assert torch.load(tmp_path / "durable" / "step=4.ckpt")["global_step"] == 4
    assert fit(8)[0]["from"][0] == "step=4.ckpt"
    wipe(memory_dir)
    first, _ = fit(12, full=True)
    assert first["from"] == ["step=8.ckpt", 8, "durable"]
    assert first["losses"] == pytest.approx({i: whole["losses"][i] for i in first["losses"]}, rel=1e-5)


def test_a_full_checkpoint_is_resumed_from_where_the_shards_after_it_are_damaged(fit, tmp_path, memory_dir):
    fit(4, full=True)
    fit(8)
    wipe(memory_dir)
    for shard in (tmp_path / "durable").glob("step=8.ckpt/*.distcp"):
        flip(shard)
    assert fit(9)[0]["from"] == ["step=4.ckpt", 4, "durable"]


@pytest.mark.matrix
def test_fsdp1_and_its_folder_for_others(fit, tmp_path, memory_dir):
    more = {"strategy": "fsdp1", "async": False}
    (whole, _) = fit(8, **more, dirpath=tmp_path / "whole")
    wipe(memory_dir)
    fit(4, **more)
    wipe(memory_dir)
    first, _ = fit(8, **more)
    assert first["from"] == ["step=4.ckpt", 4, "durable"]
    assert first["losses"] == {index: whole["losses"][index] for index in first["losses"]}
    # Plain DCP reads the folder, and Lightning's own strategies know it.
    folder = tmp_path / "durable" / "step=8.ckpt"
    loaded = {"model": {"net.0.bias": torch.zeros(32)}}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert loaded["model"]["net.0.bias"].abs().sum() > 0
    assert torch.load(folder / "meta.pt", weights_only=False)["global_step"] == 8


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("full", [False, True])
def test_a_save_before_the_first_step_changes_nothing_of_training(fit, strategy, full, tmp_path):
    """Torch has an optimizer without a state make a step where it is asked for that, which Adam then counts."""
    whole, _ = fit(3, strategy=strategy, dirpath=tmp_path / "whole")
    saved, _ = fit(3, strategy=strategy, full=full, first=True)
    assert saved["losses"] == whole["losses"], "bit for bit"
    resumed, _ = fit(3, strategy=strategy, full=full, ckpt_path="first.ckpt")
    assert resumed["from"][:2] == ["first.ckpt", 0]
    assert resumed["losses"] == whole["losses"], "bit for bit"


@pytest.mark.matrix
@pytest.mark.skipif(
    not hasattr(model_parallel, "_align_compiled_param_names_with_module"),
    reason="this release of Lightning can't save it",
)
def test_a_full_checkpoint_of_a_model_with_compiled_layers_goes_on(fit, tmp_path):
    more = {"compiled": True, "full": True}
    whole, _ = fit(8, **more, dirpath=tmp_path / "whole")
    fit(4, **more)
    first, _ = fit(8, **more)
    assert first["from"][:2] == ["step=4.ckpt", 4]
    assert first["losses"] == {index: whole["losses"][index] for index in range(4, 8)}, "bit for bit"


@pytest.mark.matrix
def test_numbers_of_parameters_are_not_taken_for_those_of_flat_ones(fit):
    """Those of the outermost module come first there: each would get the state of another."""
    fit(4, strategy="ddp")
    for answer in fit(8, strategy="fsdp1", flat=True, fails=True):
        assert "the checkpoint's optimizer states are by numbers" in answer["error"]


@pytest.mark.matrix
def test_weights_alone_are_no_place_to_resume_from(fit):
    fit(4, weights_only=True, ranks=1)
    (answer,) = fit(8, weights_only=True, ranks=1, ckpt_path="step=4.ckpt", fails=True)
    assert "can't go on from weights alone" in answer["error"]


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
@pytest.mark.parametrize("callback", [TieredModelCheckpoint, ModelCheckpoint, None])
def test_a_stock_sharded_strategy_is_refused_before_it_writes_anything(
    strategy, callback, memory_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    class Pretending(strategy):
        """Passes Lightning's own check for a GPU, and goes no further than the hooks for setup."""

        def setup_environment(self):
            self._device_mesh = None

        def barrier(self, *_, **__):
            pass

        broadcast = staticmethod(lambda value, src=0: value)

        def reduce_boolean_decision(self, decision, *_, **__):
            return decision

    io = TieredCheckpointIO("s3://bucket/run", memory_dir=memory_dir)
    trainer = Trainer(
        plugins=[io],
        strategy=Pretending(),
        callbacks=[callback(dirpath="s3://bucket/run")] if callback is TieredModelCheckpoint else [],
        enable_checkpointing=callback is not None,
        accelerator="cpu",
        # Of more, Lightning would start the others by running this very test.
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )
    with pytest.raises(ConfigError, match=f"use tiered_checkpoint_io.strategies.Tiered{strategy.__name__}"):
        trainer.fit(Model())
    assert not Path("s3:").exists()


@pytest.mark.parametrize("strategy", [TieredFSDPStrategy, TieredModelParallelStrategy])
def test_ours_with_another_io_is_refused(strategy):
    ours = strategy()
    with pytest.raises(ConfigError, match=r"plugins=\[TieredCheckpointIO"):
        ours.setup(None)


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_each_rank_prepares_the_first_save_of_its_own_part(fit, strategy):
    # Of each of the 1,072 weights Adam keeps two more values, and for each of four tensors its number of steps.
    state = 4 * (3 * 1072 + 2 * 4)
    for answer in fit(2, strategy=strategy):
        (size,) = answer["prepared"]
        assert size == pytest.approx(state / 2, rel=0.05)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_full_checkpoint_that_would_run_code_is_refused(fit, tmp_path, strategy):
    dirpath, ran = tmp_path / "durable", tmp_path / "ran"
    dirpath.mkdir()
    torch.save({"state_dict": {}, "global_step": 1, "evil": Evil(str(ran))}, dirpath / "evil.ckpt")
    answers = fit(2, strategy=strategy, ckpt_path=str(dirpath / "evil.ckpt"), fails=True)
    assert not ran.exists()
    for answer in answers:
        assert "refused evil.ckpt" in answer["error"]
        assert "os.mkdir" in answer["error"] or "posix.mkdir" in answer["error"]
