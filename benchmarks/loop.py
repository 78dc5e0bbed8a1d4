"""Costs of a drain to a loop of Python beside it: ours, and raw S3 clients in processes of their own.

The loop is plain Python on one thread: what a data loader or a logger does. By turns, a state that has just been saved
is uploaded by the drain, and a file of as many bytes by boto3's parts and by obstore, each in a process that is warm;
meanwhile the loop runs. What it loses is the time beyond that which as many rounds of it take alone, measured before
and after. The server is on this machine, and uses the same cores.

Prints, last, a line of JSON: for each way seconds lost a GiB, and processor seconds a GiB of its process and the
server's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from clients import by_boto3, by_obstore
from measure import GIB, MIB, cpu_of, cpu_of_process
from peers import python_for
from running import shm_folder
from s3_process import StoringServer
from s3_state import BUCKET

RAW = {"boto3": by_boto3, "obstore": lambda *arguments: by_obstore(*arguments, None)}
WARM_ROUNDS = 1
THREADS = 8
#: So long the loop runs alone; and between two looks whether the upload has ended.
ALONE_S, SLICE_S = 0.5, 0.02


def work() -> int:
    """One round of the loop: objects, calls and dictionaries."""
    found: dict[str, int] = {}
    for number in range(200):
        key = f"sample-{number % 50}"
        found[key] = found.get(key, 0) + len(key)
    return sum(found.values())


def rounds_for(seconds: float) -> tuple[int, float]:
    """Returns the number of rounds of the loop, and their time."""
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        work()
        count += 1
    return count, took


def lost_s(begin: Callable[[], None], has_ended: Callable[[], bool]) -> float:
    """Returns the seconds that the loop loses during an upload."""
    alone = [rounds_for(ALONE_S)]
    begin()
    count, took = 0, 0.0
    while not has_ended():
        more, seconds = rounds_for(SLICE_S)
        count, took = count + more, took + seconds
    alone.append(rounds_for(ALONE_S))
    each = sum(seconds for _, seconds in alone) / sum(number for number, _ in alone)
    return took - count * each


class Drain:
    """Ours."""

    def __init__(self, folder: str, url: str, mebibytes: int) -> None:
        from tiered_checkpoint_io import TieredCheckpointIO

        self.state = {"state_dict": {f"w{n}": torch.randn(mebibytes * MIB // 4 // 64) for n in range(64)}}
        self.io = TieredCheckpointIO(
            f"s3://{BUCKET}/ours",
            endpoint_url=url,
            memory_dir=folder,
            memory_allocation_percentage=100,
            on_save_error="raise",
        )
        self.step, self.word = 0, folder

    def prepare(self) -> None:
        for tensor in self.state["state_dict"].values():
            tensor.add_(1.0)
        self.step += 1

    def begin(self) -> None:
        state = {**self.state, "global_step": self.step}
        self.io._save(state, f"step={self.step}.ckpt", None, wait=False)

    def has_ended(self) -> bool:
        return not self.io.checkpointer.session.open().drain.pending()

    def close(self) -> None:
        self.io.teardown()


class Raw:
    """A client in a process of its own."""

    def __init__(self, name: str, file: str, url: str) -> None:
        command = [python_for("obstore"), "-W", "ignore", __file__, "--client", name, file, url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.out, self.word = self.process.stdout, f"{name}\0{file}"
        os.set_blocking(self.out.fileno(), True)
        if not self.out.readline():
            raise RuntimeError(f"{name} could not be started")
        os.set_blocking(self.out.fileno(), False)

    def prepare(self) -> None: ...

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"upload\n")
        self.process.stdin.flush()

    def has_ended(self) -> bool:
        return bool(self.out.read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def client(name: str, path: str, url: str) -> None:
    """The process of a raw client: an upload for each line that it reads."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        server = SimpleNamespace(url=url, certificate="", credentials=StoringServer.credentials)
        upload = RAW[name](server, memoryview(bytes(mapped)), THREADS)
        for _ in itertools.chain(["first"], sys.stdin):
            upload()
            os.write(1, b"done\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client)
        return
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    torch.set_num_threads(1)
    logging.getLogger("tiered_checkpoint_io").addHandler(logging.NullHandler())
    logging.getLogger("tiered_checkpoint_io").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shm_folder())
        os.mkdir(f"{folder}/memory")
        server = stack.enter_context(StoringServer())
        ways: dict[str, Any] = {"ours": Drain(f"{folder}/memory", server.url, options.mebibytes)}
        stack.callback(ways["ours"].close)
        file = f"{folder}/file"
        Path(file).write_bytes(os.urandom(MIB) * options.mebibytes)
        for name in RAW:
            with contextlib.suppress(RuntimeError):
                ways[name] = Raw(name, file, server.url)
                stack.callback(ways[name].close)
        share = options.mebibytes * MIB / GIB
        found: dict[str, dict[str, list[float]]] = {
            name: {"lost_s_per_GiB": [], "cpu_s_per_GiB": [], "server_cpu_s_per_GiB": []} for name in ways
        }
        for number in range(options.rounds + WARM_ROUNDS):
            for name, way in ways.items():
                way.prepare()
                before = cpu_of(way.word), cpu_of_process(server.pid)
                lost = lost_s(way.begin, way.has_ended)
                after = cpu_of(way.word), cpu_of_process(server.pid)
                if number >= WARM_ROUNDS:
                    figures = (lost, *(b - a for a, b in zip(before, after, strict=True)))
                    for values, value in zip(found[name].values(), figures, strict=True):
                        values.append(value / share)
    medians = {name: {key: statistics.median(each) for key, each in row.items()} for name, row in found.items()}
    for name, row in medians.items():
        print(f"{name:10}" + "  ".join(f"{key}={value:.2f}" for key, value in row.items()))
    print(json.dumps({"ways": medians}))


if __name__ == "__main__":
    main()
