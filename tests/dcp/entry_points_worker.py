"""Cases of torch's own entry points, by our writer and reader and by torch's; steps as in ``worker.py``."""

import contextlib
import functools
import itertools
import shutil
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worker
from support.supporting import build
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter

#: Facts for a writer or reader; and True if the call gives a ``checkpoint_id``.
TOLD = ("nothing", "step", "path")
GIVEN = (False, True)
USED = ("new", "again")
SAVES = ("save", "thread", "process", "save_state_dict")
LOADS = ("load", "load_state_dict")
#: Process groups of a job: the default one, one of all ranks that is given, and one of the last rank only.
GROUPS = ("default", "given", "last")


def save_cases(groups):
    """Returns cases: group, entry point, arguments of the writer, whether an id is given, and the writer's use."""
    found = itertools.product(groups, SAVES, TOLD, GIVEN, USED)
    # torch's save_state_dict takes no checkpoint_id; its process for saves has the group of the first one for ever.
    found = (case for case in found if case[:2] != ("last", "process"))
    return [case for case in found if not (case[1] == "save_state_dict" and case[3])]


def load_cases(groups):
    found = itertools.product(groups, LOADS, TOLD, GIVEN, USED)
    return [case for case in found if not (case[1] == "load_state_dict" and case[3])]


def state(seed, group):
    weight = torch.arange(12.0).reshape(4, 3) + 100 * seed
    if dist.is_initialized() and group != "last":
        weight = distribute_tensor(weight, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    return {"model": {"weight": weight, "bias": torch.full((3,), float(seed))}, "step": seed}


def values(state):
    weight = state["model"]["weight"]
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return [weight.tolist(), state["model"]["bias"].tolist(), state["step"]]


@functools.cache
def how(group):
    """Returns the arguments that name a group to torch; all ranks make the group."""
    ranks = list(range(dist.get_world_size())) if group != "default" else []
    return {"process_group": dist.new_group(ranks if group == "given" else ranks[-1:])} if ranks else {}


def save(entry, saved, writer, arguments):
    if entry == "save_state_dict":
        dcp.save_state_dict(saved, writer, **arguments)
    elif entry == "save":
        build(dcp.save, saved, storage_writer=writer, **arguments)
    else:
        kind = AsyncCheckpointerType(entry)
        build(dcp.async_save, saved, storage_writer=writer, async_checkpointer_type=kind, **arguments).result(60)


def load(entry, loaded, reader, arguments):
    (dcp.load_state_dict if entry == "load_state_dict" else dcp.load)(loaded, storage_reader=reader, **arguments)


class Ours:
    """Our writer and reader of one case, only in memory."""

    def __init__(self, job, case):
        self._options = {**job["options"], "namespace": case}

    def writer(self, source, number):
        return build(TieredStorageWriter, **self._options, save_to_s3=False, **self._named(source, number))

    def reader(self, source, number):
        return build(TieredStorageReader, **self._options, **self._named(source, number))

    def given(self, number):
        return f"step_{number}"

    def _named(self, source, number):
        return {} if source == "nothing" else {"step": number} if source == "step" else {"path": f"step_{number}"}

    def close(self):
        self.writer("nothing", 0).close()


class Stock:
    """Torch's own, in a folder. There is no newest checkpoint: a reader without arguments has the last saved."""

    def __init__(self, job, case):
        self._folder = f"{job['folder']}/{case}"

    def writer(self, source, number):
        if source == "nothing":
            raise TypeError("no path")
        return dcp.FileSystemWriter(self.given(number))

    def reader(self, source, number):
        return dcp.FileSystemReader(self.given(2 if source == "nothing" else number))

    def given(self, number):
        return f"{self._folder}/step_{number}"

    def close(self):
        # Only when no rank needs it.
        if dist.is_initialized():
            dist.barrier()
        shutil.rmtree(self._folder, ignore_errors=True)


def saved_by(tiers, case):
    """Returns the results of two saves of a case, each loaded by its name, or refused."""
    group, entry, source, given, used = case
    outcomes, writer = [], None
    for number in (1, 2):
        # A step in the writer takes precedence over a name: what it says of the first save holds for the second.
        name = 1 if used == "again" and source == "step" else number
        with refusing(outcomes):
            if writer is None or used == "new":
                # torch's own needs an argument, and takes a checkpoint_id instead of its path.
                stock_source = "path" if given and source == "nothing" and isinstance(tiers, Stock) else source
                writer = tiers.writer(stock_source, number)
            arguments = {**how(group), **({"checkpoint_id": tiers.given(name)} if given else {})}
            save(entry, state(number, group), writer, arguments)
    for number in (1, 2):
        with refusing(outcomes):
            loaded = state(0, group)
            build(dcp.load, loaded, storage_reader=tiers.reader("path", number), **how(group))
            outcomes.append(values(loaded))
    return outcomes


def loaded_by(tiers, case):
    """Returns the results of two loads of a case, after two saves."""
    group, entry, source, given, used = case
    for number in (1, 2):
        save("save", state(number, group), tiers.writer("path", number), how(group))
    outcomes, reader = [], None
    # The first load by a reader that is used again gives an id; the second does so if the case says so.
    for number, has_id in ((1, True), (2, given)) if used == "again" else ((1, given), (2, given)):
        with refusing(outcomes):
            loaded = state(0, group)
            if reader is None or used == "new":
                reader = tiers.reader(source, number)
            name = 1 if source == "step" and used == "again" else number
            by_load = entry if not has_id else "load"
            arguments = {**how(group), **({"checkpoint_id": tiers.given(name)} if has_id else {})}
            load(by_load, loaded, reader, arguments)
            outcomes.append(values(loaded))
    return outcomes


@contextlib.contextmanager
def refusing(outcomes):
    try:
        yield
    except BaseException as error:  # DCP derives its CheckpointException from that
        outcomes.append(f"refused: {type(error).__name__}: {error}"[:300])


def entry_points(job, kind, cases):
    """Runs cases of saves or loads; returns each, with our result and torch's."""
    found = []
    for number, case in enumerate(cases):
        group, outcomes = case[0], []
        how(group)
        for made in (Ours, Stock):
            tiers = made(job, f"{kind}-{number}")
            try:
                takes_part = group != "last" or dist.get_rank() == dist.get_world_size() - 1
                outcomes.append((saved_by if kind == "save" else loaded_by)(tiers, case) if takes_part else [])
            finally:
                tiers.close()
        found.append([case, *outcomes])
    return found


# Its loop finds steps by their names.
worker.entry_points = entry_points

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    worker.main()
