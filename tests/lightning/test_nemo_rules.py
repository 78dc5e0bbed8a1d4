"""NeMo's names, rules of resuming, and advice on concurrency: no NeMo needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.nemo.io import NeMoCheckpointIO, advised
from tiered_checkpoint_io.nemo.layouts import Rules, choose, complete_checkpoints

DIRPATH = "s3://bucket/run"


def keys(*names):
    return [(name, float(at)) for at, name in enumerate(names)]


def chosen(*names, **rules):
    return choose(keys(*names), Rules(**rules), dirpath=DIRPATH)


# -------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    "folder", ["mp_rank_01", "mp_rank_00_fsdp_shard_00003", "tp_rank_01_pp_rank_012", "run/fsdp_shard_00002"]
)
def test_files_of_single_ranks_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="is a file of one model-parallel rank"):
        chosen(f"{folder}/x-last.ckpt")
    io = NeMoCheckpointIO(str(tmp_path))
    with pytest.raises(ConfigError, match="is a file of one model-parallel rank"):
        io.save_checkpoint({}, f"{folder}/x.ckpt")
    # A name like that is no rank's folder.
    assert chosen("my_mp_rank_study/x-last.ckpt") == "my_mp_rank_study/x-last.ckpt"


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=8), st.data())
def test_checkpoints_are_listed_by_step(steps, data):
    names = data.draw(st.permutations([f"x-step={step}-last.ckpt" for step in steps]))
    assert [ids.step_in_name(path) for path in complete_checkpoints(keys(*names))] == sorted(steps)


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
