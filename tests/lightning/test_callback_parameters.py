"""What the callback and the IO take is said by their signatures: Lightning's arguments, and the configuration's keys."""

import inspect
import re
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from support.supporting import build

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointConfig, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import NOT_OF_IO, IOKeys
from tiered_checkpoint_io.model.config import keys as config_keys
from tiered_checkpoint_io.model.retention import Best, Latest

OURS = {"memory_every_n_train_steps", "s3_every_n_train_steps", "save_on_train_end"}
#: What only newer releases of Lightning know.
NEWER = {"save_on_exception"}


def arguments(of):
    """Each argument's default and type."""
    hints = typing.get_type_hints(of.__init__)
    found = inspect.signature(of).parameters.values()
    return {p.name: (p.default, hints[p.name]) for p in found if p.kind is not p.VAR_KEYWORD}


def texts(docstring, head):
    """What a section of a docstring says of each name."""
    section = inspect.cleandoc(docstring).partition(f"{head}:\n")[2].partition("\n\n")[0]
    entries = (entry.partition(": ") for entry in re.split(r"^    (?! )", section, flags=re.MULTILINE)[1:])
    return {name: " ".join(text.split()) for name, _, text in entries}


def documented(of):
    return set(texts(of.__init__.__doc__, "Args"))


def test_the_callback_takes_what_model_checkpoint_takes():
    mine, theirs = arguments(TieredModelCheckpoint), arguments(ModelCheckpoint)
    assert {name: mine[name] for name in theirs} == theirs
    assert set(mine) - set(theirs) - NEWER == OURS
    # By position, as far as all supported releases agree.
    assert list(mine)[:6] == list(theirs)[:6]
    assert documented(TieredModelCheckpoint) == set(mine)


def test_the_io_takes_the_keys_that_it_reads_with_their_defaults_and_types():
    mine, hints = inspect.signature(TieredCheckpointIO).parameters, typing.get_type_hints(TieredCheckpointConfig)
    wanted = [each for each in config_keys() if each not in NOT_OF_IO]
    keys = {each.name: (each.default, hints[each.name]) for each in fields(TieredCheckpointConfig)}
    assert list(mine)[:2] == ["dirpath", "logger"]
    assert {name: (each.default, each.annotation) for name, each in mine.items() if name in wanted[1:]} == {
        name: keys[name] for name in wanted[1:]
    }
    assert set(mine) == {*wanted, "logger"}
    # What type checkers go by: where it is another type, that takes more.
    told = typing.get_type_hints(IOKeys)
    assert list(told) == wanted[1:]
    assert {name for name in told if told[name] != hints[name]} == {
        "safe_globals",
        "memory_dir",
        "spill_dir",
        "log_dir",
    }


def test_what_this_lightning_does_not_know_is_refused(monkeypatch):
    known = inspect.signature(ModelCheckpoint.__init__)
    older = known.replace(parameters=[p for p in known.parameters.values() if p.name not in NEWER])
    if "save_on_exception" in known.parameters:
        assert TieredModelCheckpoint(save_on_exception=True).save_on_exception
    monkeypatch.setattr(inspect, "signature", lambda _: older)
    TieredModelCheckpoint(save_on_exception=False)
    with pytest.raises(ConfigError, match=r"save_on_exception is True, but lightning .* leave save_on_exception out"):
        TieredModelCheckpoint(save_on_exception=True)


def command_line(**trainer):
    """As LightningCLI does it: what the trainer has is named by class and arguments."""
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from support.training import Model

    options = {"logger": False, "accelerator": "cpu", **trainer}
    return LightningCLI(Model, run=False, save_config_callback=None, args={"trainer": options})


def test_a_command_line_sees_and_makes_both(tmp_path, monkeypatch, runs):
    io = {"class_path": "tiered_checkpoint_io.TieredCheckpointIO"}
    io["init_args"] = {"dirpath": runs.dirpath, "memory_dir": runs.memory_dir, "memory_keep_last": 3}
    # As YAML has it.
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
