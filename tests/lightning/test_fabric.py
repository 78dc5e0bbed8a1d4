"""Lightning Fabric: a loop that is killed without notice and resumed."""

from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from support.launch import launch, said
from support.supporting import build

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.errors import UsageError
from tiered_checkpoint_io.fabric import save

WORKER = Path(__file__).with_name("fabric_worker.py")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_the_example_is_killed_and_resumes_bit_identically(tmp_path, memory_dir, ranks):
    def train(folder, **job):
        options = {"namespace": folder, "memory_dir": memory_dir, "wait_timeout_s": 60, "on_save_error": "raise"}
        options |= {"memory_every_n_train_steps": 3, "s3_every_n_train_steps": 10}
        job |= {"devices": ranks, "dirpath": str(tmp_path / folder), "steps": 22, "options": options}
        answers = launch(tmp_path, [job] * ranks, worker=WORKER)
        if "die_after" not in job:
            assert None not in answers, said(tmp_path, answers.index(None))
        return answers

    whole = train("whole")
    assert train("killed", die_after=13) == [None] * ranks
    resumed = train("killed")
    # Step 12 was in memory alone.
    assert [answer["first"] for answer in resumed] == [13] * ranks
    assert {answer["weights"] for answer in resumed} == {answer["weights"] for answer in whole}
    assert sorted(path.name for path in (tmp_path / "killed").glob("*.ckpt")) == ["step=10.ckpt", "step=20.ckpt"]
    # Readable without this package.
    assert torch.load(tmp_path / "killed" / "step=20.ckpt")["step"] == 20


def test_a_fabric_without_the_io_is_refused():
    with pytest.raises(UsageError, match=r"with a TorchCheckpointIO .*or Fabric, plugins="):
        save(Fabric(accelerator="cpu"), {"step": 10}, 10)


def test_a_filter_of_what_the_state_does_not_have_is_refused(tmp_path, memory_dir):
    io = build(TieredCheckpointIO, dirpath=str(tmp_path / "run"), memory_dir=memory_dir, drain="thread")
    with pytest.raises(UsageError, match=r"filter names modle, .*the state has model, step"):
        save(Fabric(accelerator="cpu", plugins=[io]), {"model": 1, "step": 3}, 3, filter={"modle": lambda *_: False})


def test_one_tier_may_be_named_as_a_text(tmp_path, memory_dir):
    io = build(TieredCheckpointIO, dirpath=str(tmp_path / "run"), memory_dir=memory_dir, drain="thread")
    fabric = Fabric(accelerator="cpu", plugins=[AsyncCheckpointIO(io)])
    save(fabric, {"step": 3}, 3, tiers="memory")
    save(fabric, {"step": 4}, 4, tiers="durable")
    assert fabric.load("step=3.ckpt")["step"] == 3
    assert io.checkpointer.restored.tier == "memory"
    io.teardown()
    assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == ["step=4.ckpt"]


def test_a_model_saved_alone_is_not_what_a_loop_resumes_from(tmp_path, memory_dir):
    block = {"dirpath": str(tmp_path / "run"), "memory_dir": memory_dir, "memory_every_n_train_steps": 2}
    io = TieredCheckpointIO.from_config(block)
    fabric = Fabric(accelerator="cpu", plugins=[io])
    model = torch.nn.Linear(2, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for step in range(1, 4):
        save(fabric, {**state, "step": step}, step)
    fabric.save("best.ckpt", {"model": model})
    fabric.load("tiered:latest", state)
    assert state["step"] == 2
    assert set(fabric.load("best.ckpt")) == {"model"}
    # All that a loop resumes from, and more.
    fabric.save("by-hand.ckpt", {**state, "step": 3, "note": "mine"})
    fabric.load("tiered:latest", state)
    assert state["step"] == 3
    io.teardown()
