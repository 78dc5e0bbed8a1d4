"""NeMo's names and rules of resuming: no NeMo needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.nemo.connector import Rules, choose, complete_checkpoints

DIRPATH = "s3://bucket/run"


def keys(*names):
    return [(name, float(at)) for at, name in enumerate(names)]


def chosen(*names, **rules):
    return choose(keys(*names), Rules(**rules), dirpath=DIRPATH)


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
