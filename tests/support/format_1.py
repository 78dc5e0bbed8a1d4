"""Makes ``tests/data/format_1``, a checkpoint of each kind as version 0.1.0 stores it: ``python tests/support/format_1.py``.

The sharded one has two ranks, so that it has an index and descriptions of its parts. They must load for ever.
"""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from support.supporting import build

from tiered_checkpoint_io import dcp

DATA = Path(__file__).parents[1] / "data/format_1"
#: The documents name it, so it is the same on every machine.
DIRPATH = Path("/tmp/tiered-format-1")
RANKS = 2


def state_of(step):
    """Returns what the checkpoint of a step holds."""
    return {"w": torch.arange(4.0) + step, "global_step": step}


def save_sharded(rank, port, options):
    """Saves step 2 as one of its ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    state = state_of(2)
    state["w"] = dist.tensor.distribute_tensor(state["w"], mesh, [dist.tensor.Shard(0)])
    build(dcp.save, state, checkpoint_id="step_2", **options)
    dist.barrier()
    dist.destroy_process_group()


def main():
    """Writes the checkpoints, and copies what the durable tier has of them."""
    shutil.rmtree(DIRPATH, ignore_errors=True)
    shutil.rmtree(DATA, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory_dir, socket.socket() as free:
        options = {"dirpath": str(DIRPATH), "memory_dir": memory_dir, "drain": "thread", "on_save_error": "raise"}
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        build(dcp.save_full, state_of(1), checkpoint_id="step_1.ckpt", **options)
        torch.multiprocessing.spawn(save_sharded, (port, options), nprocs=RANKS)
        build(dcp.save, state_of(3), checkpoint_id="step_3", kind="local", **options)
        build(dcp.TieredStorageWriter, **options).close()
    shutil.copytree(DIRPATH, DATA, ignore=shutil.ignore_patterns("lease.json", "tmp*"))
    shutil.rmtree(DIRPATH)


if __name__ == "__main__":
    main()
