"""The IO and the callback from one configuration block: a dict, OmegaConf, Hydra's YAML."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from tiered_checkpoint_io import (
    AsyncCheckpointIO,
    TieredCheckpointConfig,
    TieredCheckpointIO,
    TieredStorageReader,
    TieredStorageWriter,
    dcp,
    from_config,
)
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError

YAML = Path(__file__).parents[2] / "configs" / "s3_checkpointing" / "default.yaml"


@pytest.mark.parametrize(
    ("group", "asynchronous", "memory_every", "s3_every"),
    [
        ("default", True, 10, 50),
        ("local", True, 10, 50),
        ("memory_only", True, 10, 0),
        ("s3_only", False, None, 50),
    ],
)
def test_yaml_alone_trains(group, asynchronous, memory_every, s3_every, runs):
    with initialize_config_module("tiered_checkpoint_io.configs", version_base=None):
        overrides = [f"+s3_checkpointing={group}", f"s3_checkpointing.dirpath={runs.dirpath}"]
        block = compose(overrides=[*overrides, f"s3_checkpointing.memory_dir={runs.memory_dir}"]).s3_checkpointing
    io = TieredCheckpointIO.from_config(block)
    assert isinstance(io, AsyncCheckpointIO) == asynchronous
    callback = TieredModelCheckpoint.from_config(block)
    assert callback.memory_every_n_train_steps == memory_every
    assert callback._every_n_train_steps == s3_every
    trainer = runs.trainer([callback], plugins=[io], max_steps=2)
    from support.training import Model

    trainer.fit(Model(), ckpt_path="tiered:latest")
    assert trainer.global_step == 2


def test_a_block_of_two_keys_means_the_same_as_the_yaml_file(tmp_path):
    short = {"dirpath": str(tmp_path), "namespace": "gpt-1"}
    full = {**OmegaConf.to_container(OmegaConf.load(YAML)), **short}
    assert TieredCheckpointConfig.from_any(short) == TieredCheckpointConfig.from_any(full)
    for block in (short, OmegaConf.create(short), full):
        assert isinstance(TieredCheckpointIO.from_config(block), AsyncCheckpointIO)
        callback = TieredModelCheckpoint.from_config(block)
        assert (callback.memory_every_n_train_steps, callback._every_n_train_steps) == (10, 50)
    # What is named in code, one by one, has the defaults of ModelCheckpoint and of a plain CheckpointIO.
    assert TieredModelCheckpoint().memory_every_n_train_steps is None
    assert isinstance(TieredCheckpointIO(**short), TieredCheckpointIO)


def test_arguments_replace_what_the_block_says(tmp_path):
    block = {"dirpath": str(tmp_path)}
    for given, expected in (
        ({"every_n_train_steps": 5}, (10, 5, 0)),
        ({"every_n_epochs": 2}, (10, 0, 2)),
        ({"s3_every_n_train_steps": 20, "memory_every_n_train_steps": None}, (None, 20, 0)),
    ):
        made = TieredModelCheckpoint.from_config(block, **given)
        assert (made.memory_every_n_train_steps, made._every_n_train_steps, made._every_n_epochs) == expected


def test_one_block_gives_the_io_and_the_callback(tmp_path):
    block = {"dirpath": str(tmp_path), "namespace": "gpt-1", "memory_every_n_train_steps": 5}
    io, callback = from_config(OmegaConf.create(block), monitor="loss", memory_keep_last=3, every_n_epochs=2)
    assert isinstance(io, AsyncCheckpointIO)
    assert (io.config.memory_keep_last, io.config.dirpath) == (3, callback.dirpath)
    assert (callback.memory_every_n_train_steps, callback.monitor, callback._every_n_epochs) == (5, "loss", 2)
    io, callback = from_config(block, enable_async_checkpointing=False, s3_every_n_train_steps=7)
    assert isinstance(io, TieredCheckpointIO)
    assert callback._every_n_train_steps == 7


@pytest.mark.parametrize(
    ("make", "key", "says"),
    [
        (
            TieredCheckpointIO,
            "memory_every_n_train_steps",
            "TieredCheckpointIO does not take {}.*TieredModelCheckpoint",
        ),
        (TieredCheckpointIO, "s3_every_n_train_steps", "TieredCheckpointIO does not take {}.*TieredModelCheckpoint"),
        (TieredCheckpointIO, "enable_async_checkpointing", "does not take {} .* AsyncCheckpointIO"),
        (TieredStorageWriter, "memory_every_n_train_steps", "dcp does not take {}"),
        (TieredStorageReader, "save_on_train_end", "dcp does not take {}"),
        (dcp.save, "enable_async_checkpointing", "dcp does not take {} .* async_save"),
        (TieredModelCheckpoint.from_config, "memory_keep_last", "does not take {} .* TieredCheckpointIO takes it"),
    ],
)
def test_a_class_refuses_a_key_that_another_one_reads(make, key, says, tmp_path):
    block = {"dirpath": str(tmp_path)}
    arguments = [block] if make == TieredModelCheckpoint.from_config else [{}] if make is dcp.save else []
    options = {key: 3} if arguments == [block] else {**block, key: 3}
    with pytest.raises(ConfigError, match=says.format(key)):
        make(*arguments, **options)
    # A whole block may hold it.
    from_config({**block, key: getattr(TieredCheckpointConfig.from_any(block), key)})
