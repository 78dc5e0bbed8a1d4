"""One rank of a job that saves in the SageMaker library's style; steps as in ``worker.py``."""

import contextlib
import errno
import functools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import worker
from support.supporting import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tiered_checkpoint_io import dcp
from tiered_checkpoint_io.model import ids

COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(
        ("all_", "barrier", "broadcast", "gather", "monitored", "new_group", "recv", "reduce", "scatter")
    )
    or name in ("send", "isend", "irecv", "batch_isend_irecv", "new_subgroups")
]


@contextlib.contextmanager
def counted(calls):
    """Collects the names of collectives that are called, and one entry for each that the process group carried out."""
    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    modules = [dist, dist.distributed_c10d]

    def counting(name, original):
        def call(*arguments, **named):
            calls.append(name)
            return original(*arguments, **named)

        return call

    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    for name, original in kept.items():
        for module in modules:
            setattr(module, name, counting(name, original))
    try:
        yield
    finally:
        for name, original in kept.items():
            for module in modules:
                setattr(module, name, original)
        done = backend._get_sequence_number_for_group() - before
        calls.extend(["carried out"] * done)


class Loader:
    """Stateful, as DCP has it."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@functools.cache
def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state_of(shard, number, degree=2):
    mine = torch.arange(8.0) + 1000 * number + 8 * shard
    return {
        "model": {
            "weight": DTensor.from_local(mine, mesh(), [Shard(0)], run_check=False),
            "local": torch.full((3 + shard,), 10.0 * number + shard),
        },
        "optimizer": {"state": {0: {"exp": torch.full((2,), float(number))}}, "param_groups": [{"lr": number / 10}]},
        "loader": Loader(100 * number + shard),
        "text": f"shard {shard} of {degree}, {number}",
    }


def blank(shard):
    state = state_of(shard, 0)
    state["model"]["weight"].to_local().zero_()
    # The state of an optimizer before its first step.
    return {**state, "optimizer": {"state": {}, "param_groups": [{"lr": 0.0}]}, "text": ""}


def same(mine, theirs):
    if isinstance(mine, DTensor):
        return torch.equal(mine.to_local(), theirs.to_local())
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, Loader):
        return mine.position == theirs.position
    return mine == theirs


def refused(*_, **__):
    raise OSError(errno.EMFILE, "too many open files")


def save_local(job, number, step=None, content=None, only=None, shard=None, sync=False, name=None, fails=None, **more):
    """Saves a local checkpoint; the tensors change at once behind it.

    ``fails`` is a rank, and which call of its memory fails.
    """
    step, shard = step or number, dist.get_rank() if shard is None else shard
    name = name or f"step_{step}"
    if only is not None and dist.get_rank() not in only:
        return None
    state = state_of(shard, content or number)
    kept = [state["model"]["weight"].to_local(), state["model"]["local"]]
    how = {"checkpoint_id": name, "kind": "local", **job["options"], **more}
    tier, call = worker.writer(job).session.open().tier, fails[1] if fails and fails[0] == dist.get_rank() else ""
    if call:
        setattr(tier, call, refused)
    calls = []
    try:
        with counted(calls):
            if sync:
                report = build(dcp.save, state, **how)
                return {"calls": calls, "tiers": sorted(report.tiers) if report else []}
            future = build(dcp.async_save, state, **how)
    finally:
        if call:
            delattr(tier, call)
    for tensor in kept:
        tensor.zero_()
    ended = dcp.maybe_finalize_async_calls(blocking=True)
    return {
        "calls": calls,
        "saved": future.result() is not None,
        "tiers": sorted(future.result().tiers) if future.result() else [],
        "ended": [save.name for save in ended],
    }


def load_local(job, number, checkpoint_id=None, shard=None, **more):
    shard = dist.get_rank() if shard is None else shard
    state = blank(shard)
    if isinstance(checkpoint_id, list):
        checkpoint_id = checkpoint_id[dist.get_rank()]
    reader = build(dcp.load, state, checkpoint_id=checkpoint_id, kind="local", **{**worker.reading(job), **more})
    is_same = same(state, state_of(shard, number))
    return {"same": is_same, "step": reader.opened.step, "rejected": reader.opened.rejected}


def save_now(job, number, kind, late=None, **more):
    """Saves synchronously; returns whether the save was durable when the call returned on this rank."""
    options, state = {**job["options"], **more}, {"t": torch.full((4,), float(number + dist.get_rank()))}
    end = time.monotonic() + 60
    while late == dist.get_rank() and time.monotonic() < end:
        # The other rank has done its part by then.
        if any((Path(options["dirpath"]) / f"step_{number}").glob("rank-*")):
            break
        time.sleep(0.01)
    saved = build(dcp.save, state, checkpoint_id=f"step_{number}", kind=kind, **options)
    there = (Path(options["dirpath"]) / ids.manifest_key(f"step_{number}")).exists()
    dist.barrier()
    return {"saved": saved is not None, "there": there}


def save_spoilt(job, number, kind):
    """Saves while the coordinator's part can't be uploaded."""
    if dist.get_rank() == 0:
        # A folder in the place of the manifest: the other rank's part is uploaded.
        (Path(job["options"]["dirpath"]) / ids.manifest_key(f"step_{number}")).mkdir()
    dist.barrier()
    return save_now(job, number, kind)


def save_replicated(job, number, groups, **more):
    """Saves with each rank's replication group, as global ranks."""
    (index,) = [index for index, group in enumerate(groups) if dist.get_rank() in group]
    return save_local(job, number, shard=index, replication_group=groups[index], **more)


