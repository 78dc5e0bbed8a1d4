"""A plan made from what was kept of an earlier save is the one that torch.save makes, byte for byte."""

import gc
import importlib
import io
import sys
import weakref
import zipfile
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.formats.image import Image, plan
from tiered_checkpoint_io.formats.layouts import Layouts


class Tagged(torch.Tensor):
    """A tensor subclass."""


class Box:
    """An object that says how it is pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self):
        return Box, (self.value,)


def shown(image: Image) -> tuple[Any, ...]:
    """All of a plan: the bytes around tensors, and whose storage's bytes are where."""
    regions = [(each.offset, each.nbytes, each.start, each.storage._cdata) for each in image.regions]
    return image.size, [(each.offset, bytes(each.data)) for each in image.segments], regions


def filled(image: Image) -> bytes:
    data = bytearray(image.size)
    image.fill(memoryview(data), threads=1)
    return bytes(data)


class World:
    """A training's state as Lightning saves it, whose parts can be changed between saves."""

    def __init__(self, count: int = 40) -> None:
        self.model = {f"layer.{n}.weight": torch.full((n % 5 + 1, 3), float(n)) for n in range(count)}
        self.moments: dict[Any, dict[str, Any]] = {}
        self.ema: dict[str, torch.Tensor] = {}
        self.names = dict.fromkeys(range(count), 1)
        self.more: dict[str, Any] = {}
        self.step = 0

    def begin_moments(self) -> None:
        self.moments = {
            n: {"step": torch.tensor(float(self.step)), "exp_avg": torch.zeros_like(each), "exp_avg_sq": each.clone()}
            for n, each in enumerate(self.model.values())
        }

    def state(self) -> dict[str, Any]:
        weights = OrderedDict((name, each.detach()) for name, each in self.model.items())
        weights._metadata = OrderedDict((name[:-7], {"version": 1}) for name in self.model)
        groups = [{"lr": 0.1 / (self.step + 1), "params": list(range(len(self.model)))}]
        before = {key: self.more[key] for key in self.more if key.startswith("before")}
        return {
            **before,
            "epoch": self.step // 10,
            "global_step": self.step,
            "state_dict": weights,
            "loops": {"step": self.step, "device": "cpu", "storage": "0"},
            "callbacks": {"best": {"path": "p" * (self.step % 90), "score": torch.tensor(self.step * 0.5)}},
            "optimizer_states": [{"state": self.moments, "param_groups": groups}],
            "ema": self.ema,
            **self.more,
        }


def check(layouts: Layouts, state: Any) -> None:
    wanted, got = plan(state), layouts.plan(state)
    assert shown(got) == shown(wanted)


# ------------------------------------------------------------------------------------------ changes
def nth(world: World, seed: int) -> str:
    return list(world.model)[seed % len(world.model)]


def rename(world: World, seed: int) -> None:
    name = nth(world, seed)
    world.model = {(f"{key}_" if key == name else key): each for key, each in world.model.items()}


def reorder(world: World, seed: int) -> None:
    world.model[name] = world.model.pop(name := nth(world, seed))


def replace(make):
    def change(world: World, seed: int) -> None:
        name = nth(world, seed)
        world.model[name] = make(world.model[name].detach())

    return change


def resize(world: World, seed: int) -> None:
    world.model[nth(world, seed)].untyped_storage().resize_(4096)


def renew(world: World, seed: int) -> None:
    """The same sizes at, most likely, the same addresses, and objects of the same ids, in another order."""
    shapes = [each.shape for each in world.model.values()]
    names = list(world.model)
    world.model.clear()
    gc.collect()
    world.model = dict(zip(names, [torch.zeros(shape) for shape in reversed(shapes)], strict=True))


