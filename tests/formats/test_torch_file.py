"""A planned file is the one that torch.save writes, byte for byte, and torch.load reads it."""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import io
import pickle
import random
import sys
import weakref
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.parsing import AttributeDict
from omegaconf import OmegaConf

from tiered_checkpoint_io.formats.torch_file import plan


class Pair(NamedTuple):
    left: Any
    right: Any


class Tagged(torch.Tensor):
    """A tensor subclass."""


@dataclasses.dataclass
class Box:
    value: Any


class SavesItself:
    """Calls torch.save while it is pickled, as wrappers of modules and buffers do."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        buffer = io.BytesIO()
        torch.save(self.value, buffer)
        return revive, (buffer.getvalue(),)


def revive(data):
    return SavesItself(torch.load(io.BytesIO(data)))


def filled(image, **options):
    buffer = bytearray(image.size)
    with memoryview(buffer) as view:
        image.fill(view, **options)
    return buffer


def saved(state, *, skips=False):
    """Returns the file of torch.save; without the tensors' bytes and checksums if ``skips``."""
    file = io.BytesIO()
    with contextlib.ExitStack() as skipping:

        class Pickler(pickle.Pickler):
            def dump(self, value, /):
                # An object that calls torch.save while it is pickled gets all of its bytes.
                super().dump(value)
                if skips:
                    skipping.enter_context(torch.serialization.skip_data())

        torch.save(state, file, pickle_module=SimpleNamespace(Pickler=Pickler, __name__="pickle"))
    return file.getvalue()


def check(state):
    image = plan(state)
    assert image.planned
    got, whole = filled(image, threads=1), saved(state)
    for region in image.regions:
        end = region.offset + region.nbytes
        assert got[region.offset : end] == whole[region.offset : end]
        got[region.offset : end] = bytes(region.nbytes)
    assert got == saved(state, skips=True)


def optimizer_state(kind=torch.optim.AdamW):
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.BatchNorm1d(17), torch.nn.Linear(17, 3))
    optimizer = kind(model.parameters(), lr=1e-3)
    model(torch.randn(5, 33)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def lightning_state():
    """Returns a state as a trainer of Lightning's dumps it."""
    state = optimizer_state()
    callback = {"best_model_score": torch.tensor(0.5), "best_k_models": {"a.ckpt": torch.tensor(0.5)}, "dirpath": "x"}
    return {
        "epoch": 3,
        "global_step": 70_000,
        "pytorch-lightning_version": "2.6",
        "state_dict": OrderedDict(state["model"]),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": 4, "completed": 3}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": callback},
        "optimizer_states": [state["optimizer"]],
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [1e-3]}],
        "hparams_name": "kwargs",
        "hyper_parameters": AttributeDict(lr=1e-3, layers=[3, 4]),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.default_rng(0).bit_generator.state},
    }


def sharing(draw):
    base = torch.arange(600, dtype=torch.float32)
    views = [base, base[10:20], base.view(20, 30).t(), base[::7], base.view(20, 30)[3:9, 2:5], base[:0]]
    draw.shuffle(views)
    return [*views, views[0], {"again": views}]


def marked(draw):
    tensor = torch.ones(3)
    tensor.mark = draw.random()
    return tensor


def cycle(draw):
    state = {"text": "exp_avg"}
    state["self"] = [state, draw.random()]
    return state


DTYPES = [
    getattr(torch, name)
    for name in ["bfloat16", "float16", "float64", "complex64", "complex128", "bool", "int8", "uint8"]
]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.int16, torch.int32, torch.int64]


def large(draw):
    """Dictionaries of a thousand items end in another way."""
    return {f"n{number}": torch.ones(number % 3) for number in range(draw.choice([256, 999, 1000, 1001]))}


def more(draw):
    return OrderedDict((name, drawn(draw, 2)) for name in draw.sample(["exp_avg", "cpu", "w", "storage", "0"], 3))


