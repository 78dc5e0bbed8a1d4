"""A state of a structure that was saved before is not planned again, and what is loaded is what was saved."""

import copy
import random
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.adapters.dcp_writer import TieredStorageWriter
from tiered_checkpoint_io.adapters.structure import Structure
from tiered_checkpoint_io.adapters.tensor_kinds import CheckingSavePlanner
from tiered_checkpoint_io.formats.shard_image import TensorRow, plan_shard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(step=0):
    row = torch.arange(100.0) + step
    model = OrderedDict(w=torch.nn.Parameter(row.reshape(4, 25).clone()), part=row[7:19], none=torch.zeros(0))
    moments = {
        0: {"step": torch.tensor(float(step)), "m": row * 2},
        1: {"step": torch.tensor(float(step)), "m": row * 3},
    }
    groups = [{"lr": 0.1 * step, "betas": (0.9, 0.99), "params": [0, 1]}]
    return {
        "model": model,
        "optim": {"state": moments, "groups": groups},
        "step": step,
        "note": "x" * step,
        "empty": {},
    }


@pytest.fixture
def saves(memory_dir, tmp_path, monkeypatch):
    """Saves and loads states one after another; gives how many of them were not planned."""
    monkeypatch.setattr(CheckingSavePlanner, "_structures", {})
    writer = TieredStorageWriter(memory_dir=memory_dir, dirpath=str(tmp_path / "s3"), save_to_s3=False)
    planned = []
    plan = DefaultSavePlanner.create_local_plan
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", lambda self: planned.append(1) or plan(self))
    number = iter(range(1, 99))

    def save(*states, save=dcp.save):
        before = len(planned)
        for each in states:
            name = f"step_{next(number)}"
            done = save(each, checkpoint_id=name, storage_writer=writer)
            if save is dcp.async_save:
                done.result()
            into = blank(each)
            dcp.load(into, checkpoint_id=name, memory_dir=memory_dir, dirpath=str(tmp_path / "s3"))
            assert_same(into, each)
        return len(states) - (len(planned) - before)

    yield save
    writer.close()


def blank(value):
    if isinstance(value, dict):
        return type(value)((key, blank(each)) for key, each in value.items())
    if isinstance(value, list):
        return [blank(each) for each in value]
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77).detach() if value.numel() else value.detach().clone()
    return None


def assert_same(found, wanted):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_same(*pair)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (found, wanted)]
        assert torch.equal(*local)
    else:
        assert found == wanted


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_the_third_save_of_a_structure_is_not_planned(saves, save):
    assert saves(*map(state, range(6)), save=save) == 4


def changes():
    def longer(s):
        s["model"]["w"] = torch.nn.Parameter(torch.ones(5, 25))

    def another_type(s):
        s["model"]["part"] = s["model"]["part"].double()

    def transposed(s):
        s["model"]["w"] = torch.nn.Parameter(torch.arange(100.0).reshape(25, 4).t())

    def more(s):
        s["model"]["more"] = torch.ones(3)

    def fewer(s):
        del s["model"]["part"]

    def renamed(s):
        s["optim"]["state"][2] = s["optim"]["state"].pop(1)

    def in_another_order(s):
        s["model"].move_to_end("w")

    def object_for_tensor(s):
        s["model"]["part"] = 5.0

    def tensor_for_object(s):
        s["note"] = torch.ones(2)

    def tensor_in_list(s):
        s["optim"]["groups"][0]["params"] = [torch.ones(2), 1]

    def one_more_group(s):
        s["optim"]["groups"].append({"lr": 1.0, "betas": (0, 0), "params": []})

    def filled(s):
        s["empty"]["now"] = torch.ones(1)

    def empty_tensor(s):
        s["model"]["none"] = torch.ones(1)

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_what_changes_a_structure_is_noticed(saves, change):
    assert saves(*map(state, range(3))) == 1
    changed = state(3)
    change(changed)
    assert saves(changed) == 0
    # Neither may the new one be taken for the old one.
    assert saves(state(4)) == 0
    assert saves(state(5), state(6)) >= 1


