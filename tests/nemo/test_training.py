"""NeMo trainings on one device: a user's configuration, crashes, resumes."""

import pytest
from support.nemo_training import io_of, restored, same_weights

from tiered_checkpoint_io.nemo import S3CheckpointIO


@pytest.mark.parametrize("way", ["drop-in", "connector", "tiered"])
def test_a_training_that_crashed_goes_on_and_ends_as_if_it_had_not(runs, way, tmp_path):
    _, whole = runs.fit(way=way, max_steps=20)
    again = type(runs)(runs.dirpath + "-2", runs.memory_dir, tmp_path / "logs-2", namespace="second")
    again.fit(way=way, max_steps=20, stop_at=13)
    again.wipe()
    trainer, module = again.fit(way=way, max_steps=20)
    assert restored(trainer) == ("gpt--val_loss=1.00-step=10.ckpt", 10, "durable")
    assert min(module.seen) == 10
    assert same_weights(module, whole)
    assert again.durable() == runs.durable()
    assert isinstance(io_of(trainer), S3CheckpointIO)
    # Nothing goes to a local folder that is called as the bucket is.
    assert not (tmp_path / "s3:").exists()