#: Makes each kind of value that a state may hold.
KINDS = {
    "plain": lambda draw: torch.randn(draw.randrange(9), draw.randrange(1, 5)),
    "scalar": lambda draw: torch.tensor(draw.random()),
    "empty": lambda draw: torch.empty(0, draw.randrange(3)),
    "dtype": lambda draw: torch.arange(1, 9).to(draw.choice(DTYPES)),
    "transposed": lambda draw: torch.ones(5, 4).t(),
    "strided": lambda draw: torch.randn(40)[3:39:3].reshape(2, 6),
    "expanded": lambda draw: torch.ones(3, 1).expand(3, 5),
    "shared": sharing,
    "grad": lambda draw: torch.ones(3).requires_grad_(),
    "parameter": lambda draw: torch.nn.Parameter(torch.zeros(draw.randrange(5)), requires_grad=draw.random() < 0.5),
    "module": lambda draw: torch.nn.Linear(draw.randrange(1, 5), 2),
    "subclass": lambda draw: torch.randn(3).as_subclass(Tagged),
    "attribute": marked,
    "conjugate": lambda draw: torch.randn(4, dtype=torch.complex64).conj(),
    "negative": lambda draw: torch.randn(4, dtype=torch.complex64).conj().imag,
    "sparse": lambda draw: torch.eye(draw.randrange(1, 5)).to_sparse(),
    "sparse rows": lambda draw: torch.eye(draw.randrange(1, 5)).to_sparse_csr(),
    "storage": lambda draw: torch.zeros(3).untyped_storage(),
    "typed storage": lambda draw: torch.zeros(3)._typed_storage(),
    "optimizer": lambda draw: optimizer_state(draw.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])),
    "lightning": lambda draw: lightning_state(),
    "numpy": lambda draw: np.random.default_rng(draw.randrange(9)).normal(size=(3, draw.randrange(4))),
    "number": lambda draw: draw.choice([0, 255, 256, -1, 1 << 31, 1 << 400, -(1 << 70), 0.5, float("inf"), True, None]),
    "text": lambda draw: draw.choice(["", "ü" * 5000, "storage", "cpu", sys.intern("exp_avg"), b"q" * 300, b"\0"]),
    "list": lambda draw: [drawn(draw, 2) for _ in range(draw.randrange(4))],
    "tuple": lambda draw: tuple(drawn(draw, 2) for _ in range(draw.randrange(4))),
    "ordered": more,
    "default": lambda draw: defaultdict(list, {n: [torch.zeros(1)] for n in range(draw.randrange(40))}),
    "dataclass": lambda draw: Box(drawn(draw, 2)),
    "named tuple": lambda draw: Pair(drawn(draw, 2), drawn(draw, 2)),
    "namespace": lambda draw: argparse.Namespace(lr=draw.random()),
    "config": lambda draw: OmegaConf.create({"a": [1, 2], "b": {"c": "x"}}),
    "classes": lambda draw: [OrderedDict, torch.FloatStorage, torch.float32, torch.device("cpu"), torch.Size([3])],
    "large": large,
    "itself": lambda draw: SavesItself(torch.arange(9.0)),
    "cycle": cycle,
}


def drawn(draw, depth=0):
    names = list(KINDS)
    return KINDS[draw.choice(names if depth < 2 else names[:13])](draw)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_each_kind_is_written_as_by_torch_save(kind):
    draw = random.Random(kind)
    check(KINDS[kind](draw))
    some = KINDS[kind](draw)
    check({"text": "cpu", "some": some, "plain": torch.zeros(3), "again": [some, torch.ones(2)], "class": OrderedDict})


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 1500), marks=pytest.mark.matrix)])
def test_any_state_is_written_as_by_torch_save(seeds):
    for seed in seeds:
        draw = random.Random(seed)
        state = {str(number): drawn(draw) for number in range(draw.randrange(1, 9))}
        check(state)


def around(state):
    """Returns all of a planned file but its tensors, which are too large to copy, and the same of torch.save's."""

    class Recorder:
        def __init__(self):
            self.position, self.parts, self.holes = 0, [], []

        def write(self, data):
            self.parts.append(bytes(data))
            self.position += len(data)
            return len(data)

        def seek(self, offset, whence):
            self.holes += [(self.position, offset)] if offset else []
            self.position += offset

        def flush(self):
            pass

    recorder = Recorder()
    with torch.serialization.skip_data():
        torch.save(state, recorder)
    image = plan(state)
    assert image.planned
    ours = b"".join(bytes(segment.data) for segment in image.segments)
    holes = [(region.offset, region.nbytes) for region in image.regions]
    return (image.size, holes, ours), (recorder.position, recorder.holes, b"".join(recorder.parts))


@pytest.mark.parametrize("before", [(1 << 30) - 300, 1])
def test_files_of_more_than_4_gib(before):
    # The pages are never touched.
    state = {"a": torch.empty(before), "e": torch.empty(0), "b": torch.empty((1 << 30) + 1), "c": torch.ones(3)}
    for length in (0, 10, 400, 4000):
        ours, theirs = around({"text": "x" * length, "weights": state})
        assert ours == theirs


@pytest.mark.matrix
def test_more_records_than_a_field_of_2_bytes_can_count():
    ours, theirs = around([torch.zeros(number % 2) for number in range(66_000)])
    assert ours == theirs


@pytest.fixture
def save_settings():
    config = importlib.import_module("torch.utils.serialization").config.save
    alignment, checksums = config.storage_alignment, torch.serialization.get_crc32_options()
    yield config
    config.storage_alignment = alignment
    torch.serialization.set_crc32_options(checksums)


def test_settings_of_torch_save_that_change_between_saves(save_settings):
    for checksums, alignment in ((True, 64), (False, 64), (True, 4096), (True, 64)):
        torch.serialization.set_crc32_options(checksums)
        save_settings.storage_alignment = alignment
        check(lightning_state())


def test_another_release_of_torch_that_lays_out_files_otherwise_writes_them_itself(monkeypatch):
    save = torch.serialization._save

    def with_one_more(value, file, *options):
        save(value, file, *options)
        file.write_record("more", b"1", 1)

    monkeypatch.setattr(torch.serialization, "_save", with_one_more)
    state = {"w": torch.ones(5 << 20), "x": [1]}
    image = plan(state)
    assert not image.planned
    assert filled(image) == saved(state)


def test_nothing_of_a_state_outlives_its_image():
    gc.disable()
    try:
        weight = torch.ones(100)
        state = {"w": weight, "p": torch.nn.Parameter(torch.ones(3)), "temporary": Box(torch.ones(3))}
        storage, alive = weakref.ref(weight.untyped_storage()), weakref.ref(weight)
        image = plan(state)
        del weight, state
        assert alive() is None
        assert storage() is not None, "the image keeps what it will copy"
        del image
        assert storage() is None
    finally:
        gc.enable()