def alias(world: World, seed: int) -> None:
    world.model[nth(world, seed)] = world.model[nth(world, seed // 7)]


def swap(world: World, seed: int) -> None:
    """Two names for each of two tensors, and then the other way round."""
    one, two = torch.zeros(4), torch.zeros(4)
    tensors = [one, two, *((two, one) if seed % 2 else (one, two))]
    world.model |= {name: each.view(4) for name, each in zip(list(world.model)[:4], tensors, strict=True)}


def average(world: World, seed: int) -> None:
    kinds = [
        lambda: {name: each.clone() for name, each in world.model.items()},
        lambda: {f"ema.{name}": each for name, each in world.model.items()},
        lambda: {name: each[:1] for name, each in world.model.items()},
        dict,
    ]
    world.ema = kinds[seed % len(kinds)]()


def add(make):
    def change(world: World, seed: int) -> None:
        world.more[("more", "before", "more2")[seed % 3]] = make(world, seed)

    return change


def remove(world: World, seed: int) -> None:
    world.more.clear()
    if len(world.model) > 34:
        del world.model[nth(world, seed)]


def attribute(world: World, seed: int) -> None:
    world.model[nth(world, seed)].requires_grad_().mark = seed


def moment(world: World, seed: int) -> None:
    if world.moments:
        world.moments[seed % len(world.moments)]["step"] = [seed, float(seed), torch.tensor(seed)][seed % 3]


CHANGES = {
    "nothing": lambda world, seed: None,
    "step": lambda world, seed: setattr(world, "step", seed),
    "rename": rename,
    "reorder": reorder,
    "equal": replace(torch.clone),
    "bfloat16": replace(lambda each: torch.ones(each.shape, dtype=torch.bfloat16)),
    "integers": replace(lambda each: torch.ones(each.shape, dtype=torch.int32)),
    "complex": replace(lambda each: torch.ones(each.shape, dtype=torch.complex64)),
    "conjugate": replace(lambda each: torch.ones(each.shape, dtype=torch.complex64).conj()),
    "negative": replace(lambda each: torch.ones(each.shape, dtype=torch.complex64).conj().imag),
    "reshaped": replace(lambda each: each.reshape(each.shape[::-1])),
    "wider": replace(lambda each: torch.arange(24.0)[each.numel() % 7 :][:6].view(2, 3)),
    "swap": swap,
    "transposed": replace(lambda each: torch.ones(5, 4).t()),
    "strided": replace(
        lambda each: torch.randn(40)[3:39:3].reshape(2, 6) if each.numel() % 2 else torch.randn(40)[3::3]
    ),
    "scalar": replace(lambda each: torch.tensor(1.5)),
    "empty": replace(lambda each: torch.empty(0, 3)),
    "float8": replace(lambda each: torch.ones(each.shape).to(torch.float8_e4m3fn)),
    "sparse": replace(lambda each: torch.eye(3).to_sparse()),
    "subclass": replace(lambda each: torch.randn(3).as_subclass(Tagged)),
    "grown": replace(lambda each: torch.zeros(700)),
    "grad": replace(lambda each: torch.ones(each.shape).requires_grad_()),
    "resize": resize,
    "renew": renew,
    "alias": alias,
    "average": average,
    "attribute": attribute,
    "moments": lambda world, seed: world.begin_moments(),
    "moment": moment,
    "remove": remove,
    "number": add(lambda world, seed: seed**3 - 7),
    "text": add(lambda world, seed: "ü" * seed),
    "tensor": add(lambda world, seed: torch.arange(seed % 9)),
    "view": add(lambda world, seed: next(iter(world.model.values())).detach().view(-1)[:1]),
    "retyped": add(lambda world, seed: torch.zeros(4).view(torch.int32)),
    "key": add(lambda world, seed: {nth(world, seed): seed, "exp_avg": "cpu", "class": OrderedDict}),
    "keys": add(lambda world, seed: list(world.model)),
    "parameter": add(lambda world, seed: torch.nn.Parameter(torch.zeros(seed % 5))),
    "object": add(lambda world, seed: Box([seed, next(iter(world.model.values())), sys.intern("storage")])),
    "default": add(lambda world, seed: defaultdict(list, {n: [torch.zeros(1)] for n in range(seed % 40)})),
    "history": add(lambda world, seed: [float(n) for n in range(seed)]),
    "collections": add(lambda world, seed: [{"a": n, "b": (n, "cpu")} for n in range(seed % 50)]),
    "twice": add(lambda world, seed: [world.moments, world.moments]),
    "storage": add(lambda world, seed: torch.zeros(3).untyped_storage()),
    "numpy": add(lambda world, seed: torch.zeros(seed % 5).numpy()),
    "rng": add(lambda world, seed: {"torch": torch.get_rng_state()}),
    "bytes": add(lambda world, seed: b"q" * seed + bytes(range(256))),
    "cycle": add(lambda world, seed: world.more),
}


ONCE = {"rename", "alias", "renew", "reshaped", "key", "number", "moment"}


@pytest.mark.parametrize(
    "name", [name if name in ONCE else pytest.param(name, marks=pytest.mark.matrix) for name in CHANGES]
)
def test_after_any_change_the_file_is_that_of_torch_save(name):
    world, layouts = World(), Layouts()
    world.begin_moments()
    for step in (3, 4, 300):
        world.step = step
        check(layouts, world.state())
    for seed in (5, 5, 6, 4, 70_000):
        CHANGES[name](world, seed % 300 if name != "step" else seed)
        check(layouts, world.state())
    world.step += 1
    check(layouts, world.state())


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 400)), min_size=1, max_size=12))
def test_after_changes_in_any_order_the_file_is_that_of_torch_save(changes):
    world, layouts = World(), Layouts()
    check(layouts, world.state())
    for name, seed in changes:
        try:
            CHANGES[name](world, seed)
        except (RuntimeError, TypeError):
            # It does not go with what was changed before.
            continue
        state = world.state()
        try:
            wanted = plan(state)
        except Exception as error:
            with pytest.raises(type(error)):
                layouts.plan(state)
            return
        assert shown(layouts.plan(state)) == shown(wanted)


