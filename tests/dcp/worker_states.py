"""States of the jobs of ``worker.py``: the same whole state on any number of ranks, by its seed."""

import contextlib
import pickle

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ROWS = 37


def content(seed, rows=ROWS):
    """Returns the whole state of a job of any world size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(rows, 24, generator=generator),
        "columns": torch.randn(10, 9, generator=generator),
        "replicated": torch.randn(5, 3, generator=generator),
        "bias": torch.randn(6, generator=generator).bfloat16(),
    }


def sharded(seed, rows=ROWS, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    whole = content(seed, rows)
    return {
        "model": {
            "weight": distribute_tensor(whole["weight"], mesh, [Shard(0)]),
            "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole["replicated"], mesh, [Replicate()]),
            "bias": whole["bias"],
        },
        "step": seed,
        "text": {"name": f"run {seed}"},
    }


def matches(state, seed, rows=ROWS):
    whole = content(seed, rows)
    for key, value in state["model"].items():
        mine = value.full_tensor() if isinstance(value, DTensor) else value
        if not torch.equal(mine, whole[key]):
            return False
    return state["step"] == seed and state["text"] == {"name": f"run {seed}"}


def blank(seed=0, rows=ROWS, mesh=None):
    state = sharded(seed, rows, mesh)
    for value in state["model"].values():
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    return {**state, "step": -1, "text": {"name": ""}}


def fsdp_job(seed):
    """Returns an FSDP2 model and its optimizer after one step; the same whole state on any number of ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(13, 29), torch.nn.ReLU(), torch.nn.Linear(29, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 13)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def totals(model, optimizer):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {key: value.double().sum().item() for key, value in weights.items()}
    for name, entries in states.get("state", {}).items():
        found |= {f"{name}.{key}": float(torch.as_tensor(value).double().sum()) for key, value in entries.items()}
    return found


class Refusing:
    """Stateful; its state_dict raises on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if dist.get_rank() == self.rank:
            raise ValueError("this rank's loader has ended")
        return {"position": 7}

    def load_state_dict(self, state):
        pass


@contextlib.contextmanager
def gathered():
    """Yields the sizes of this rank's messages to all others."""
    sizes, gather = [], dist.all_gather_object

    def note(object_list, obj, group=None):
        sizes.append(len(pickle.dumps(obj)))
        gather(object_list, obj, group=group)

    dist.all_gather_object = note
    try:
        yield sizes
    finally:
        dist.all_gather_object = gather


def grown_state(seed, grown):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {f"{n}": distribute_tensor(torch.arange(20.0) + seed + n, mesh, [Shard(0)]) for n in range(1 + grown)}
