"""Recovery after the loss of a node: the time of a load from a peer's memory, beside one from S3.

Two nodes (memory folders of their own) of one rank each, over gloo, each with a part of a sharded checkpoint.
It is saved, copied and uploaded once. In every round both ways are taken, in turn: node b has lost all its memory and
reads its part from node a; then the same without the copies on node a, so that the part comes from S3 (rclone on
this machine, which is closer and faster than S3 is). The time is that of the slower rank's load:
discovery, transfer, hashes, tensors.
Prints medians, and, last, ``recovery_ratio_to_s3=X``: the median over rounds of the one time by the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from typing import Any

from measure import ratio
from running import shm_folder, show_table, spread_of, two_ranks

NAMES = ("from a peer's memory", "from S3")
WARM_ROUNDS = 1
STEP = 7
#: Bound of the save with all that follows from it, and of the whole, seconds.
PATIENCE_S = 120.0
DEADLINE_S = 280.0


def tell(rank: int, text: str) -> None:
    """A line as soon as it is known: the whole takes a minute."""
    if rank == 0:
        os.write(2, (text + "\n").encode())


def rank_main(folder: str, dirpath: str, mebibytes: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tiered_checkpoint_io import dcp
    from tiered_checkpoint_io.adapters.dcp_settings import settings_of, shared_of
    from tiered_checkpoint_io.memory.tier import namespace_root

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    memory_dir = f"{folder}/{'ab'[rank]}"
    os.makedirs(memory_dir, exist_ok=True)
    config: dict[str, Any] = {"dirpath": dirpath, "memory_dir": memory_dir, "replication_factor": 2}
    mesh = init_device_mesh("cpu", (2,))

    def state(step: int) -> dict[str, Any]:
        shards = (torch.full((mebibytes << 18,), float(step * 100 + i)) for i in range(4))
        return {f"w{i}": DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for i, shard in enumerate(shards)}

    def session() -> Any:
        return shared_of(settings_of(None, config)).session

    def load(step: int) -> tuple[float, float]:
        into = state(0)
        dist.barrier()
        began = time.perf_counter()
        reader = dcp.load(into, checkpoint_id=f"step_{step}", **config)
        mine = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        assert all(bool((t.to_local() == step * 100 + i).all()) for i, t in enumerate(into.values()))
        asked = reader.session.asked.get("bytes.down", 0)
        reader.close()
        down = torch.tensor(float(asked))
        dist.all_reduce(down)
        return float(mine), float(down)

    times: dict[str, list[float]] = {name: [] for name in NAMES}
    root = namespace_root(memory_dir, settings_of(config, {}).config.namespace)
    kept = root.with_name("kept")
    size = 4 * (mebibytes << 20)
    dcp.save(state(STEP), checkpoint_id=f"step_{STEP}", save_to_s3=True, wait=True, **config)
    deadline = time.monotonic() + PATIENCE_S
    while session()._peering.pending and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    session().wait(PATIENCE_S)
    session().close()
    os.rename(root, kept)
    tell(rank, f"saved, copied and uploaded {2 * size >> 20} MiB")
    for number in range(1, rounds + WARM_ROUNDS + 1):
        for name in NAMES:
            dist.barrier()
            if rank == 0:
                # What is committed is never written to again, so further names of the same files are enough.
                shutil.copytree(kept, root, copy_function=os.link)
            if rank == 0 and name == NAMES[1]:
                shutil.rmtree(root / "replicas")
                os.mkdir(root / "replicas", 0o700)
            seconds, down = load(STEP)
            assert (down >= size) == (name == NAMES[1]), f"{name}: {down} bytes came from S3"
            tell(rank, f"round {number} of {rounds + WARM_ROUNDS}, {name}: {seconds:.2f} s")
            if number > WARM_ROUNDS:
                times[name].append(seconds)
            shutil.rmtree(root)
    if rank == 0:
        os.write(1, (json.dumps(times) + "\n").encode())
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=512, help="of each rank; a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(*arguments.rank, arguments.mebibytes // 4, arguments.rounds)
        return
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
    from support.rclone_server import RcloneServer

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shm_folder())
        os.mkdir(f"{folder}/s3")
        server = stack.enter_context(RcloneServer(f"{folder}/s3"))
        os.environ.update(server.env())
        server.make_bucket("recovery")
        command = ["--rank", folder, "s3://recovery/run", "--mebibytes", arguments.mebibytes]
        times: dict[str, list[float]] = two_ranks([*command, "--rounds", arguments.rounds], nodes=2, limit_s=DEADLINE_S)
    title = f"A lost node's part of {arguments.mebibytes} MiB: seconds, median of {arguments.rounds} rounds"
    rows = {name: spread_of(seconds) for name, seconds in times.items()}
    show_table(title, ("seconds", "fastest", "slowest"), rows)
    print(json.dumps({"seconds": {name: statistics.median(each) for name, each in times.items()}}))
    print(f"recovery_ratio_to_s3={ratio(*times.values()):.2f}")


if __name__ == "__main__":
    main()