@pytest.mark.parametrize(
    "count", [33, *(pytest.param(n, marks=pytest.mark.matrix) for n in (256, 999, 1000, 1001, 2000))]
)
def test_what_is_kept_is_used(count):
    world, layouts = World(count), Layouts()
    world.begin_moments()
    for reused, step in enumerate((1, 2, 70_000, 40)):
        world.step = step
        check(layouts, world.state())
        assert layouts.reused == reused
    # What is before an optimizer's state has become more, and strings are shared.
    world.more = {"callbacks": {"list": [f"{n}" for n in range(40)], "exp_avg": "step"}}
    check(layouts, world.state())
    check(layouts, world.state())
    assert layouts.reused == 4


def test_tensors_that_share_other_storages_than_before():
    world, layouts = World(), Layouts()
    for seed in (1, 1, 2, 2, 1):
        swap(world, seed)
        check(layouts, world.state())
    # Plans that are made anew are not the reason that it is right.
    assert layouts.reused == 2


def test_a_string_that_is_met_before_the_tensors_that_have_it_as_a_key():
    world, layouts = World(), Layouts()
    world.begin_moments()
    for text in ("none", nth(world, 3), "exp_avg", "0", "storage", "cpu", nth(world, 9), "none"):
        # Two saves each: the first one plans anew, where the structure has changed.
        for world.step in (1, 2):
            world.more["before"] = {"text": text, "again": [text]}
            check(layouts, world.state())
    assert layouts.reused >= 6


def test_numbers_that_become_longer():
    layouts, weights = Layouts(), {f"w{n}": torch.zeros(2) for n in range(40)}
    for count in (230, 240, 250, 260, 270, 280, 240):
        before = {f"k{n}": n for n in range(count)}
        behind = {f"m{n}": n for n in range(300)}
        for step in (1, 2):
            check(layouts, {"step": step, "rest": {**before, "tensor": torch.ones(1), **behind}, "weights": weights})
    assert layouts.reused >= 7


def test_what_moves_behind_a_longer_pickle_is_numbered_anew():
    world, layouts = World(300), Layouts()
    world.begin_moments()
    check(layouts, world.state())
    for names in (3, 30, 1, 0):
        state = world.state()
        state["loops"]["names"] = {f"n{n}": f"value{n}" for n in range(names)}
        check(layouts, state)
    assert layouts.reused == 4