def save_told(job, number, groups, sharding, writers, **more):
    """Saves with the sharding groups as process groups, and the rank of each replication group that saves."""
    made = [dist.new_group(ranks) for ranks in sharding]
    (index,) = [index for index, group in enumerate(groups) if dist.get_rank() in group]
    (mine,) = [group for group, ranks in zip(made, sharding, strict=True) if dist.get_rank() in ranks]
    how = {"process_group": mine, "replication_group": groups[index], "coordinator_rank": writers[index]}
    return save_local(job, number, shard=index, **how, **more)


def load_replicated(job, number, groups, **more):
    (index,) = [index for index, group in enumerate(groups) if dist.get_rank() in group]
    return load_local(job, number, shard=index, replication_group=groups[index], **more)


def meet(job):
    dist.barrier()


def parts(job):
    dist.barrier()
    held = worker.writer(job).session.open().tier.parts()
    found = [[stored.part.name, stored.part.rank, stored.save_id, stored.part.durable] for stored in held]
    dist.barrier()
    return found


def damage(job, rank, name):
    """Flips a byte in a rank's file in memory."""
    if dist.get_rank() == rank:
        for stored in worker.writer(job).session.open().tier.parts():
            if stored.part.name == name and stored.part.rank == rank:
                path = stored.file(stored.part.content.files[0].basename)
                with open(path, "r+b") as file:
                    file.seek(os.path.getsize(path) // 2)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
    dist.barrier()


def save_by(job, number, ranks, coordinator, **more):
    """Makes and loads a sharded save by a group, one of whose members coordinates."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    options = {**job["options"], **more}
    state = {"t": torch.full((4,), float(number)), "loader": Loader(number)}
    how = {"process_group": group, "coordinator_rank": coordinator}
    future = build(dcp.async_save, state, checkpoint_id=f"step_{number}", **how, **options)
    others = dist.new_group(ranks, use_local_synchronization=True)
    early = [save.name for save in dcp.maybe_finalize_async_calls(blocking=True, process_group=ranks[:1])]
    # The same ranks, of whatever object.
    ended = [save.name for save in dcp.maybe_finalize_async_calls(blocking=True, process_group=others)]
    blank = {"t": torch.zeros(4), "loader": Loader()}
    reader = build(dcp.load, blank, checkpoint_id=f"step_{number}", **how, **worker.reading(job))
    held = reader.session.open().tier.parts()
    return {
        "early": early,
        "ended": ended,
        "metadata": future.result() is not None,
        "loaded": [*blank["t"].tolist(), blank["loader"].position],
        "coordinators": [stored.part.rank for stored in held if stored.part.commits],
    }


def fsdp_local(job, number):
    """Saves and loads an FSDP2 model and its optimizer, each rank its own part."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = worker.fsdp_job(number)
    before = worker.totals(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    build(dcp.save, {"model": weights, "optim": states}, checkpoint_id=f"step_{number}", kind="local", **job["options"])
    dist.barrier()
    other, fresh = worker.fsdp_job(number + 1)
    weights, states = get_state_dict(other, fresh)
    state = {"model": weights, "optim": states}
    build(dcp.load, state, kind="local", **worker.reading(job))
    set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return before == worker.totals(other, fresh)


# Its loop finds steps by their names.
vars(worker).update({name: value for name, value in list(globals().items()) if not name.startswith("__")})

if __name__ == "__main__":
    worker.main()
