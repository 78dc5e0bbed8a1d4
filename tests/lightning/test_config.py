"""The IO and the callback from signatures, one configuration block (a dict, OmegaConf, Hydra's YAML), and command lines."""

import inspect
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from support.as_lightning import INSTALLED
from support.supporting import build
from support.training import Model

from tiered_checkpoint_io import (
    AsyncCheckpointIO,
    TieredCheckpointIO,
    TieredStorageReader,
    TieredStorageWriter,
    dcp,
    from_config,
)
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import NOT_OF_IO, IOKeys, TieredCheckpointConfig
from tiered_checkpoint_io.model.config import keys as config_keys
from tiered_checkpoint_io.model.retention import Best, Latest

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
    with initialize(version_base=None):
        overrides = ["hydra.searchpath=[pkg://tiered_checkpoint_io.configs]", f"+s3_checkpointing={group}"]
        overrides += [f"s3_checkpointing.dirpath={runs.dirpath}"]
        block = compose(overrides=[*overrides, f"s3_checkpointing.memory_dir={runs.memory_dir}"]).s3_checkpointing
    io = build(TieredCheckpointIO.from_config, block, drain="thread")
    assert isinstance(io, AsyncCheckpointIO) == asynchronous
    callback = TieredModelCheckpoint.from_config(block)
    assert callback.memory_every_n_train_steps == memory_every
    assert callback._every_n_train_steps == s3_every
    trainer = runs.trainer([callback], plugins=[io], max_steps=2)
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
    # Keys that are named in code have the defaults of ModelCheckpoint and of a plain CheckpointIO.
    assert TieredModelCheckpoint().memory_every_n_train_steps is None
    assert isinstance(TieredCheckpointIO(**short), TieredCheckpointIO)


def test_one_block_gives_the_io_and_the_callback_and_arguments_replace_what_it_says(tmp_path):
    block = {"dirpath": str(tmp_path), "namespace": "gpt-1"}
    for given, expected in (
        ({"every_n_train_steps": 5}, (10, 5, 0)),
        ({"every_n_epochs": 2}, (10, 0, 2)),
        ({"s3_every_n_train_steps": 20, "memory_every_n_train_steps": None}, (None, 20, 0)),
    ):
        io, made = from_config(OmegaConf.create(block), memory_keep_last=3, **given)
        assert (made.memory_every_n_train_steps, made._every_n_train_steps, made._every_n_epochs) == expected
        assert isinstance(io, AsyncCheckpointIO)
        assert (io.config.memory_keep_last, io.config.dirpath) == (3, made.dirpath)
    io, callback = from_config(block, enable_async_checkpointing=False, monitor="loss")
    assert isinstance(io, TieredCheckpointIO)
    assert callback.monitor == "loss"


def test_a_block_that_is_off_trains_as_lightning_alone_with_the_same_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = OmegaConf.create({"dirpath": "s3://bucket/run", "s3_every_n_train_steps": 2, "enabled": False})
    with pytest.warns(UserWarning, match="is off .enabled: false.: Lightning saves to its own folder"):
        io, callback = from_config(block, save_top_k=-1)
    trainer = Trainer(plugins=[io], callbacks=[callback], max_steps=4, logger=False, accelerator="cpu")
    trainer.fit(Model(), ckpt_path="tiered:latest")
    saved = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert saved == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    trainer.fit(Model(), ckpt_path=tmp_path / "checkpoints" / saved[0])
    with pytest.raises(ConfigError, match="enabled is 'no'"):
        from_config({**block, "enabled": "no"})