def of_the_same_names():
    """States that DCP gives the same flat names, with other nesting, types or values."""
    x, y = torch.arange(4.0), torch.arange(6.0)
    return [
        {"a.b": x, "a.0": y},
        {"a": {"b": x, "0": y}},
        {"a": {"b": x}, "a.0": y},
        {"a.b": x, "a": [y]},
        {"a.b": x.double(), "a.0": y},
        {"a": {"b": torch.nn.Parameter(x), "0": y}},
        {"a": {"b": x[:3], "0": y}},
        {"a": {"b": x, "0": 5}},
        {"a": {"0": y, "b": x}},
    ]


def test_the_metadata_of_each_save_is_what_torch_plans_for_its_state(memory_dir, tmp_path):
    writer = TieredStorageWriter(memory_dir=memory_dir, dirpath=str(tmp_path / "s3"), save_to_s3=False)
    states, order = of_the_same_names(), random.Random(7)
    for number in range(60):
        chosen = order.randrange(len(states))
        # The third save of a structure is not planned.
        for repeat in range(order.choice([1, 1, 2, 4])):
            found = dcp.save(states[chosen], checkpoint_id=f"step_{number}", storage_writer=writer)
            stock = DefaultSavePlanner()
            stock.set_up_planner(states[chosen], is_coordinator=True)
            _, wanted = stock.create_global_plan([stock.create_local_plan()])
            what = number, chosen, repeat
            assert (found.planner_data, what) == (wanted.planner_data, what)
            assert (found.state_dict_metadata, what) == (wanted.state_dict_metadata, what)
    writer.close()


def test_tensors_may_move_between_saves_and_share_storages(saves):
    base = torch.arange(64.0)
    a = {"a": base[:16], "b": base[16:32]}
    b = {"a": base[3:19], "b": base[30:46].clone()}
    tied = {"a": base[5:21], "b": base[5:21]}
    assert saves(a, b, tied, b, a) == 3


def test_shards_of_tensors(saves, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(step, placement=None):
            placement = placement or Shard(0)
            return {name: DTensor.from_local(torch.randn(4, 3), mesh, [placement]) for name in "abc"} | {"step": step}

        assert saves(*map(sharded, range(4))) == 2
        assert saves(sharded(5, Shard(1)), sharded(6)) == 0
        assert saves(sharded(7, Replicate())) == 0
    finally:
        dist.destroy_process_group()


def test_each_planner_keeps_its_own(saves, monkeypatch):
    assert saves(*map(state, range(3))) == 1
    monkeypatch.setattr(CheckingSavePlanner, "_structures", {})
    assert saves(state(3), state(4)) == 1


class Items:
    def __create_write_items__(self):
        raise NotImplementedError


class Keys(dict):
    """A mapping that may do anything."""


@pytest.mark.parametrize("value", [Items(), Keys(a=torch.ones(1)), 5])
def test_what_dcp_may_plan_by_more_is_not_kept(value):
    given = {"a": value}
    with pytest.raises(Exception):
        Structure(given, copy.copy(given), {"a": ("a",)}, None)


def test_a_row_of_tensors_makes_the_same_file_as_planning_it():
    def tensors(fill):
        base = torch.full((1000,), fill)
        return [base[3:40].view(37), base.view(10, 100), torch.zeros(0), torch.full((3,), fill).half(), base[:1]]

    row = TensorRow(tensors(1.0))
    for objects in ([], [b"short"], [b"x" * 1000, b"", b"y" * 64]):
        mine, places = row.plan(objects, tensors(2.0))
        theirs, expected = plan_shard([*objects, *tensors(2.0)])
        files = [bytearray(image.size) for image in (mine, theirs)]
        assert mine.fill(memoryview(files[0])) == theirs.fill(memoryview(files[1]))
        assert files[0] == files[1]
        assert places == expected


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 4)[:, ::2], torch.ones(2, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(2))]
)
def test_tensors_that_are_not_copied_as_they_lie_are_in_no_row(tensor):
    with pytest.raises(ValueError):
        TensorRow([torch.ones(3), tensor])
