"""A data loader's state that a checkpoint holds, and a resume leaves out, is said once."""

import pytest
import torch
from support.supporting import supported

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(*more):
    held = {"model": {"w": torch.ones(3)}, "optim": {"m": torch.ones(3)}, "at": 7}
    return {**held, **{key: {"position": torch.tensor(4)} for key in more}}


@pytest.fixture
def options(tmp_path, memory_dir):
    with supported(drain="thread"):
        made = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
        yield made
        close_shared(settings_of(None, made))


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_a_resume_without_a_loaders_state_is_said_and_an_evaluation_is_not(options, caplog, kind):
    def said(wanted):
        caplog.clear()
        dcp.load(wanted, kind=kind, **options)
        return [record.getMessage() for record in caplog.records if "data loader" in record.getMessage()]

    dcp.save(state("dataloader", "train_sampler"), checkpoint_id="step_7", kind=kind, save_to_s3=False, **options)
    assert said(state("dataloader", "train_sampler")) == []
    assert said({"model": {"w": torch.zeros(3)}}) == [], "weights alone"
    (line,) = said(state("dataloader"))
    assert "this resume does not restore the state of 1 data loader that step_7 holds" in line
    assert "no train_sampler" in line
    (line,) = said(state())
    assert "the state of 2 data loaders that step_7 holds" in line
    assert said(state("dataloader", "train_sampler")) == []


def test_a_loader_within_an_applications_state_is_found(options, caplog):
    dcp.save({"app": state("dataloader")}, checkpoint_id="step_7", save_to_s3=False, **options)
    dcp.load({"app": state()}, **options)
    assert "the state of 1 data loader that step_7 holds" in caplog.text
    assert "app.dataloader" in caplog.text
