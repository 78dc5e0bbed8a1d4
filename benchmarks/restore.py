"""Time until a restart has its state: from node memory and from S3, beside a plain copy and a raw S3 client.

One process and one CPU state; what is restored ends up in parameters that exist already. All ways are taken in turn in
each round, and so are two loops that do the least of it with the same files: see ``floor.py``. The copy is ``copy_``
between warm tensors; the raw client is boto3 with ``readinto`` on its connections, in 8 threads, into warm memory,
which verifies nothing. The server is on this machine and sends without copies; it uses the same cores. Prints medians
of seconds, of processor seconds a GiB, and of the ratio to the copy, or to the raw client, of the same round; a line of
JSON, with the parts that each consists of; and, last, ``restore_memory_ratio_to_memcpy=X restore_s3_rate_to_raw=Y``,
both for DCP.

OpenMP's threads sleep while they wait: by default they spin, which shows as processor time of whatever copies.

``--fresh`` measures the first restore of a new process instead, whose imports and client are begun at set-up.
``--memory`` gives the peak of anonymous memory over what it was before, in MiB, for each way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Read when torch is imported, and by processes that are started here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from floor import Floor
from measure import MIB, measure, ratio
from parts import OF_DCP_LOAD, OF_LOAD, Parts, medians
from running import shm_folder, show_table, spread_of
from s3_process import StoringServer
from s3_state import BUCKET

WARM_ROUNDS = 2
RAW_THREADS, RAW_RANGE = 8, 16 * MIB
COPY, RAW = "memcpy into warm tensors", "raw boto3, readinto, 8 threads"
DCP, IO = "dcp.load", "TieredCheckpointIO and copy"
READ, MAP = "bare loop: read, hash", "bare loop: map, hash, copy"
#: Names in the line of JSON of the figures that the goals look at.
KEYS = {
    "raw": RAW,
    "floor_read": READ,
    "dcp_memory": f"{DCP} from memory",
    "floor_map": MAP,
    "io_memory": f"{IO} from memory",
    "dcp_s3": f"{DCP} from S3",
    "io_s3": f"{IO} from S3",
}


def state_of(mebibytes: int, tensors: int, fill: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"w{index}": fill(mebibytes * MIB // 4 // tensors) for index in range(tensors)}


class Bench:
    """A state that is in node memory and on S3, as a sharded and as a full checkpoint, and the ways to restore it."""

    def __init__(self, folder: str, url: str, options: argparse.Namespace, *, saves: bool = True) -> None:
        from tiered_checkpoint_io import TieredCheckpointIO, dcp

        self.folder, self.url, self.dcp = folder, url, dcp
        common: dict[str, Any] = {"memory_dir": folder, "endpoint_url": url, "memory_allocation_percentage": 100}
        self.sharded: dict[str, Any] = {"dirpath": f"s3://{BUCKET}/sharded", **common}
        self.io = TieredCheckpointIO(dirpath=f"s3://{BUCKET}/full", on_save_error="raise", **common)
        self.target = state_of(options.mebibytes, options.tensors, torch.zeros)
        if saves:
            self.state = state_of(options.mebibytes, options.tensors, torch.randn)
            dcp.save(self.state, checkpoint_id="step_7", save_to_s3=True, wait=True, **self.sharded)
            self.io.save_checkpoint({"state_dict": self.state, "global_step": 7}, "step=7.ckpt")

    def copy(self) -> None:
        for name, target in self.target.items():
            target.copy_(self.state[name])

    def by_dcp(self) -> None:
        self.dcp.load(self.target, checkpoint_id="step_7", **self.sharded)

    def by_io(self) -> None:
        state = self.io.load_checkpoint("step=7.ckpt")
        for name, target in self.target.items():
            target.copy_(state["state_dict"][name])

    def raw(self) -> Callable[[], None]:
        """The raw client, with its memory."""
        import boto3
        from botocore.config import Config

        config = Config(s3={"addressing_style": "path"}, max_pool_connections=RAW_THREADS)
        client = boto3.client("s3", endpoint_url=self.url, config=config, **StoringServer.credentials)
        key = "full/step=7.ckpt"
        size = int(client.head_object(Bucket=BUCKET, Key=key)["ContentLength"])
        view = memoryview(bytearray(b"1") * size)

        def one(start: int) -> None:
            end = min(start + RAW_RANGE, size)
            answer = client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{end - 1}")
            stream, done = answer["Body"]._raw_stream, start
            while done < end:
                done += stream._fp.readinto(view[done:end])
            stream.release_conn()

        def read() -> None:
            with ThreadPoolExecutor(RAW_THREADS) as pool:
                list(pool.map(one, range(0, size, RAW_RANGE)))

        return read

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Node memory without the checkpoints for a while."""
        saves = list(Path(self.folder).glob("tiered-*/*/saves"))
        for folder in saves:
            folder.rename(folder.with_name("kept"))
            folder.mkdir(0o700)
        try:
            yield
        finally:
            for folder in saves:
                shutil.rmtree(folder)
                folder.with_name("kept").rename(folder)

    def check(self) -> None:
        """Raises if a restore did not restore, and makes the next one start from something else."""
        for name, target in self.target.items():
            if not torch.equal(target, self.state[name]):
                raise RuntimeError(f"{name} was not restored")
            target.zero_()

    def close(self) -> None:
        from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of

        close_shared(settings_of(None, self.sharded))
        self.io.teardown()


