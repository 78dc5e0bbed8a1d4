"""Speed of replicas between two processes: ours beside raw gloo and a raw socket, over the loopback interface.

Two nodes (memory folders of their own) of one rank each. One has a large part of a sharded checkpoint of node memory
alone, which goes to the other one: sent from the mapped file, read into a slot, its chunks hashed. By turns, as many
bytes are sent by gloo between warm tensors, and by a socket between warm buffers, which neither hash nor keep anything.
Then the same with large parts on both, sent both ways at once. The time of ours is from the return of the save, of the
slower rank.

Prints, last, a line of JSON: for each way seconds, GiB/s each way, and processor seconds of both ranks a GiB sent.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from measure import GIB, MIB
from running import shm_folder, two_ranks

NAMES = ("ours", "gloo", "socket")
#: Slots are used in turn: so many rounds until each has been read into.
WARM_ROUNDS = 4
DEADLINE_S, PATIENCE_S = 200.0, 60.0


def rank_main(folder: str, mebibytes: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from tiered_checkpoint_io import dcp
    from tiered_checkpoint_io.adapters.dcp_settings import settings_of, shared_of

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    memory_dir = f"{folder}/{'ab'[rank]}"
    os.makedirs(memory_dir, exist_ok=True)
    config: dict[str, Any] = {
        "dirpath": f"{folder}/durable",
        "memory_dir": memory_dir,
        "replication_factor": 2,
        "memory_allocation_percentage": 100,
    }
    session = shared_of(settings_of(None, config)).session
    mine, theirs = torch.ones(mebibytes * MIB, dtype=torch.uint8), torch.zeros(mebibytes * MIB, dtype=torch.uint8)
    line = connected(dist, rank)

    def by_ours() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while session._peering.pending and time.monotonic() < deadline:
            time.sleep(0.005)

    def by_gloo() -> None:
        requests = [dist.isend(mine, other)] if rank in senders else []
        requests += [dist.irecv(theirs, other)] if other in senders else []
        for request in requests:
            request.wait()

    def by_socket() -> None:
        sender = threading.Thread(target=line.sendall, args=(mine.numpy().data if rank in senders else b"",))
        sender.start()
        view, at = theirs.numpy().data if other in senders else memoryview(b""), 0
        while at < len(view):
            at += line.recv_into(view[at:])
        sender.join()

    ways: dict[str, Callable[[], None]] = dict(zip(NAMES, (by_ours, by_gloo, by_socket), strict=True))
    found: dict[str, dict[str, list[float]]] = {}
    number = 0
    for senders, suffix in (((0,), ""), ((0, 1), ", both ways at once")):
        state = {f"w-{rank}-{part}": torch.randn(mebibytes << 16 if rank in senders else 1) for part in range(4)}
        for turn in range(rounds + WARM_ROUNDS):
            number += 1
            for name, way in ways.items():
                dist.barrier()
                if name == "ours":
                    dcp.save(state, checkpoint_id=f"step_{number}", save_to_s3=False, **config)
                # The save itself is not looked at; what is sent meanwhile counts.
                used, began = time.process_time(), time.perf_counter()
                way()
                figures = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
                dist.all_reduce(figures[:1], dist.ReduceOp.MAX)
                dist.all_reduce(figures[1:])
                row = found.setdefault(name + suffix, {"seconds": [], "cpu_s": [], "sent": []})
                if turn >= WARM_ROUNDS:
                    for key, value in zip(row, (*figures.tolist(), len(senders)), strict=True):
                        row[key].append(value)
    replicated = session.counts["replicated"]
    assert replicated >= rounds, f"{replicated} parts were replicated"
    if rank == 0:
        os.write(1, (json.dumps(found) + "\n").encode())
    dist.barrier()
    session.close()
    line.close()
    dist.destroy_process_group()


def connected(dist: Any, rank: int) -> socket.socket:
    """A socket to the other rank."""
    port = [0]
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = [listener.getsockname()[1]]
    dist.broadcast_object_list(port)
    line = listener.accept()[0] if rank == 0 else socket.create_connection(("127.0.0.1", port[0]))
    if rank == 0:
        listener.close()
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256, help="of each rank; a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.rank, options.mebibytes, options.rounds)
        return
    with shm_folder() as folder:
        command = ["--rank", folder, "--mebibytes", options.mebibytes, "--rounds", options.rounds]
        found = two_ranks(command, nodes=2, limit_s=DEADLINE_S)
    share = options.mebibytes * MIB / GIB
    ways = {
        name: {
            "seconds": statistics.median(row["seconds"]),
            "rate_GiB_s": share / statistics.median(row["seconds"]),
            "cpu_s_per_GiB": statistics.median(row["cpu_s"]) / (row["sent"][0] * share),
        }
        for name, row in found.items()
    }
    for name, row in ways.items():
        print(f"{name:28}" + "  ".join(f"{key}={value:.2f}" for key, value in row.items()))
    print(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
