"""Objects in checkpoints other than tensors: some load as they are, others by the line that a refusal shows."""

import argparse
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import logging
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

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.engine.trust import Trust
from tiered_checkpoint_io.errors import RestoreError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def test_nothing_is_said_where_everything_is_allowed(tmp_path, memory_dir, caplog, monkeypatch):
    logger = logging.getLogger("trust.quiet")
    for forced, trust in (("1", {}), ("0", {"safe_globals": [f"{__name__}.Outer"]})):
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", forced)
        folder = tmp_path / f"forced-{forced}"
        io = TieredCheckpointIO(str(folder), memory_dir=memory_dir, logger=logger, namespace=folder.name, **trust)
        with caplog.at_level(logging.WARNING, logger.name):
            io.save_checkpoint({"held": Outer()}, "step=1.ckpt", {"tiers": ["memory"]})
        io.teardown()
    assert not [record for record in caplog.records if "refuse" in record.getMessage()]