def test_the_file_is_the_one_that_torch_save_writes_but_for_checksums_of_tensors():
    world, layouts = World(), Layouts()
    world.begin_moments()
    for world.step in range(3):
        data = filled(layouts.plan(world.state()))
    whole = io.BytesIO()
    torch.save(world.state(), whole)
    ours, theirs = (zipfile.ZipFile(io.BytesIO(each)) for each in (data, whole.getvalue()))
    facts = [
        [(each.filename, each.header_offset, each.file_size) for each in file.infolist()] for file in (ours, theirs)
    ]
    assert facts[0] == facts[1] and layouts.reused == 2
    assert ours.read("archive/data.pkl") == theirs.read("archive/data.pkl")
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert all(torch.equal(each, world.model[name]) for name, each in loaded["state_dict"].items())
    # Tensors' own checksums are the only bytes that differ, and the id that torch makes of all checksums.
    differing = {at // 64 for at, (a, b) in enumerate(zip(data, whole.getvalue(), strict=True)) if a != b}
    assert len(differing) <= 3 * len(facts[0])


def test_files_of_more_than_4_gib():
    layouts = Layouts()
    # The pages are never touched.
    big = {"a": torch.empty(1 << 30), "b": torch.empty(1 << 30), "c": torch.ones(3)}
    for step in (1, 1 << 40, 5):
        check(layouts, {"step": step, "text": "x" * (step % 997), "weights": {**big}})
    assert layouts.reused == 2


def test_a_record_that_moves_over_the_limit_of_4_gib_is_planned_anew():
    layouts = Layouts()
    tensors = {"a": torch.empty((1 << 30) - 300), "b": torch.ones(3), "c": torch.ones(3)}
    for length in (0, 10, 400, 4000):
        check(layouts, {"text": "x" * length, "weights": tensors})


def test_nothing_of_a_state_is_kept_alive():
    world, layouts = World(), Layouts()
    for _ in range(2):
        layouts.plan(world.state())
    assert layouts.reused == 1
    references = [weakref.ref(each) for each in world.model.values()]
    storages = [weakref.ref(each.untyped_storage()) for each in world.model.values()]
    del world
    gc.collect()
    assert not any(reference() is not None for reference in (*references, *storages))


def test_what_torch_save_cannot_write_is_its_error_as_before():
    layouts = Layouts()
    base = torch.zeros(4)
    state: dict[str, Any] = {"weights": {f"w{n}": torch.zeros(2) for n in range(40)}}
    for _ in range(2):
        check(layouts, state)
    for bad in ({"a": base, "b": base.view(torch.int32)}, {"a": lambda: None}):
        with pytest.raises(Exception) as wanted:
            plan({**state, **bad})
        with pytest.raises(type(wanted.value)):
            layouts.plan({**state, **bad})
    check(layouts, state)


def test_memory_of_two_types_behind_two_storages_is_refused_as_by_torch_save():
    layouts, memory = Layouts(), bytearray(64)
    one, other = torch.frombuffer(memory, dtype=torch.float32), torch.frombuffer(memory, dtype=torch.float32)
    weights = {f"w{n}": torch.zeros(2, dtype=torch.int32 if n % 2 else torch.float32) for n in range(40)}
    for _ in range(2):
        check(layouts, {"weights": weights, "one": one, "other": torch.zeros(16)})
    check(layouts, {"weights": weights, "one": one, "other": other})
    with pytest.raises(RuntimeError, match="view the same data"):
        layouts.plan({"weights": weights, "one": one, "other": torch.frombuffer(memory, dtype=torch.int32)})


@pytest.fixture
def save_settings():
    config = importlib.import_module("torch.utils.serialization").config.save
    alignment, checksums = config.storage_alignment, torch.serialization.get_crc32_options()
    yield config
    config.storage_alignment = alignment
    torch.serialization.set_crc32_options(checksums)


def test_settings_of_torch_save_that_change_between_saves(save_settings):
    layouts, world = Layouts(), World()
    for checksums, alignment in ((True, 64), (False, 64), (True, 4096), (True, 64)):
        torch.serialization.set_crc32_options(checksums)
        save_settings.storage_alignment = alignment
        for world.step in (1, 2, 3000):
            check(layouts, world.state())
    assert layouts.reused >= 4


def test_states_that_never_repeat_cost_little_more_than_before():
    layouts = Layouts()
    for n in range(80):
        layouts.plan({"weights": {f"{n}w{each}": torch.zeros(2) for each in range(40)}})
    world = World()
    for _ in range(70):
        check(layouts, world.state())
    assert layouts.reused > 0
