"""The scripts in examples/nemo do what they say; run in this process, because importing NeMo takes long."""

import functools
import os
import sys
from pathlib import Path

import pytest
import torch
from support.nemo_training import NeMoRuns, restored

EXAMPLES = Path(__file__).parents[2] / "examples" / "nemo"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    environment = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # Lightning's launcher leaves the rank of this process there.
    os.environ.clear()
    os.environ.update(environment)
    for name in ("train", "drop_in"):
        sys.modules.pop(name, None)


def overrides(dirpath, *more):
    return [f"exp_manager.checkpoint_callback_params.dirpath={dirpath}", *more]


def test_the_example_goes_on_where_it_was(examples, s3_url, memory_dir, tmp_path):
    import train

    def start(steps):
        memory = f"+s3_checkpointing.memory_dir={memory_dir}"
        return train.train(train.read_config(overrides(s3_url, memory, f"trainer.max_steps={steps}")))

    assert restored(start(23)) is None
    assert restored(start(30))[1:] == (23, "memory")
    assert "gpt.nemo" in NeMoRuns(s3_url, memory_dir, tmp_path).objects()


def test_a_nemo_script_of_which_one_import_line_was_changed_runs(examples, s3_url, memory_dir, tmp_path, monkeypatch):
    import drop_in

    # Only the folder of node memory differs from a user's, so that the test leaves no file there.
    monkeypatch.setattr(drop_in, "S3CheckpointIO", functools.partial(drop_in.S3CheckpointIO, memory_dir=memory_dir))
    assert drop_in.train(drop_in.read_config(overrides(s3_url, "trainer.max_steps=23"))).global_step == 23
    torch.distributed.destroy_process_group()
    again = drop_in.train(drop_in.read_config(overrides(s3_url, "trainer.max_steps=30")))
    assert restored(again)[1] == 23
    assert "gpt.nemo" in NeMoRuns(s3_url, memory_dir, tmp_path).objects()
    text = (EXAMPLES / "drop_in.py").read_text()
    assert text.count("tiered_checkpoint_io") == 1
