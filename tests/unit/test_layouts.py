"""A plan made from what was kept of an earlier save is the one that torch.save makes, byte for byte."""

import gc
import importlib
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.changing_state import CHANGES, World
from support.planning import check, check_taken, shown

from tiered_checkpoint_io.formats import alike as alike_module
from tiered_checkpoint_io.formats import layouts as layouts_module
from tiered_checkpoint_io.formats.assembly import Assembly
from tiered_checkpoint_io.formats.image import collecting_later, plan
from tiered_checkpoint_io.formats.layouts import Layouts

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
        # Made by torch.save alone, compared with it, and made from what was kept.
        for _ in range(3):
            world.step += 1
            check(layouts, world.state())


def test_what_is_planned_later_is_the_state_as_it_was_taken():
    world, layouts = World(), Layouts()
    world.begin_moments()
    assert layouts.take(world.state()) is None, "nothing is known of it"
    for world.step in range(3):
        check(layouts, world.state())
    for reused, change in ((2, "nothing"), (2, "reshaped"), (4, "nothing"), (5, "number"), (6, "nothing")):
        CHANGES[change](world, 5)
        world.step += 1
        check_taken(layouts, world.state())
        if change == "reshaped":
            for _ in range(2):
                check(layouts, world.state())
        assert layouts.reused >= reused, change


def useless(*tensors, **_):
    raise RuntimeError


def blind(*tensors, **_):
    """Guards that find all tensors alike."""
    return SimpleNamespace(check=lambda *others: len(others) == len(tensors))


@pytest.mark.parametrize("kind", [useless, pytest.param(blind, marks=pytest.mark.matrix)])
def test_where_torch_has_no_guards_that_tell_tensors_apart_each_is_looked_at(kind, monkeypatch):
    monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", kind)
    alike_module._trusted.cache_clear()
    try:
        world, layouts = World(), Layouts()
        world.begin_moments()
        for change in (CHANGES["nothing"], CHANGES["reshaped"]):
            change(world, 5)
            for _ in range(3):
                world.step += 1
                check(layouts, world.state())
        assert layouts.reused == 3
    finally:
        alike_module._trusted.cache_clear()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 400), st.integers(1, 3)), min_size=1, max_size=8
    )
)
def test_after_changes_in_any_order_the_file_is_that_of_torch_save(changes):
    world, layouts = World(), Layouts()
    for world.step in range(3):
        check(layouts, world.state())
    for name, seed, saves in changes:
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
        if seed % 2:
            check_taken(layouts, state)
        else:
            assert shown(layouts.plan(state)) == shown(wanted)
        for saved in range(1, saves):
            world.step += 1
            (check_taken if seed % 3 == saved % 3 else check)(layouts, world.state())


@pytest.mark.parametrize(
    "count", [33, *(pytest.param(n, marks=pytest.mark.matrix) for n in (256, 999, 1000, 1001, 2000))]
)
def test_what_is_kept_is_used_from_the_third_save_on(count):
    world, layouts = World(count), Layouts()
    world.begin_moments()
    for reused, step in ((0, 1), (0, 2), (1, 70_000), (2, 40), (3, 41)):
        world.step = step
        check(layouts, world.state())
        assert layouts.reused == reused
    # What is before an optimizer's state has become more, and strings are shared.
    world.more = {"callbacks": {"list": [f"{n}" for n in range(40)], "exp_avg": "step"}}
    for _ in range(3):
        check(layouts, world.state())
    assert layouts.reused == 4


def test_where_values_alone_have_changed_they_are_put_into_the_pickle_of_the_save_before(monkeypatch):
    made = []

    def assembled(*arguments, **options):
        made.append(arguments)
        return Assembly(*arguments, **options)

    monkeypatch.setattr(layouts_module, "Assembly", assembled)
    layouts, weights = Layouts(), {f"w{n}": torch.zeros(3) for n in range(40)}
    text = "shared"
    values = {
        "step": 3,
        "large": 1 << 40,
        "rate": 0.5,
        "path": "step=3",
        "flag": True,
        "of": [text, "rate"],
        "end": "7",
    }
    state = {"one": torch.zeros(2), **values, "weights": weights}
    for _ in range(3):
        check(layouts, state)
    made.clear()
    alike = [
        {"step": 4},
        {"step": 255, "large": (1 << 40) + 5},
        {"rate": 1e-9, "path": "step=9"},
        {"end": "8"},
        {"end": "x"},
    ]
    for change in alike:
        state |= change
        check(layouts, state)
    assert not made
    # As long as before, but of another kind, or another object that was met before.
    for change in ({"flag": False}, {"of": [text, "step"]}, {"of": [text, 11]}, {"of": [text, text]}):
        state |= change
        check(layouts, state)
    assert len(made) == 4
    # The pickle of the rest is the same, and tensors are others.
    for one in (torch.zeros(2, 1), torch.zeros(2, requires_grad=True), weights["w1"].view(3, 1)[:2, 0]):
        state["one"] = one
        for _ in range(2):
            check(layouts, state)


def test_nothing_of_a_state_is_kept_alive():
    world, layouts = World(), Layouts()
    for _ in range(3):
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
    for _ in range(3):
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
    for _ in range(3):
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
        for world.step in (1, 2, 3, 3000):
            check(layouts, world.state())
    assert layouts.reused >= 4


@pytest.fixture
def looks(monkeypatch):
    """One item for each look at a structure: what is done beside torch.save. Time would depend on the machine's load."""
    made, scan = [], layouts_module.scan

    def counted(state):
        made.append(state)
        return scan(state)

    monkeypatch.setattr(layouts_module, "scan", counted)
    return made


def test_the_first_save_of_a_structure_is_planned_by_torch_save_alone(looks):
    layouts, world = Layouts(), World()
    for made, reused in ((0, 0), (1, 0), (2, 1), (3, 2)):
        world.step += 1
        check(layouts, world.state())
        assert (len(looks), layouts.reused) == (made, reused)


def test_states_whose_sizes_change_at_every_save_are_planned_by_torch_save_alone(looks):
    layouts = Layouts()
    for n in range(80):
        layouts.plan({"weights": {f"w{each}": torch.zeros(2 + n) for each in range(40)}})
    assert not looks


def test_states_that_never_repeat_are_looked_at_ever_less_often(looks):
    layouts, world = Layouts(), World()
    for name in "a", "a", "a", *range(200):
        layouts.plan({"weights": {f"{name}w{each}": torch.zeros(2) for each in range(40)}})
    assert layouts.reused == 1 and len(looks) < 40
    for _ in range(70):
        check(layouts, world.state())
    assert layouts.reused > 1


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled):
    layouts, weights = Layouts(), {f"w{n}": torch.zeros(2) for n in range(40)}
    if not enabled:
        gc.disable()
    try:
        for _ in range(3):
            layouts.plan({"weights": weights})
            assert gc.isenabled() == enabled
        with pytest.raises(Exception, match="pickle"):
            layouts.plan({"weights": weights, "bad": lambda: None})
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_process_that_is_forked_while_another_thread_plans_collects_garbage():
    """A worker of a DataLoader lives for an epoch at least, and has no thread that would switch the collector on."""
    may_end, began = threading.Event(), threading.Event()

    def plans():
        with collecting_later():
            began.set()
            may_end.wait(20)

    planning = threading.Thread(target=plans)
    planning.start()
    assert began.wait(20)
    assert not gc.isenabled()
    child = os.fork()
    if child == 0:
        os._exit(int(gc.isenabled()))
    may_end.set()
    planning.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert gc.isenabled()
