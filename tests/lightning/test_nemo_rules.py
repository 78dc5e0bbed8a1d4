"""NeMo's layouts, rules of resuming, also of one file a rank, and advice on concurrency: no NeMo needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.supporting import build
from support.training import Runs

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, RestoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.nemo import connector
from tiered_checkpoint_io.nemo.io import NeMoCheckpointIO, advised
from tiered_checkpoint_io.nemo.layouts import (
    Rules,
    choose,
    complete_checkpoints,
    rank_folder_of,
    without_rank,
)

DIRPATH = "s3://bucket/run"


def keys(*names):
    return [(name, float(at)) for at, name in enumerate(names)]


def chosen(*names, shards=1, **rules):
    return choose(keys(*names), Rules(**rules), dirpath=DIRPATH, shards=shards)


# ------------------------------------------------------------------------------------------ layouts
@pytest.mark.parametrize(
    ("path", "folder", "shared"),
    [
        ("x.ckpt", None, "x.ckpt"),
        ("a/x.ckpt", None, "a/x.ckpt"),
        ("mp_rank_01/x.ckpt", "mp_rank_01", "x.ckpt"),
        ("s3://b/run/mp_rank_01/x.ckpt", "mp_rank_01", "s3://b/run/x.ckpt"),
        ("run/mp_rank_00_fsdp_shard_00003/x.ckpt", "mp_rank_00_fsdp_shard_00003", "run/x.ckpt"),
        ("run/tp_rank_01_pp_rank_012/x.ckpt", "tp_rank_01_pp_rank_012", "run/x.ckpt"),
        ("fsdp_shard_00002/x.ckpt", "fsdp_shard_00002", "x.ckpt"),
        # Not a rank's folder, though NeMo's own test for parts of the name takes it for one.
        ("my_mp_rank_study/x.ckpt", None, "my_mp_rank_study/x.ckpt"),
    ],
)
def test_a_path_tells_whose_it_is(path, folder, shared):
    assert rank_folder_of(path) == folder
    assert without_rank(path) == shared


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_the_choice_is_the_greatest_step_that_every_rank_has(steps, count, data):
    """Against an oracle that knows nothing of names."""
    have = {
        step: data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count), label=str(step))
        for step in steps
    }
    names = [f"mp_rank_{rank:02d}/x-step={step}-last.ckpt" for step, some in have.items() for rank in some]
    if count == 1:
        names = [name.partition("/")[2] for name in names]
    whole = [step for step, some in have.items() if len(some) == count]
    names = data.draw(st.permutations(names))
    found = complete_checkpoints(keys(*names), shards=count)
    assert [ids.step_in_name(path) for path in found] == sorted(whole)


def test_a_distributed_checkpoint_is_its_folder_once_its_last_file_is_there():
    def folder(step, *files):
        return [f"gpt-step={step}-last/{file}" for file in files]

    old, new = folder(9, "common.pt", "__0_0.distcp", "metadata.json"), folder(10, "common.pt", "__0_0.distcp")
    assert chosen(*old, *new) == "gpt-step=9-last"
    assert chosen(*old, *new, "gpt-step=10-last/.metadata") == "gpt-step=10-last"
    # A file in such a folder is no checkpoint by itself.
    assert complete_checkpoints(keys(*old, "gpt-step=9-last/x.ckpt")) == ["gpt-step=9-last"]


# ------------------------------------------------------------------------------------------- rules
def test_two_last_checkpoints_after_a_crash_are_no_error():
    assert chosen("gpt--step=900-last.ckpt", "gpt--step=1000-last.ckpt") == "gpt--step=1000-last.ckpt"
    # If names have no step, the one written last.
    assert chosen("gpt--val_loss=2.0-last.ckpt", "gpt--val_loss=1.0-last.ckpt") == "gpt--val_loss=1.0-last.ckpt"


def test_others_than_the_last_are_not_resumed_from_as_nemo_has_it():
    assert chosen("gpt--step=900.ckpt", "gpt-step=9-last-EMA.ckpt", "gpt.nemo", ".tiered/manifests/x-last.ckpt") is None


def test_an_end_is_gone_on_with_only_where_that_is_wanted():
    names = ("gpt--step=10-last.ckpt", "gpt--step=10--end.ckpt")
    with pytest.raises(ConfigError, match=r"has completed.*resume_past_end: true"):
        chosen(*names)
    assert chosen(*names, resume_past_end=True) == "gpt--step=10--end.ckpt"
    # Once all ranks have it.
    shards = [f"mp_rank_{rank:02d}/{name}" for name in names for rank in range(2)]
    assert chosen(*shards[:3], shards=2) == "gpt--step=10-last.ckpt"
    with pytest.raises(ConfigError, match="has completed"):
        chosen(*shards, shards=2)
    assert chosen("weekend.ckpt", "x-last.ckpt") == "x-last.ckpt"


def test_what_nemo_had_not_finished_is_passed_over_and_never_a_start_from_scratch():
    names = ("gpt-step=9-last.ckpt", "gpt-step=10-last.ckpt", "gpt-step=10-last-unfinished")
    assert chosen(*names) == "gpt-step=9-last.ckpt"
    with pytest.raises(CheckpointNotFoundError, match="unfinished"):
        chosen(*names[1:], resume_ignore_no_checkpoint=True)


# ------------------------------------------------------------------------------------- concurrency
SIZES = st.integers(1, 128)


@given(SIZES, SIZES, SIZES)
def test_auto_stays_within_what_s3_serves_with_headroom(tensor, pipeline, data):
    parts = tensor * pipeline
    config = TieredCheckpointConfig(dirpath=DIRPATH)
    config, warnings = advised(config, world_size=parts * data, tensor=tensor, pipeline=pipeline)
    for value, limit in ((config.max_write_concurrency, 3_500), (config.max_read_concurrency, 5_500)):
        assert value >= 1
        # More positions than requests a second: one connection each is the least that works.
        assert value * parts * 1.15 <= limit or value == 1
        assert value == 16 or value + 1 > limit / 1.15 / parts
    assert warnings == []


def test_figures_of_ones_own_are_kept_and_warned_of_and_impossible_sizes_are_refused():
    """NeMo's own example: 10 x 8 x 40 x 1.15 is above 3,500."""
    given = TieredCheckpointConfig(dirpath=DIRPATH, max_write_concurrency=10, max_read_concurrency=14)
    assert advised(given, world_size=64, tensor=8, pipeline=8) == (given, [])
    config, (told,) = advised(given, world_size=320, tensor=8, pipeline=40)
    assert config == given
    assert all(said in told for said in ("max_write_concurrency is 10", "3,680", "at most 9, or 'auto'"))
    with pytest.raises(ConfigError, match="a size below 1"):
        advised(given, world_size=1, tensor=0, pipeline=1)
    with pytest.raises(ConfigError, match=r"is 8, of 4 ranks.*tensor_model_parallel_size"):
        advised(given, world_size=4, tensor=4, pipeline=2)


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
