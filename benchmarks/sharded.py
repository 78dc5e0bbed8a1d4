"""Time for which training waits for an asynchronous sharded checkpoint: ours beside DCP's own.

Two ranks over gloo, each with 1 GiB of sharded state on the CPU, warm, all contenders in turn in every round, and a
plain copy of the state into warm memory beside them; what a rank waits for is the slowest rank's time. DCP writes to
the same tmpfs. Prints the median of each, a line of JSON with the parts that ours consists of, and, last,
``sharded_stall_ratio_to_dcp_thread=X``: the median over rounds of ours divided by DCP's async_save with a thread in the
same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from measure import ratio
from parts import OF_SHARDED, Parts, medians
from running import shm_folder, show_table, spread_of, two_ranks

WARM_ROUNDS = 2
NAMES = ("ours", "DCP async_save, thread", "DCP async_save, process, shared memory", "a plain copy")


def rank_main(folder: str, mebibytes: int, rounds: int) -> None:
    """One rank: times each contender in each round; the first tells all."""
    import logging

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from tiered_checkpoint_io import TieredStorageWriter
    from tiered_checkpoint_io import dcp as ours

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 16 << 20 >> 12
    state = {
        f"layer.{number}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)])
        for number in range(mebibytes // 16)
    }
    writer = TieredStorageWriter(memory_dir=folder, require_step=False, save_to_s3=False)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
    )

    def by_ours(step: int) -> Any:
        return ours.async_save(state, checkpoint_id=f"step_{step}", storage_writer=writer)

    def by_thread(step: int) -> Any:
        return dcp.async_save(state, checkpoint_id=f"{folder}/thread-{step}")

    def by_process(step: int) -> Any:
        response = dcp.async_save(
            state,
            checkpoint_id=f"{folder}/process-{step}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        return getattr(response, "upload_completion", response)

    copies = [(torch.ones_like(each.to_local()), each.to_local()) for each in state.values()]

    def by_copy(_: int) -> Any:
        for target, tensor in copies:
            target.copy_(tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    ways = (by_ours, by_thread, by_process, by_copy)
    contenders: dict[str, Callable[[int], Any]] = dict(zip(NAMES, ways, strict=True))
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    rounds_of_parts: list[dict[str, float]] = []
    for number in range(rounds + WARM_ROUNDS):
        for name, save in contenders.items():
            dist.barrier()
            parts = Parts(OF_SHARDED if name == NAMES[0] else {})
            with parts:
                began = time.perf_counter()
                future = save(number)
                mine = torch.tensor(time.perf_counter() - began)
            future.result()
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if rank == 0:
                for kind in ("thread", "process"):
                    shutil.rmtree(f"{folder}/{kind}-{number}", ignore_errors=True)
            if number >= WARM_ROUNDS:
                times[name].append(float(mine))
                if parts.seconds:
                    # The slowest rank's time, of which the first rank spent this.
                    rest = float(mine) - sum(parts.seconds.values())
                    rounds_of_parts.append({**parts.seconds, "the rest and the other rank": rest})
    writer.close()
    if rank == 0:
        print(json.dumps([times, medians(rounds_of_parts)]), flush=True)
    dist.barrier()
    # DCP's background process would be waited for.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of each rank; a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank, arguments.mebibytes, arguments.rounds)
        return
    with shm_folder() as folder:
        command = ["--rank", folder, "--mebibytes", arguments.mebibytes, "--rounds", arguments.rounds]
        times: dict[str, list[float]]
        times, parts = two_ranks(command, nodes=1)
    thread = times[NAMES[1]]
    ratios = {name: ratio(seconds, thread) for name, seconds in times.items()}
    title = f"How long training waits: 2 ranks, {arguments.mebibytes} MiB each, median of {len(thread)} rounds"
    rows = {name: [*spread_of(seconds), f"{ratios[name]:.2f}"] for name, seconds in times.items()}
    show_table(title, ("seconds", "fastest", "slowest", "x DCP thread"), rows)
    by_process = ratio(times[NAMES[0]], times[NAMES[2]])
    keys = ("ours_s", "thread_s", "process_s", "copy_s")
    middle = {key: statistics.median(times[name]) for key, name in zip(keys, NAMES, strict=True)}
    print(json.dumps({**middle, "parts": parts}))
    print(f"sharded_stall_ratio_to_dcp_process={by_process:.2f}")
    print(f"sharded_stall_ratio_to_dcp_thread={ratios[NAMES[0]]:.2f}")


if __name__ == "__main__":
    main()
