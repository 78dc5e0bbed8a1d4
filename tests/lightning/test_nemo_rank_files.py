"""Choice of the checkpoint to resume from if each rank has a file of its own; needs only Lightning."""

import pytest
from support.supporting import build
from support.training import Runs

from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError
from tiered_checkpoint_io.nemo import connector
from tiered_checkpoint_io.nemo.io import NeMoCheckpointIO
from tiered_checkpoint_io.nemo.layouts import Rules


class Ranks:
    """Saves of two ranks, and rank 0's choice of the checkpoint to resume from."""

    def __init__(self, job):
        self.job = job
        self.io = build(NeMoCheckpointIO, job.dirpath, memory_dir=job.memory_dir, wait_timeout_s=60, drain="thread")

    def save(self, name, *steps, **changes):
        """Saves a shard of each rank at its step in ``steps``; only the first ranks' shards if there are fewer."""
        for rank, step in enumerate(steps):
            state = {"global_step": step, "pytorch-lightning_version": "2.4", "state_dict": {}, "optimizer_states": [1]}
            state |= changes
            kept = {key: value for key, value in state.items() if value is not None}
            self.io.save_checkpoint(kept, f"mp_rank_{rank:02d}/{name}")

    def chosen(self, shards=2, **rules):
        self.io.teardown()
        # The next start knows nothing of the durable tier, and asks.
        found = connector.find_checkpoint(Ranks(self.job).io, Rules(**rules), shards, restored=False)
        return found and found.removeprefix(f"{self.job.dirpath}/")


@pytest.fixture
def ranks(tmp_path, memory_dir):
    return Ranks(Runs(str(tmp_path / "durable"), memory_dir, tmp_path))


@pytest.mark.parametrize("name", ["preempted.ckpt", "end_of_training.ckpt", "gpt--val_loss=0.1-epoch=0.ckpt"])
def test_of_files_of_each_rank_the_latest_save_counts_whatever_its_name(ranks, name):
    ranks.save("gpt--val_loss=0.9-epoch=0-last.ckpt", 5, 5)
    ranks.save(name, 7, 7)
    assert ranks.chosen() == name
    # Training can't resume from weights only.
    ranks.save("gpt--val_loss=0.0-epoch=0-last.ckpt", 9, 9, optimizer_states=None)
    assert ranks.chosen() == name


def test_shards_of_different_steps_are_never_loaded_together(ranks):
    """A name that is saved again and again, and a crash between two ranks' saves."""
    ranks.save("gpt-last.ckpt", 5, 5)
    ranks.save("gpt-step=6.ckpt", 6, 6)
    ranks.save("gpt-last.ckpt", 7)
    assert ranks.chosen() == "gpt-step=6.ckpt"
    for rank in range(2):
        ranks.io.remove_checkpoint(f"mp_rank_{rank:02d}/gpt-step=6.ckpt")
    with pytest.raises(CheckpointNotFoundError, match="lacks the shards of some ranks"):
        ranks.chosen(resume_ignore_no_checkpoint=True)


def test_a_crash_within_the_first_save_leaves_what_nemo_wrote(ranks):
    folders = [ranks.job.root / "durable" / f"mp_rank_{rank:02d}" for rank in range(2)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "gpt--step=900-last.ckpt").write_bytes(b"NeMo's")
    ranks.save("gpt--step=1000-last.ckpt", 1000)
    assert ranks.chosen() == "gpt--step=900-last.ckpt"
    (folders[1] / "gpt--step=900-last.ckpt").unlink()
    with pytest.raises(CheckpointNotFoundError, match="lacks the shards of some ranks"):
        ranks.chosen(resume_ignore_no_checkpoint=True)


def test_a_sole_first_save_that_was_cut_off_is_nothing_to_resume_from(ranks):
    ranks.save("gpt-step=5.ckpt", 5)
    assert ranks.chosen(resume_ignore_no_checkpoint=True) is None
    # If several lack shards, these may be lost: no start from scratch.
    ranks.save("gpt-step=10.ckpt", 10)
    with pytest.raises(CheckpointNotFoundError, match=r"gpt-step=10.ckpt, mp_rank_00/gpt-step=5.ckpt: each is unf"):
        ranks.chosen(resume_ignore_no_checkpoint=True)


def test_ranks_that_load_different_steps_fail_together(ranks, monkeypatch):
    """A node has a newer save of the name in its memory, which is not uploaded yet. Rank 0's answer is a mock."""
    trainer = ranks.job.trainer([], io=ranks.io, asynchronous=False)
    resuming = connector.NeMoCheckpointConnector.of(trainer)
    resuming._loaded_checkpoint = {"global_step": 7}
    resuming._check_steps("gpt-last.ckpt")
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda _: 5)
    with pytest.raises(RestoreError, match="this one's is of step 7, rank 0's of step 5"):
        resuming._check_steps("gpt-last.ckpt")
    ranks.io.teardown()


def test_averages_belong_to_each_ranks_shard(ranks):
    for step in (5, 7):
        ranks.save(f"gpt-step={step}-EMA.ckpt", step, step)
        ranks.save(f"gpt-step={step}.ckpt", step, step)
    ranks.io.remove_checkpoint("mp_rank_01/gpt-step=7-EMA.ckpt")
    ranks.io.teardown()

    def find():
        io = Ranks(ranks.job).io
        io.companion = "-EMA"
        return connector.find_checkpoint(io, Rules(resume_ignore_no_checkpoint=True), 2, restored=False)

    assert find() == f"{ranks.job.dirpath}/gpt-step=5.ckpt"
    ranks.io.remove_checkpoint("mp_rank_00/gpt-step=5-EMA.ckpt")
    ranks.io.teardown()
    with pytest.raises(CheckpointNotFoundError, match="or their averages"):
        find()
