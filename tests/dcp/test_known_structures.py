"""A state of a structure that was saved before is not planned again, and what is loaded is what was saved."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tiered_checkpoint_io import dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Keys(dict):
    """A mapping that may do anything."""


def state(step=0):
    row = torch.arange(100.0) + step
    model = OrderedDict(w=torch.nn.Parameter(row.reshape(4, 25).clone()), part=row[7:19], none=torch.zeros(0))
    moments = {n: {"step": torch.tensor(float(step)), "m": row * n} for n in range(2)}
    groups = [{"lr": 0.1 * step, "betas": (0.9, 0.99), "params": [0, 1]}]
    optim = {"state": moments, "groups": groups}
    return {"model": model, "optim": optim, "step": step, "note": "x" * step, "empty": {}}


def changed(step, change):
    made = state(step)
    change(made, made["model"], made["optim"])
    return made


#: States that differ in one thing; of some, DCP makes the same flat names.
CHANGES = [
    lambda s, model, optim: None,
    lambda s, model, optim: model.update(w=torch.nn.Parameter(torch.ones(5, 25))),
    lambda s, model, optim: model.update(w=model["w"].detach()),
    lambda s, model, optim: model.update(w=torch.nn.Parameter(torch.arange(100.0).reshape(25, 4).t())),
    lambda s, model, optim: model.update(part=model["part"].double()),
    lambda s, model, optim: model.update(part=torch.arange(40.0)[::3][:12]),
    lambda s, model, optim: model.update(part=torch.ones(12, dtype=torch.complex64).conj()),
    lambda s, model, optim: model.update(part=model["part"].clone().requires_grad_()),
    lambda s, model, optim: model.update(part=torch._neg_view(model["part"])),
    lambda s, model, optim: model.update(part=5.0),
    lambda s, model, optim: model.update(more=torch.ones(3)),
    lambda s, model, optim: model.pop("part"),
    lambda s, model, optim: model.move_to_end("w"),
    lambda s, model, optim: model.update(none=torch.ones(1)),
    lambda s, model, optim: optim["state"].update({2: optim["state"].pop(1)}),
    lambda s, model, optim: optim["state"].update({True: optim["state"].pop(1)}),
    lambda s, model, optim: optim["groups"][0].update(params=[torch.ones(2), 1]),
    lambda s, model, optim: optim["groups"].append({"lr": 1.0, "betas": (0, 0), "params": []}),
    lambda s, model, optim: s.update(note=torch.ones(2)),
    lambda s, model, optim: s["empty"].update(now=torch.ones(1)),
    lambda s, model, optim: s.update({"model": Keys(model)}),
    lambda s, model, optim: s.update({"model.w": model.pop("w")}),
]


def blank(value):
    if isinstance(value, dict):
        return type(value)((key, blank(each)) for key, each in value.items())
    if isinstance(value, list):
        return [blank(each) for each in value]
    if isinstance(value, torch.Tensor) and value.numel():
        return torch.full_like(value, 77).detach()
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def assert_same(found, wanted):
    if isinstance(wanted, dict | list):
        assert len(found) == len(wanted)
        keys = list(wanted) if isinstance(wanted, dict) else range(len(wanted))
        for key in keys:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (found, wanted)]
        assert torch.equal(*local)
    else:
        assert found == wanted


@pytest.fixture
def saves(memory_dir, tmp_path, monkeypatch):
    """Returns a function that saves and loads states, and returns the number of saves without planning."""
    options = {"memory_dir": memory_dir, "dirpath": str(tmp_path / "s3"), "namespace": f"job-{tmp_path.name}"}
    writer = dcp.TieredStorageWriter(save_to_s3=False, **options)
    planned, plan, steps = [], DefaultSavePlanner.create_local_plan, iter(range(1, 999))
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", lambda self: planned.append(1) or plan(self))

    def save(*states, save=dcp.save):
        before = len(planned)
        for each in states:
            name = f"step_{next(steps)}"
            done = save(each, checkpoint_id=name, storage_writer=writer)
            found = done.result() if save is dcp.async_save else done
            into = blank(each)
            dcp.load(into, checkpoint_id=name, **options)
            assert_same(into, each)
            if not dist.is_initialized():
                count, stock = len(planned), DefaultSavePlanner()
                stock.set_up_planner(each, is_coordinator=True)
                _, wanted = stock.create_global_plan([stock.create_local_plan()])
                del planned[count:]
                assert found.planner_data == wanted.planner_data
                assert found.state_dict_metadata == wanted.state_dict_metadata
        return len(states) - (len(planned) - before)

    yield save
    writer.close()


@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_the_third_save_of_a_structure_is_not_planned(saves, save):
    assert saves(*map(state, range(6)), save=save) == 4


def test_each_save_is_what_torch_plans_for_its_state(saves):
    for number, change in enumerate(CHANGES):
        # Of the one or the other, the structure is known when it changes.
        assert saves(*[state(number)] * 3) >= 1
        saves(*(changed(number, change) for _ in range(1 + number % 3)))


def test_tensors_may_move_between_saves_and_share_storages(saves):
    base = torch.arange(64.0)
    a = {"a": base[:16], "b": base[16:32]}
    b = {"a": base[3:19], "b": base[30:46].clone()}
    tied = {"a": base[5:21], "b": base[5:21]}
    assert saves(a, b, tied, b, a) == 3


def test_shards_of_tensors(saves):
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
