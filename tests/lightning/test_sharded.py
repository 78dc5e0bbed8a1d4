"""Sharded strategies through the tiers: real ranks, as Lightning launches them, on the CPU over gloo."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from support.launch import said
from support.restoring import flip
from support.training import Model, wipe

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy

pytestmark = pytest.mark.timeout(400)
OVERLAPPED = {"staging": "overlapped"}


def those_of(whole, answer):
    """Returns the losses of the same steps of another training."""
    return {step: whole["losses"][step] for step in answer["losses"]}


@pytest.mark.matrix
def test_a_sharded_run_goes_on_as_if_it_had_not_stopped(fits, s3_url, memory_dir):
    """From memory, from S3, on fewer and on more ranks; with gradient accumulation and an average of the weights."""
    more = {"dirpath": s3_url, "accumulate": 2, "average": True, "config": {"drain": "process"}}
    ((whole, _),) = fits({"steps": 12}, **{**more, "dirpath": s3_url + "-whole"})
    wipe(memory_dir)
    fits({"steps": 5}, **more)
    ((first, second),) = fits({"steps": 7}, **more)
    # Some releases of Lightning save the last step once more when training ends.
    assert first["from"] in (["step=4.ckpt", 4, "memory"], ["last.ckpt", 5, "memory"])
    ((alone,),) = fits({"steps": 9}, ranks=1, **more)
    assert alone["from"] in (["end_of_training.ckpt", 7, "memory"], ["last.ckpt", 7, "memory"])
    wipe(memory_dir)
    ((last, other),) = fits({"steps": 12}, **more)
    assert last["from"] in (["step=8.ckpt", 8, "durable"], ["last.ckpt", 9, "durable"])
    # Only rank 0 lists the manifests, and the files of the newest one; both ranks read what they need.
    assert last["asked"]["requests.list"] == 2
    assert "requests.list" not in other["asked"]
    for answer in (first, second, alone, last, other):
        assert answer["losses"] == pytest.approx(those_of(whole, answer), rel=1e-5)
    assert last["mean"] == pytest.approx(whole["mean"], rel=1e-4)
    assert first["losses"] == those_of(whole, first), "bit for bit"


def test_a_sharded_state_of_memory_alone_becomes_durable_where_nothing_is_left_to_train(fits):
    alone = {"save_on_train_end": False}
    (first, _), (again, _) = fits({"config": alone}, {}, steps=6, callback={"save_last": False})
    assert first["durable"] == ["step=4.ckpt"]
    assert again["from"] == ["memory/epoch=0-step=6.ckpt", 6, "memory"]
    assert again["durable"] == ["end_of_training.ckpt", "step=4.ckpt"]


def test_a_sharded_save_that_overlaps_training_is_the_state_at_its_moment(fits, whole):
    """Captures begin only when the optimizer waits for them; a resume from memory, and one from the durable tier."""
    stages = {"steps": 5, "wipe": True, "config": OVERLAPPED}, {"steps": 7, "config": OVERLAPPED}
    (whole, _), (begun, _), (first, second), (last, _) = fits(whole, *stages, {"steps": 8, "wipe": True})
    assert begun["overlapped"] >= 2, "steps 2 and 4"
    assert begun["reported"] == [True] * begun["overlapped"], "each call tells that it has saved"
    assert first["from"] in (["step=4.ckpt", 4, "memory"], ["last.ckpt", 5, "memory"])
    assert last["from"][2] == "durable"
    for answer in (begun, first, second, last):
        assert answer["losses"] == those_of(whole, answer), "bit for bit"
        # Each rank prepares its first save: of each of 1,072 weights Adam keeps two more values, of each of four tensors
        # its number of steps.
        assert answer["prepared"] == [pytest.approx(4 * (3 * 1072 + 2 * 4) / 2, rel=0.05)]


def test_where_one_rank_cannot_save_beside_training_no_rank_does(fits):
    """Else one would wait for the part of another, which completes it when the save has ended."""
    ((*answers,),) = fits({"steps": 5, "config": OVERLAPPED, "refuses": 1})
    assert [answer["overlapped"] for answer in answers] == [None, None]
    assert "step=4.ckpt" in answers[0]["durable"]


@pytest.mark.parametrize("saves_end", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_what_too_many_uploads_leave_out_beside_training_replaces_nothing(saves_end, fits):
    """The call of an overlapped save has reported by then that it goes to the durable tier."""
    config = {"max_pending": 1, "pending_timeout_s": 1, "save_on_train_end": saves_end, **OVERLAPPED}
    named = {"save_last": False, "save_top_k": 1}
    ((answer,),) = fits({"steps": 8, "held": True, "config": config, "callback": named}, ranks=1)
    assert answer["reported"] == [True] * 4
    assert answer["durable"] == (["end_of_training.ckpt"] if saves_end else ["step=4.ckpt"])


@pytest.mark.matrix
@pytest.mark.parametrize("staging", ["eager", "overlapped"])
@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("sharded", "failed on ranks [0]: the state of a callback or loop holds a sharded tensor"),
        ("unpicklable", "failed on ranks [0]: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_what_one_rank_cannot_save_fails_the_save_on_all_ranks_and_training_goes_on(fits, tmp_path, odd, why, staging):
    warns = {"staging": staging, "on_save_error": "warn"}
    failed, raised = fits({"steps": 9, odd: 4, "config": warns}, {"steps": 13, odd: 12}, fails=True)
    assert [sorted(answer["losses"]) for answer in failed] == [list(range(9))] * 2
    assert "step=4.ckpt" not in failed[0]["durable"]
    assert "step=8.ckpt" in failed[0]["durable"]
    assert all(f"saving step=12.ckpt {why}" in answer["error"] for answer in raised), said(tmp_path, 0)


@pytest.mark.parametrize("grid", ["tensor parallel", pytest.param("the module's", marks=pytest.mark.matrix)])
def test_training_goes_on_where_two_dimensions_of_a_mesh_cut_the_weights(grid, fits, whole):
    """FSDP2 on top of tensor parallel cuts one dimension twice; a module may shard over a mesh that it has made itself."""
    begun, here = {"steps": 5, "wipe": True}, {"steps": 8, "ckpt_path": "step=4.ckpt"}
    other = {**here, "grid": "", "wipe": True}
    (whole, _), _, (last, _), (moved, _) = fits(whole, begun, here, other, grid=grid, average=True)
    assert (last["from"][:2], moved["from"][:2]) == (["step=4.ckpt", 4],) * 2
    assert last["mean"] == whole["mean"]
    assert last["losses"] == those_of(whole, last), "bit for bit"
    assert moved["mean"] == pytest.approx(whole["mean"], rel=1e-4)


@pytest.mark.matrix
def test_full_checkpoints_of_a_sharded_model_and_sharded_ones_replace_each_other(fits, whole, tmp_path):
    stages = {"steps": 4, "full": True, "wipe": True}, {"steps": 8}, {"steps": 12, "full": True, "wipe": True}
    (whole, _), _, (sharded, _), (full, _) = fits({**whole, "steps": 12}, *stages)
    assert sharded["from"][:2] in (["step=4.ckpt", 4], ["last.ckpt", 4])
    assert full["from"] == ["step=8.ckpt", 8, "durable"]
    assert torch.load(tmp_path / "durable" / "step=12.ckpt")["global_step"] == 12
    for answer in (sharded, full):
        assert answer["losses"] == pytest.approx(those_of(whole, answer), rel=1e-5)


def test_a_full_checkpoint_is_resumed_from_where_the_shards_after_it_are_damaged(fits, tmp_path, memory_dir):
    fits({"steps": 4, "full": True}, {"steps": 8})
    wipe(memory_dir)
    for shard in (tmp_path / "durable").glob("step=8.ckpt/*.distcp"):
        flip(shard)
    ((answer, _),) = fits({"steps": 9})
    assert answer["from"] == ["step=4.ckpt", 4, "durable"]


@pytest.mark.matrix
def test_fsdp1_and_its_folder_for_others(fits, whole, tmp_path):
    more = {"strategy": "fsdp1", "config": {"enable_async_checkpointing": False}}
    (whole, _), _, (first, _) = fits(whole, {"steps": 4, "wipe": True}, {"steps": 8, "wipe": True}, **more)
    assert first["from"] == ["step=4.ckpt", 4, "durable"]
    assert first["losses"] == those_of(whole, first)
    # Plain DCP reads the folder, and Lightning's own strategies know it.
    folder = tmp_path / "durable" / "step=8.ckpt"
    loaded = {"model": {"net.0.bias": torch.zeros(32)}}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert loaded["model"]["net.0.bias"].abs().sum() > 0
    assert torch.load(folder / "meta.pt", weights_only=False)["global_step"] == 8


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("full", [False, True])
def test_a_save_before_the_first_step_changes_nothing_of_training(fits, strategy, full, whole):
    """If asked for a missing state, torch has the optimizer make a step, which Adam then counts."""
    stages = {"steps": 3, "first": True}, {"steps": 3, "ckpt_path": "first.ckpt"}
    (whole, _), (saved, _), (resumed, _) = fits({**whole, "steps": 3}, *stages, strategy=strategy, full=full)
    assert saved["losses"] == whole["losses"], "bit for bit"
    assert resumed["from"][:2] == ["first.ckpt", 0]
    assert resumed["losses"] == whole["losses"], "bit for bit"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        # The outermost module's parameters come first there: each would get the state of another.
        ({"strategy": "ddp"}, {"strategy": "fsdp1", "flat": True}, "the checkpoint's optimizer states are by numbers"),
        (
            {"callback": {"save_weights_only": True}},
            {"ckpt_path": "step=4.ckpt", "callback": {"save_weights_only": True}},
            "can't go on from weights alone",
        ),
    ],
    ids=["numbers of parameters", "weights alone"],
)
def test_what_is_no_place_to_resume_from_is_refused(fits, first, then, says):
    *_, refused = fits({"steps": 4, **first}, {"steps": 8, **then}, fails=True)
    assert all(says in answer["error"] for answer in refused)


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
@pytest.mark.parametrize("joins", [6, 99])
def test_a_run_goes_on_where_some_parameters_had_no_gradients_yet(fits, joins, whole, tmp_path, memory_dir):
    stages = {"steps": 4, "wipe": True}, {"steps": 8, "ckpt_path": "step=4.ckpt"}
    (whole, _), _, (first, _) = fits(whole, *stages, joins=joins)
    assert first["from"][:2] == ["step=4.ckpt", 4]
    assert first["losses"] == those_of(whole, first), "bit for bit"
    # The same if newer ones turn out to be damaged while they are read.
    wipe(memory_dir)
    for shard in (tmp_path / "durable").glob("*/*.distcp"):
        if shard.parent.name != "step=4.ckpt":
            flip(shard, at=shard.stat().st_size // 2)
    ((again, _),) = fits({"steps": 8}, joins=joins)
    assert (again["from"][:2], again["losses"]) == (first["from"][:2], first["losses"])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ({"strategy": "fsdp1"}, {"strategy": "fsdp1"}, "AdamW"),
        ({"strategy": "fsdp2"}, {"strategy": "fsdp2"}, "AdamW"),
        ({"strategy": "ddp"}, {"strategy": "fsdp2"}, "AdamW"),
        ({"strategy": "fsdp2", "full": True}, {"strategy": "fsdp2"}, "SGD"),
        ({"strategy": "ddp"}, {"strategy": "fsdp1"}, "SGD"),
        ({"strategy": "fsdp1", "full": True}, {"strategy": "fsdp1"}, "AdamW"),
        ({"strategy": "fsdp1", "full": True}, {"strategy": "ddp"}, "AdamW"),
    ],
)
def test_groups_of_parameters_go_on_whatever_is_in_them(fits, before, after, optimizer, whole):
    """One is empty; their order, and that within each, is not the model's; layers are wrapped; SGD has no state."""
    more = {"optimizer": optimizer, "wrapped": "ddp" not in (before["strategy"], after["strategy"])}
    stages = {"steps": 4, "wipe": True, **before}, {"steps": 8, **after}
    (whole, _), _, (first, _) = fits({**whole, **after}, *stages, **more)
    assert first["from"][1] == 4
    assert first["losses"] == pytest.approx(those_of(whole, first), rel=1e-5)
