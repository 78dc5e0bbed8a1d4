"""Checkpoints that hold more than tensors: what loads as it is, what is refused, and the line that allows it."""

import argparse
import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import logging
import os
import pathlib
import pickle
import random
import re
import uuid
from typing import NamedTuple

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from support.hostile import file_of, same
from support.supporting import build
from torch.distributed.checkpoint.api import CheckpointException

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageReader, TieredStorageWriter
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import ConfigError, RestoreError, TieredCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Schedule:
    """An object of the user's own."""

    def __init__(self, warmup):
        self.warmup = warmup


class Intruder:
    """Runs code if it is unpickled without care."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (os.mkdir, (str(self.witness),))


#: torch's own.
FORCED = pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
NAME = f"{Schedule.__module__}.Schedule"


class Saved:
    """A checkpoint of one kind that holds an object besides its tensors."""

    def __init__(self, kind, folder, memory_dir):
        self.kind = kind
        self.options = {"dirpath": str(folder), "memory_dir": memory_dir, "on_save_error": "raise", "drain": "thread"}

    def save(self, held):
        state = {"w": torch.arange(4.0), "held": held}
        if self.kind == "full":
            io = build(TieredCheckpointIO, **self.options)
            io.save_checkpoint(state, "step=1.ckpt")
            io.teardown()
            return
        with contextlib.closing(build(TieredStorageWriter, **self.options)) as writer:
            ours.save(state, checkpoint_id="step_1", kind=self.kind, storage_writer=writer)

    def load(self, **trust):
        if self.kind == "full":
            io = build(TieredCheckpointIO, **self.options, **trust)
            try:
                return io.load_checkpoint("step=1.ckpt")["held"]
            finally:
                io.teardown()
        state = {"w": torch.zeros(4), "held": None}
        with contextlib.closing(build(TieredStorageReader, **self.options, **trust)) as reader:
            ours.load(state, kind=self.kind, storage_reader=reader)
        return state["held"]


@pytest.fixture(params=["full", "sharded", "local"])
def saved(request, durable_dir, memory_dir):
    return Saved(request.param, durable_dir, memory_dir)


def refusal_of(saved, **trust):
    with pytest.raises((RestoreError, CheckpointException)) as caught:
        saved.load(**trust)
    failures = getattr(caught.value, "failures", {0: (caught.value, None)})
    assert all(isinstance(failure, TieredCheckpointError) for failure, _ in failures.values())
    return str(caught.value)


@FORCED
def test_an_object_is_refused_until_it_is_allowed_by_its_name(saved, monkeypatch):
    saved.save(Schedule(100))
    said = refusal_of(saved)
    assert f"it holds {NAME}; to allow that, set safe_globals: [{NAME}]" in said
    assert "intact: Unsupported global" in said
    assert saved.load(safe_globals=[NAME]).warmup == 100
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert saved.load().warmup == 100
    assert NAME in refusal_of(saved, safe_globals=["collections.Counter"]), "another name does not do"
    for name in ("no.such.Thing", f"{Schedule.__module__}.Missing", f"{NAME}.Missing"):
        with pytest.raises((ConfigError, CheckpointException), match="can't be imported"):
            saved.load(safe_globals=[name])


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda _: b"", lambda _: b"<html>Denied</html>"]
)
def test_what_no_manifest_verifies_is_not_called_intact(damage, tmp_path, memory_dir):
    """A file that another tool wrote, and that a copy has cut off, or a server's page in its place."""
    path = tmp_path / "other.ckpt"
    torch.save({"w": torch.arange(4.0), "held": Schedule(3)}, path)
    io = TieredCheckpointIO(dirpath=str(tmp_path / "durable"), memory_dir=memory_dir)
    with pytest.raises(RestoreError) as refused:
        io.load_checkpoint(str(path))
    assert "other.ckpt, which has no manifest to verify it by: Unsupported global" in str(refused.value)
    assert f"it holds {NAME}; to allow that, set safe_globals: [{NAME}]" in str(refused.value)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RestoreError) as refused:
        io.load_checkpoint(str(path))
    io.teardown()
    said = str(refused.value)
    assert "intact" not in said
    assert "step=" not in said
    assert "by:  [" not in said, "the reason is named"
    assert "it may be cut off, or no file of torch.save" in said


@FORCED
def test_what_would_run_code_runs_none(saved, tmp_path, monkeypatch):
    witness = tmp_path / "ran"
    saved.save(Intruder(witness))
    assert "it holds posix.mkdir, which no list can allow" in refusal_of(saved)
    assert "posix.mkdir" in refusal_of(saved, safe_globals=["posix.mkdir"])
    assert not witness.exists()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    saved.load()
    assert witness.exists(), "who trusts it wholly gets what they asked for"


class Outer:
    class Inner:
        def __init__(self):
            self.value = np.float64(0.5)

    def method(self):
        return 7


