"""Lightning Fabric: the example, killed without notice and resumed; and what it fills."""

from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from support.launch import launch, said

from tiered_checkpoint_io.errors import CheckpointNotFoundError

WORKER = Path(__file__).with_name("fabric_worker.py")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_the_example_is_killed_and_resumes_bit_identically(tmp_path, memory_dir, ranks):
    def train(folder, **job):
        options = {"memory_dir": f"{memory_dir}/{folder}", "drain": "thread", "on_save_error": "raise"}
        Path(options["memory_dir"]).mkdir(exist_ok=True)
        job |= {"devices": ranks, "dirpath": str(tmp_path / folder), "steps": 22, "options": options}
        job |= {"memory_every": 3, "durable_every": 9}
        answers = launch(tmp_path, [job] * ranks, worker=WORKER)
        if "die_after" not in job:
            assert None not in answers, said(tmp_path, answers.index(None))
        return answers

    whole = train("whole")
    assert train("killed", die_after=13) == [None] * ranks
    resumed = train("killed")
    # Step 12 was in memory only.
    assert [answer["first"] for answer in resumed] == [13] * ranks
    assert {answer["weights"] for answer in resumed} == {answer["weights"] for answer in whole}
    assert sorted(path.name for path in (tmp_path / "killed").glob("*.ckpt")) == ["step=18.ckpt", "step=9.ckpt"]
    # Readable without this package.
    assert torch.load(tmp_path / "killed" / "step=18.ckpt")["step"] == 18


@pytest.mark.parametrize("strict", [True, False])
def test_fabric_fills_a_state_or_says_that_there_is_no_checkpoint(runs, strict):
    """An unfilled state must not pass for restored; a load without a target returns something falsy."""
    io = runs.io()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model = fabric.setup(torch.nn.Linear(2, 2))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "step": 0}
    for target in (state, model):
        with pytest.raises(CheckpointNotFoundError, match=f"there is no checkpoint at {io.config.dirpath} yet"):
            fabric.load("tiered:latest", target, strict=strict)
    assert not fabric.load("tiered:latest")
    fabric.save(f"{io.config.dirpath}/step-5.ckpt", {**state, "step": 5})
    fabric.load("tiered:latest", state, strict=strict)
    assert state["step"] == 5
    io.teardown()