def measure_all(bench: Bench, rounds: int, *, memory: bool) -> dict[str, dict[str, list[Any]]]:
    """Seconds, processor seconds, peaks and parts of each way, a list of rounds."""
    reads, maps = (Floor(next(Path(bench.folder).glob(name)), bench.target) for name in ("**/*.distcp", "**/*.ckpt"))
    runs: dict[str, tuple[Callable[[], None], bool]] = {
        COPY: (bench.copy, False),
        READ: (reads.read_and_hash, False),
        f"{DCP} from memory": (bench.by_dcp, False),
        MAP: (maps.map_hash_and_copy, False),
        f"{IO} from memory": (bench.by_io, False),
        RAW: (bench.raw(), True),
        f"{DCP} from S3": (bench.by_dcp, True),
        f"{IO} from S3": (bench.by_io, True),
    }
    found: dict[str, dict[str, list[Any]]] = {
        name: {"seconds": [], "cpu": [], "peak": [], "parts": []} for name in runs
    }
    for number in range(rounds + WARM_ROUNDS):
        for name, (run, is_remote) in runs.items():
            with contextlib.ExitStack() as around:
                if is_remote:
                    around.enter_context(bench.hidden())
                parts = around.enter_context(Parts(OF_DCP_LOAD if DCP in name else OF_LOAD if IO in name else {}))
                with measure(memory=memory) as taken:
                    run()
            if name not in (RAW, READ, MAP):
                bench.check()
            if number >= WARM_ROUNDS:
                found[name]["seconds"].append(taken.seconds)
                found[name]["cpu"].append(taken.cpu_s)
                found[name]["peak"].append(taken.peak_MiB)
                rest = "the copy and the rest" if IO in name else "the rest"
                found[name]["parts"].append({**parts.seconds, rest: taken.seconds - sum(parts.seconds.values())})
    return found


def measure_fresh(bench: Bench, way: str) -> dict[str, float]:
    """The first restore of this process, once what set-up began has had time to end."""
    time.sleep(2.0)
    with measure() as taken:
        (bench.by_dcp if way == DCP else bench.by_io)()
    return {"seconds": taken.seconds, "cpu": taken.cpu_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import logging

    logging.getLogger("tiered_checkpoint_io").addHandler(logging.NullHandler())
    logging.getLogger("tiered_checkpoint_io").setLevel(logging.ERROR)
    if options.child:
        folder, url, way = options.child
        bench = Bench(folder, url, options, saves=False)
        os.write(1, (json.dumps(measure_fresh(bench, way)) + "\n").encode())
        bench.close()
        return
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StoringServer())
        folder = stack.enter_context(shm_folder())
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        bench = Bench(folder, server.url, options)
        stack.callback(bench.close)
        if options.fresh:
            measure_in_fresh_processes(bench, options)
        else:
            show(measure_all(bench, options.rounds, memory=options.memory), options)


def measure_in_fresh_processes(bench: Bench, options: argparse.Namespace) -> None:
    raw = bench.raw()
    for way in (DCP, IO):
        seconds, cpus, ratios = [], [], []
        for _ in range(options.rounds):
            command = [sys.executable, __file__, "--mebibytes", str(options.mebibytes)]
            with shm_folder() as empty:
                command += ["--tensors", str(options.tensors), "--child", empty, bench.url, way]
                done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            figures = json.loads(done.stdout.strip().splitlines()[-1])
            began = time.perf_counter()
            raw()
            ratios.append((time.perf_counter() - began) / figures["seconds"])
            seconds.append(figures["seconds"])
            cpus.append(figures["cpu"])
        middle = [statistics.median(each) for each in (seconds, cpus, ratios)]
        print(
            f"{way}, first restore of a process: {middle[0]:.3f} s, {middle[1]:.3f} CPU s, rate / raw {middle[2]:.2f}"
        )


def show(found: dict[str, dict[str, list[Any]]], options: argparse.Namespace) -> None:
    columns = ["seconds", "fastest", "slowest", "CPU s/GiB", "x memcpy", "rate / raw"]
    columns += ["peak MiB"] if options.memory else []
    rows: dict[str, list[str]] = {}
    ratios: dict[str, tuple[float, float]] = {}
    for name, figures in found.items():
        seconds = figures["seconds"]
        times, rate = ratio(seconds, found[COPY]["seconds"]), ratio(found[RAW]["seconds"], seconds)
        ratios[name] = times, rate
        cpu = statistics.median(figures["cpu"]) * 1024 / options.mebibytes
        row = [*spread_of(seconds), f"{cpu:.2f}", f"{times:.2f}", f"{rate:.2f}"]
        row += [f"{max(figures['peak']):.0f}"] if options.memory else []
        rows[name] = row
    title = f"{options.mebibytes} MiB in {options.tensors} tensors, median of {options.rounds} rounds"
    show_table(title, columns, rows, width=120)
    ways = {
        key: {
            "to_copy": ratios[name][0],
            "to_raw": ratios[name][1],
            "seconds": statistics.median(found[name]["seconds"]),
            "cpu_s_per_GiB": statistics.median(found[name]["cpu"]) * 1024 / options.mebibytes,
            "parts": medians(found[name]["parts"]),
        }
        for key, name in KEYS.items()
    }
    print(json.dumps({"copy_s": statistics.median(found[COPY]["seconds"]), "ways": ways}))
    memory, s3 = ratios[f"{DCP} from memory"][0], ratios[f"{DCP} from S3"][1]
    print(f"restore_memory_ratio_to_memcpy={memory:.2f} restore_s3_rate_to_raw={s3:.2f}")


if __name__ == "__main__":
    main()
