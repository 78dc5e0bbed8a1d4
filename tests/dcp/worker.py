"""One rank of a job that saves and loads sharded checkpoints; does the steps that its job names, in order.

The job, a JSON object on the command line: ``options`` (of writer and reader), ``answer`` (the file to write),
``steps``: lists of a name and arguments, see the functions of this module. A step that raises is answered by its error;
the next ones are done all the same.
"""

import faulthandler
import json
import logging
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worker_states
from support.supporting import build
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from worker_states import (  # noqa: F401
    ROWS,
    Refusing,
    blank,
    fsdp_job,
    grown_state,
    matches,
    sharded,
    totals,
)

from tiered_checkpoint_io.errors import DrainError


def writer(job, **more):
    from tiered_checkpoint_io import TieredStorageWriter

    return build(TieredStorageWriter, **{**job["options"], **more})


def described(writer):
    held = [
        (each.part, sorted(f.basename for f in each.part.content.files)) for each in writer.session.open().tier.parts()
    ]
    return [[part.name, part.rank, part.save_id, part.durable, files] for part, files in held]


def save(job, seed, **more):
    rows = more.pop("rows", ROWS)
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True) if more.pop("cached", False) else None
    broken = more.pop("broken", None)
    mine = writer(job, **more)
    if broken == dist.get_rank():

        def fail(*_, **__):
            raise OSError("this rank's memory is gone")

        mine.session.open().tier.commit = fail
    try:
        dcp.save(sharded(seed, rows), checkpoint_id=f"step_{seed}", storage_writer=mine, planner=planner)
    finally:
        if broken == dist.get_rank():
            del mine.session.open().tier.commit
    dist.barrier()
    return described(mine)


def load(job, seed, checkpoint_id=None, ours=False, **more):
    """Loads by plain dcp.load, or by ours; the answer is whether all tensors are those of ``seed``."""
    from tiered_checkpoint_io import TieredStorageReader
    from tiered_checkpoint_io import dcp as tiered

    rows = more.pop("rows", ROWS)
    options, state = {**reading(job), **more}, blank(rows=rows)
    if ours:
        reader = build(tiered.load, state, checkpoint_id=checkpoint_id, **options)
    else:
        reader = build(TieredStorageReader, **options)
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader)
    return loaded_rows(reader, state, seed, rows)


def reshard(job):
    """Saves by 1 to 4 ranks and loads by 1 to 4 ranks, from the durable tier; returns the pairs with equal results."""
    from tiered_checkpoint_io import TieredStorageReader

    world = dist.get_world_size()
    meshes = {count: DeviceMesh("cpu", list(range(count))) for count in range(1, world + 1)}
    groups = {count: dist.new_group(list(range(count))) for count in range(1, world + 1)}
    rank, good = dist.get_rank(), []
    for saved_by in range(1, world + 1):
        if rank < saved_by:
            state = sharded(saved_by, mesh=meshes[saved_by])
            dcp.save(
                state, checkpoint_id=f"step_{saved_by}", storage_writer=writer(job), process_group=groups[saved_by]
            )
        dist.barrier()
        if rank == 0:
            mine = writer(job)
            mine.wait(60)
            tier = mine.session.open().tier
            for stored in tier.parts():
                tier.remove(stored)
        dist.barrier()
        for loaded_by in range(1, world + 1):
            if rank < loaded_by:
                state = blank(mesh=meshes[loaded_by])
                reader = build(TieredStorageReader, **reading(job))
                dcp.load(state, storage_reader=reader, process_group=groups[loaded_by])
                if matches(state, saved_by):
                    good.append([saved_by, loaded_by])
            dist.barrier()
    return good


def reading(job):
    return {
        key: value for key, value in job["options"].items() if key not in ("save_to_s3", "s3_every_n_steps", "wait")
    }