class Dictionary(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Numbers(list):
    pass


class Color(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    color: Color = Color.RED


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str = "x"


class Pair(NamedTuple):
    first: int
    second: int


PLAIN = {
    "numpy scalars": [np.float64(1.5), np.int32(3), np.bool_(True), np.datetime64("2020-01-01")],
    "numpy arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.eye(3)), np.array(["a", "bc"]), np.zeros(0)],
    "numpy objects": np.array([None, "text", 3], dtype=object),
    "numpy dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "numpy fields": np.zeros(2, dtype=np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", [("d", ">U2")])], align=True)),
    "numpy types": [np.float32, np.dtype("f4")],
    "random states": [np.random.get_state(), np.random.default_rng(1).bit_generator.state, random.getstate()],  # noqa: NPY002
    "torch's random state": torch.get_rng_state(),
    "containers": [
        collections.defaultdict(list, {1: [2]}),
        collections.deque([1, 2], maxlen=3),
        {1, 2},
        frozenset({3}),
    ],
    "dictionaries": [collections.OrderedDict(a=1), collections.Counter("aab")],
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
    "dates": [dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc), dt.timedelta(3)],
    "values": [decimal.Decimal("1.5"), uuid.UUID(int=5), 1 << 300, 2j, b"bytes", range(3), slice(1, 2)],
    "omegaconf": OmegaConf.create({"a": 1, "b": [1, "x", {"c": None, "d": 2.5}], "e": "${a}", "p": pathlib.Path("/p")}),
    "class of hyperparameters": DictConfig,
    "omegaconf's list": OmegaConf.create([1, {"a": 2}]),
    "namespace": argparse.Namespace(lr=0.1),
}
OF_THE_USER = {
    "class": Outer(),
    "nested class": Outer.Inner(),
    "nested class itself": Outer.Inner,
    "method": Outer().method,
    "dictionary": Dictionary(a=1, b=2),
    "dictionary of one": Dictionary(a=1),
    "ordered dictionary": Ordered(a=1, b=2),
    "list": Numbers([1, 2]),
    "factory": collections.defaultdict(Outer.Inner, {1: 2}),
    "enum": Color.RED,
    "flags": Mode.READ | Mode.WRITE,
    "dataclass": Settings(),
    "frozen dataclass": Frozen(),
    "named tuple": Pair(1, 2),
    "partial": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "pattern": re.compile("a+"),
    "numpy generator": np.random.default_rng(1),
    "numpy random state": np.random.RandomState(1),
    "structured config": OmegaConf.structured(Settings),
}


def read(file, *names, **options):
    return Trust(names=names, **options).read(file, "it", {}, map_location="cpu")["held"]


def refusal(file, *names):
    with pytest.raises(RestoreError) as caught:
        read(file, *names)
    return str(caught.value)


def line_in(text):
    return re.search(r"safe_globals: \[(.*?)\]", text).group(1).split(", ")


@pytest.mark.parametrize("kind", PLAIN)
def test_what_checkpoints_ordinarily_hold_loads_without_configuration(kind):
    loaded = read(file_of({"held": PLAIN[kind]}))
    assert same(loaded, PLAIN[kind], {}) or repr(loaded) == repr(PLAIN[kind])


@pytest.mark.parametrize("kind", OF_THE_USER)
def test_the_line_of_a_refusal_is_all_that_it_takes(kind):
    held, file = OF_THE_USER[kind], file_of({"held": OF_THE_USER[kind]})
    names = line_in(refusal(file))
    file.seek(0)
    loaded = read(file, *names)
    assert type(loaded) is type(held)
    file.seek(0)
    unrestricted = read(file, weights_only=False)
    assert pickle.dumps(loaded) == pickle.dumps(unrestricted), "as pickle itself makes it"


def test_a_refusal_names_all_at_once_and_keeps_the_names_that_are_allowed_already():
    file = file_of({"held": list(OF_THE_USER.values())})
    line = line_in(refusal(file, "fractions.Fraction"))
    assert line[0] == "fractions.Fraction"
    file.seek(0)
    assert len(read(file, *line)) == len(OF_THE_USER)


@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
def test_the_first_save_names_what_could_not_be_loaded_and_the_line_to_paste(kind, tmp_path, memory_dir, caplog):
    logger = logging.getLogger(f"trust.{kind}")
    where = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir, "drain": "thread"}
    options = {**where, "on_save_error": "raise"}
    state = {"w": torch.ones(3), "held": {"a": Outer.Inner(), "b": Settings(), "c": Mode.READ}, **PLAIN}

    def save(step, **trust):
        if kind == "full":
            io.save_checkpoint(state, f"step={step}.ckpt")
        else:
            build(ours.save, state, checkpoint_id=f"step_{step}", kind=kind, logger=logger, **options, **trust)

    def load(**trust):
        if kind == "full":
            io = build(TieredCheckpointIO, **options, **trust)
            found = io.load_checkpoint("tiered:latest")
            io.teardown()
            return found["held"]
        wanted = {"w": torch.zeros(3), "held": {"a": None, "b": None, "c": None}}
        build(ours.load, wanted, kind=kind, **options, **trust).close()
        return wanted["held"]

    if kind == "full":
        io = build(TieredCheckpointIO, logger=logger, **options)
    with caplog.at_level(logging.WARNING, logger.name):
        save(1)
        save(2)
    if kind == "full":
        io.teardown()
    (warning,) = [record.getMessage() for record in caplog.records if "would refuse to load" in record.getMessage()]
    here = __name__
    line = line_in(warning)
    assert line == [f"{here}.{name}" for name in ("Color", "Mode", "Outer.Inner", "Settings")]
    # The type that Hydra passes.
    loaded = load(safe_globals=ListConfig(line))
    assert (loaded["a"].value, loaded["b"], loaded["c"]) == (0.5, Settings(), Mode.READ)