@pytest.mark.parametrize(
    ("make", "key", "says"),
    [
        (TieredCheckpointIO, "memory_every_n_train_steps", "IO does not take {}.*TieredModelCheckpoint"),
        (TieredCheckpointIO, "s3_every_n_train_steps", "TieredCheckpointIO does not take {}.*TieredModelCheckpoint"),
        (TieredCheckpointIO, "enable_async_checkpointing", "does not take {} .* AsyncCheckpointIO"),
        (TieredStorageWriter, "memory_every_n_train_steps", "dcp does not take {}"),
        (TieredStorageReader, "save_on_train_end", "dcp does not take {}"),
        (dcp.save, "enable_async_checkpointing", "dcp does not take {} .* async_save"),
        (TieredModelCheckpoint, "memory_keep_last", "does not take {} .* TieredCheckpointIO takes it"),
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


OURS = {"memory_every_n_train_steps", "s3_every_n_train_steps", "save_on_train_end"}


def arguments(of):
    """Returns each argument's default and type."""
    hints = typing.get_type_hints(of.__init__)
    found = inspect.signature(of).parameters.values()
    return {p.name: (p.default, hints[p.name]) for p in found if p.kind is not p.VAR_KEYWORD}


def test_the_callback_takes_what_model_checkpoint_takes():
    mine, theirs = arguments(TieredModelCheckpoint), arguments(ModelCheckpoint)
    # By position, as far as all supported releases agree.
    assert list(mine.items())[:6] == list(theirs.items())[:6]
    assert set(mine) - set(theirs) == OURS
    taken = {name: default for name, (default, _) in theirs.items() if name != "dirpath"}
    assert TieredModelCheckpoint(**taken).state_key == ModelCheckpoint().state_key


def test_the_io_takes_the_keys_that_it_reads_with_their_defaults_and_types():
    mine, hints = inspect.signature(TieredCheckpointIO).parameters, typing.get_type_hints(TieredCheckpointConfig)
    wanted = [each for each in config_keys() if each not in NOT_OF_IO]
    keys = {each.name: (each.default, hints[each.name]) for each in fields(TieredCheckpointConfig)}
    assert list(mine)[:2] == ["dirpath", "logger"]
    assert {name: (each.default, each.annotation) for name, each in mine.items() if name in wanted[1:]} == {
        name: keys[name] for name in wanted[1:]
    }
    assert set(mine) == {*wanted, "logger"}
    # For type checkers: another type is a wider one.
    types = typing.get_type_hints(IOKeys)
    assert list(types) == wanted[1:]
    wider = {name for name in types if types[name] != hints[name]}
    assert wider == {"safe_globals", "memory_dir", "spill_dir", "log_dir"}


def test_what_this_lightning_does_not_know_is_refused():
    if INSTALLED >= (2, 6):
        assert TieredModelCheckpoint(save_on_exception=True).save_on_exception
        return
    with pytest.raises(ConfigError, match="no argument 'save_on_exception'"):
        TieredModelCheckpoint(save_on_exception=True)


def command_line(**trainer):
    """Runs LightningCLI, which names the trainer's plugins by class and arguments."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    options = {"logger": False, "accelerator": "cpu", **trainer}
    return LightningCLI(Model, run=False, save_config_callback=None, args={"trainer": options})


def test_a_command_line_sees_and_makes_both(tmp_path, monkeypatch, runs):
    io = {"class_path": "tiered_checkpoint_io.TieredCheckpointIO"}
    io["init_args"] = {"dirpath": runs.dirpath, "memory_dir": runs.memory_dir, "memory_keep_last": 3}
    # The value that YAML makes.
    io["init_args"]["preflight"] = yaml.safe_load("off")
    io["init_args"]["retention"] = [{"latest": 3}, {"best": 1, "metric": "loss"}]
    callback = {"class_path": "tiered_checkpoint_io.callbacks.TieredModelCheckpoint"}
    callback["init_args"] = {
        "s3_every_n_train_steps": 50,
        "monitor": "loss",
        "save_top_k": 3,
        "filename": "best-{step}",
    }
    around = {"class_path": "tiered_checkpoint_io.AsyncCheckpointIO", "init_args": {"checkpoint_io": io}}
    monkeypatch.chdir(tmp_path)
    cli = command_line(plugins=[around], callbacks=[callback])
    made = next(each for each in cli.trainer.callbacks if isinstance(each, TieredModelCheckpoint))
    assert (made.monitor, made.save_top_k, made._every_n_train_steps) == ("loss", 3, 50)
    assert isinstance(cli.trainer.strategy.checkpoint_io, AsyncCheckpointIO)
    assert cli.trainer.strategy.checkpoint_io.config.memory_keep_last == 3
    assert cli.trainer.strategy.checkpoint_io.config.preflight == "off"
    assert cli.trainer.strategy.checkpoint_io.config.retention == (Latest(3), Best(1, "loss"))
    assert cli.trainer.strategy.checkpoint_io.config.memory_dir == str(Path(runs.memory_dir))


def test_a_command_line_takes_a_url_for_a_place_where_there_are_checkpoints(s3_server, s3_url, memory_dir):
    """A file of configuration is what it looks for there otherwise, and s3fs reads a folder as an empty file."""
    io = build(TieredCheckpointIO, s3_url, memory_dir=memory_dir, drain="thread")
    for name in ("a", "folder/b"):
        io.save_checkpoint({"global_step": 1}, f"{name}.ckpt")
    io.teardown()
    given = {"class_path": "tiered_checkpoint_io.TieredCheckpointIO", "init_args": {"dirpath": s3_url}}
    around = {"class_path": "tiered_checkpoint_io.AsyncCheckpointIO", "init_args": {"checkpoint_io": given}}
    callback = {"class_path": "tiered_checkpoint_io.callbacks.TieredModelCheckpoint"}
    callback["init_args"] = {"dirpath": f"{s3_url}/folder"}
    for plugin in (given, around):
        trainer = command_line(plugins=[plugin], callbacks=[callback]).trainer
        assert trainer.strategy.checkpoint_io.config.dirpath == s3_url
        assert trainer.checkpoint_callback.dirpath == f"{s3_url}/folder"