def loaded_rows(reader, state, seed, rows=ROWS):
    return {
        "matches": matches(state, seed, rows),
        "step": reader.opened.step,
        "name": reader.opened.name,
        "asked": reader.session.asked,
        "rejected": reader.opened.rejected,
    }


def wait(job, timeout_s=60):
    """Waits until the durable tier has all; returns the error if it has not."""
    said = ""
    try:
        writer(job).wait(timeout_s)
    except DrainError as error:
        said = str(error)
    dist.barrier()
    return said


def close(job):
    """Ends this process' use of the tiers."""
    mine = writer(job)
    mine.close()
    dist.barrier()


def save_different(job, seed, **more):
    mine = writer(job, **more)
    dcp.save(sharded(seed), checkpoint_id=f"step_{seed + dist.get_rank()}", storage_writer=mine)


def save_behind(job, seed, fails=None, **more):
    """Saves by our ``async_save``; a rank may fail while it seals in the background."""
    from tiered_checkpoint_io import dcp as ours

    rows = more.pop("rows", ROWS)
    mine, state = writer(job, **more), sharded(seed, rows)
    tier = mine.session.open().tier

    def fail(*_, **__):
        raise OSError("this rank's memory is gone")

    if fails == dist.get_rank():
        tier.commit = fail
    try:
        future = ours.async_save(state, checkpoint_id=f"step_{seed}", storage_writer=mine)
        with torch.no_grad():
            for value in state["model"].values():
                (value.to_local() if isinstance(value, DTensor) else value).zero_()
        ended = repr(future.exception(60))
    finally:
        vars(tier).pop("commit", None)
    dist.barrier()
    return {"ended": ended, "parts": described(mine)}


def save_grown(job, seed, grown=0, refuses=False):
    """Saves a state that may have got more tensors since; the coordinator may refuse. Returns whether it saved."""
    from tiered_checkpoint_io import dcp as ours

    mine = writer(job)

    def refuse(*_, **__):
        raise OSError("too many open files")

    if refuses:
        mine.saver.issue = refuse
    try:
        return ours.save(grown_state(seed, grown), checkpoint_id=f"step_{seed}", storage_writer=mine) is not None
    finally:
        mine.saver.__dict__.pop("issue", None)


def load_grown(job, seed, grown=0):
    from tiered_checkpoint_io import dcp as ours

    state, saved = grown_state(0, grown), grown_state(seed, grown)
    with worker_states.gathered() as sizes:
        reader = build(ours.load, state, **reading(job))
    same = all(torch.equal(state[key].to_local(), saved[key].to_local()) for key in saved)
    return {"name": reader.opened.name, "same": same, "gathered": max(sizes), "kept": [*reader.opened.small]}


def save_stateful(job, seed, refuses=None, background=False, loads=False, **more):
    """Calls our ``save``, ``async_save`` or ``load`` with an object that raises on a rank; returns True if done."""
    from tiered_checkpoint_io import dcp as ours

    state = {"weight": torch.full((4,), float(seed)), "loader": Refusing(refuses)}
    how = {"checkpoint_id": f"step_{seed}", **job["options"], **more}
    done = (ours.load if loads else ours.async_save if background else ours.save)(state, **how)
    return (done.result(60) if background else done) is not None


def main():
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60)
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    job = json.loads(sys.argv[1])
    dist.init_process_group("cpu:gloo")
    answers = []
    for name, *arguments in job["steps"]:
        began = time.monotonic()
        positional = [each for each in arguments if not isinstance(each, dict)]
        named = {key: value for each in arguments if isinstance(each, dict) for key, value in each.items()}
        try:
            answer = {"got": globals()[name](job, *positional, **named)}
        except BaseException as error:  # DCP derives its CheckpointException from that
            answer = {"error": type(error).__name__, "message": str(error)}
        answers.append({**answer, "seconds": time.monotonic() - began})
    with open(job["answer"] + ".new", "w") as file:
        json.dump(answers, file)
    os.rename(job["answer"] + ".new", job["answer"])
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
