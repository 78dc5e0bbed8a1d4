"""Writes the fixtures of storage format 1 that lie beside this file: small real checkpoints of the three kinds.

They were written by release 0.1.0, whose format is 1, and are not to be written again: a later release has to
load what that one wrote. This script says how they came to be. For each kind, ``full``, ``sharded`` (2 ranks) and
``local`` (2 shards), there are a durable directory, and the memory of a node as it lay on tmpfs, with

- ``step_1.ckpt``: overwritten by step 4, whose commit was killed just before its switch file changed over (of
  kind local, which has none: just before its manifest). The durable tier holds step 1 there, memory step 4, pending;
- ``step_2.ckpt`` and ``step_3.ckpt``, in both tiers, and ``last.ckpt``, an alias of step 3;
- of kinds sharded and local: ``step_5.ckpt``, saved on a node that was lost when only one of its parts had
  arrived. It is on the durable tier alone, and is no checkpoint.

The tensors of a step hold its number. Paths in the documents are replaced by ``/tiered-format-v1``, and the documents
sealed again: see ``support.format_v1``.

::

    PYTHONPATH=tests python tests/data/format_v1/make.py FOLDER
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.supporting import build

PATIENCE_S = 120
KILLED = 42
#: What the overwrite puts last: its switch file, or, of kind local, its manifest.
LAST = {
    "full": r"step_1\.ckpt",
    "sharded": r"step_1\.ckpt/\.metadata",
    "local": r"\.tiered/manifests/step_1\.ckpt\.json",
}


# -------------------------------------------------------------------------------------------- one rank
def die_at(wanted, count=1):
    """Kills this process when it is about to put the n-th object whose path, below the durable tier, fits."""
    rename, put = os.rename, set()

    def renaming(source, target, *args, **options):
        path = os.path.relpath(target, os.environ["DURABLE"])
        if re.fullmatch(wanted, path):
            put.add(path)
            if len(put) == count:
                os._exit(KILLED)
        return rename(source, target, *args, **options)

    os.rename = renaming


def save_full(step, name, options):
    import torch

    from tiered_checkpoint_io import TieredCheckpointIO

    io = build(TieredCheckpointIO, **options)
    io.save_checkpoint({"w": torch.full((4,), float(step)), "global_step": step, "epoch": 0}, name)
    return io.checkpointer


def save_shards(kind, step, name, options):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tiered_checkpoint_io import TieredStorageWriter, dcp
    from tiered_checkpoint_io.engine.checkpointer import Checkpointer

    mine = torch.full((2,), float(step))
    state = {"w": DTensor.from_local(mine, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False), "step": step}
    if kind == "local":
        state = {"w": mine, "step": step, "shard": dist.get_rank()}
    writer = build(TieredStorageWriter, **options, wait=True)
    dcp.save(state, checkpoint_id=name, storage_writer=writer, kind=kind)
    dist.barrier()
    return Checkpointer(writer.settings.config, session=writer.session)


def rank_main(kind, rank, phase, dirpath, memory_dir):
    import torch.distributed as dist

    options = {"dirpath": dirpath, "memory_dir": memory_dir, "drain": "thread", "on_save_error": "raise"}
    if kind != "full":
        dist.init_process_group("cpu:gloo")

    def save(step, name):
        return save_full(step, name, options) if kind == "full" else save_shards(kind, step, name, options)

    if phase == "half":
        die_at(r"\.tiered/parts/step_5.*", count=2)
        save(5, "step_5.ckpt")
    elif phase == "over":
        die_at(LAST[kind])
        save(4, "step_1.ckpt")
    else:
        for step, name in ((1, "step_1.ckpt"), (2, "step_2.ckpt"), (3, "step_3.ckpt")):
            engine = save(step, name)
        if rank == 0:
            engine.alias("last.ckpt", "step_3.ckpt")
        engine.session.wait()
        if kind != "full":
            dist.barrier()
        engine.close()
    sys.stdout.flush()
    os._exit(0)


# ------------------------------------------------------------------------------------------- all ranks
def run(kind, phase, dirpath, memory_dir, port):
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DURABLE": str(dirpath)}
    ranks = 1 if kind == "full" else 2
    os.makedirs(memory_dir, exist_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", kind, str(rank), phase, str(dirpath), str(memory_dir)],
            stderr=subprocess.DEVNULL,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + PATIENCE_S
    try:
        while any(each.poll() is None for each in processes) and not any(each.poll() == KILLED for each in processes):
            assert time.monotonic() < end, f"{kind}, {phase}: it hangs"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    codes = [each.wait() for each in processes]
    assert (KILLED in codes) == (phase != "whole"), (kind, phase, codes)


def make(kind, folder):
    from support.format_v1 import PLACE, moved
    from support.launch import free_port

    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        dirpath, memory_dir = Path(place, "durable"), Path(place, "memory")
        run(kind, "whole", dirpath, memory_dir, free_port())
        run(kind, "over", dirpath, memory_dir, free_port())
        if kind != "full":
            # The last, because the next commit would collect what it leaves.
            run(kind, "half", dirpath, Path(place, "lost"), free_port())
        (root,) = memory_dir.glob("tiered-*/default")
        target = Path(folder, kind)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(dirpath, target / "durable", ignore=shutil.ignore_patterns("leases", "tmp"))
        shutil.copytree(root / "saves", target / "memory" / "saves")
        for document in [*target.rglob("part.json"), *target.glob("durable/.tiered/parts/**/*.json")]:
            document.write_bytes(moved(document.read_bytes(), str(dirpath), PLACE))
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(path.stat().st_size, path.relative_to(folder))
            if path.suffix == ".json":
                json.loads(path.read_bytes())


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_main(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        for each in ("full", "sharded", "local"):
            make(each, sys.argv[1])
