"""Costs of checkpoints of a state on a GPU, beside a plain copy and other savers; some ten minutes with one GPU.

One process, one state on the device. Saves go to node memory: ours first, second, third and later, torch.save, and the
blocking part of Lightning's AsyncCheckpointIO and of DCP's async_save. Restores end in tensors on the device, and each
is compared with the state. All ways are taken in turn in each round; a ratio is to a copy of the same bytes between the
device and pinned memory in the same round. After that, a Lightning fit on the device: our share of the call of an
overlapped save, and steps beside a capture and a drain (``overlap.py``).

Prints a table, a line of JSON, and, last, ``gpu_stall_ratio_to_pinned_copy=X gpu_restore_ratio_to_pinned_copy=Y``.
``--device cpu`` runs the same without a GPU, to look whether the script works: its figures say nothing of one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import GIB, measure, ratio
from running import shm_folder, show_table
from states import all_tensors, make_state

HERE = Path(__file__).resolve().parent
WARM_ROUNDS = 2
LIMIT_S = 300.0
TO_HOST, TO_DEVICE = "copy into pinned memory", "copy from pinned memory"
OURS, OURS_DCP, OURS_IO = "ours, memory step", "ours, dcp.load", "ours, load_checkpoint and copy"
OURS_MAPPED = "ours, dcp.load without pinned buffers"


class Bench:
    """A state on a device, its tensors in one dictionary, and the ways to save and restore it."""

    def __init__(self, folder: str, device: torch.device, mebibytes: int) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        from tiered_checkpoint_io import TieredCheckpointIO

        self.folder, self.device = folder, device
        sources = all_tensors(make_state(mebibytes))
        self.state = {f"t{index}": tensor.to(device) for index, tensor in enumerate(sources)}
        self.target = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        is_gpu = device.type == "cuda"
        self.host = {name: torch.zeros_like(tensor, pin_memory=is_gpu) for name, tensor in self._on_host().items()}
        self.common: dict[str, Any] = {"memory_dir": folder, "memory_allocation_percentage": 100}
        self.io, self.another = (
            TieredCheckpointIO(dirpath=f"{folder}/{name}", on_save_error="raise", **self.common)
            for name in ("durable", "another")
        )
        self.plain, self.asynchronous = TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())
        self.saved = 0
        self.pending: list[Any] = []

    def _on_host(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in self.state.items()}

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ------------------------------------------------------------------------------------ saves
    def to_host(self) -> None:
        for name, tensor in self.state.items():
            self.host[name].copy_(tensor, non_blocking=True)

    def ours(self, io: Any = None) -> None:
        self.saved += 1
        (io or self.io).save_checkpoint(self.state, f"step={self.saved}.ckpt", storage_options={"tiers": ["memory"]})

    def torch_save(self) -> None:
        torch.save(self.state, f"{self.folder}/plain.ckpt")

    def lightning(self) -> None:
        self.asynchronous.save_checkpoint(self.state, f"{self.folder}/async.ckpt")

    def lightning_ends(self) -> None:
        self.asynchronous.teardown()

    def dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.pending.append(dcp.async_save(self.state, checkpoint_id=f"{self.folder}/dcp"))

    def dcp_ends(self) -> None:
        self.pending.pop().result()

    # --------------------------------------------------------------------------------- restores
    def to_device(self) -> None:
        for name, tensor in self.target.items():
            tensor.copy_(self.host[name], non_blocking=True)

    def _copied(self, state: Any) -> None:
        for name, tensor in self.target.items():
            tensor.copy_(state[name])

    def torch_load(self) -> None:
        self._copied(torch.load(f"{self.folder}/plain.ckpt", map_location=self.device, weights_only=True))

    def torch_load_mapped(self) -> None:
        self._copied(torch.load(f"{self.folder}/plain.ckpt", map_location="cpu", mmap=True, weights_only=True))

    def by_io(self) -> None:
        self._copied(self.io.load_checkpoint(f"step={self.saved}.ckpt"))

    def save_sharded(self) -> dict[str, Any]:
        """Saves what :meth:`by_dcp` loads; its options."""
        from tiered_checkpoint_io import dcp

        options = {"dirpath": f"{self.folder}/sharded", **self.common}
        dcp.save(self.state, checkpoint_id="step_7", save_to_s3=True, wait=True, **options)
        return options

    def by_dcp(self, options: dict[str, Any]) -> None:
        from tiered_checkpoint_io import dcp

        dcp.load(self.target, checkpoint_id="step_7", **options)

    def by_dcp_mapped(self, options: dict[str, Any]) -> None:
        """Loads as :meth:`by_dcp`, from the mapped file, as for tensors that are converted for the device."""
        with mock.patch("tiered_checkpoint_io.adapters.dcp_reader.is_on_device", return_value=False):
            self.by_dcp(options)

    def check(self, way: str) -> None:
        """Raises if the target is not the state, and clears it for the next."""
        for name, tensor in self.target.items():
            if not torch.equal(tensor, self.state[name]):
                raise RuntimeError(f"{way}: {name} was not restored")
            tensor.zero_()
        self.wait()


Ways = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def rounds_of(bench: Bench, ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, the warm ones left out; what ends a way is not timed.

    The first is the limit, which is not to pay for what the last way of the round before has left: it is done twice.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    limit = next(iter(ways))
    for number in range(rounds + WARM_ROUNDS):
        for name, (call, end) in ways.items():
            if name == limit:
                call()
            bench.wait()
            with measure() as taken:
                call()
                bench.wait()
            end()
            if number >= WARM_ROUNDS:
                times[name].append(taken.seconds)
    return times


def fit(device: torch.device) -> dict[str, Any]:
    """The figures of ``overlap.py`` on the device, or why it failed."""
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    command = [sys.executable, "-W", "ignore", str(HERE / "overlap.py"), "--accelerator", accelerator]
    # A step that takes about as long as on the CPU: a GPU is so much faster.
    command += ["--batch", "16384"] if device.type == "cuda" else ["--width", "64", "--turns", "6"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return {"error": str(error)}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(kind: str, times: dict[str, list[float]], size: float) -> dict[str, dict[str, float]]:
    """Prints a table; the ratios to its first row, and seconds."""
    limit = next(iter(times))
    found, rows = {}, {}
    for name, seconds in times.items():
        middle, to_limit = statistics.median(seconds), ratio(seconds, times[limit])
        found[name] = {"seconds": middle, "to_copy": to_limit}
        rows[name] = (f"{middle:.4f}", f"{size / middle:.1f}", f"{to_limit:.2f}")
    title = f"{kind}: {size:.2f} GiB, median of {len(times[limit])} rounds"
    show_table(title, ("seconds", "GiB/s", "x " + limit), rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-fit", action="store_true", help="leave the Lightning fit out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --device cpu only tries the script")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shm_folder())
        bench = Bench(folder, device, options.mebibytes)
        stack.callback(bench.io.teardown)
        size = sum(tensor.nbytes for tensor in bench.state.values()) / GIB

        def nothing() -> None:
            return None

        bench.to_host()
        prepared = first_saves(bench, bench.another, prepared=True)
        bench.another.teardown()
        first = first_saves(bench, bench.io, prepared=False)
        saves = rounds_of(
            bench,
            {
                TO_HOST: (bench.to_host, nothing),
                OURS: (bench.ours, nothing),
                "torch.save to tmpfs": (bench.torch_save, nothing),
                "Lightning AsyncCheckpointIO, blocking part": (bench.lightning, bench.lightning_ends),
                "DCP async_save, blocking part": (bench.dcp, bench.dcp_ends),
            },
            options.rounds,
        )
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
        print(f"{where}; torch {torch.__version__}")
        for what, seconds in (("prepared as in a fit", prepared), ("one right after another", first)):
            print(f"our first three saves, {what}, s: " + ", ".join(f"{each:.3f}" for each in seconds))
        saved = show("Saves", saves, size)
        sharded = bench.save_sharded()
        restores: dict[str, Callable[[], Any]] = {
            TO_DEVICE: bench.to_device,
            OURS_DCP: lambda: bench.by_dcp(sharded),
            OURS_MAPPED: lambda: bench.by_dcp_mapped(sharded),
            OURS_IO: bench.by_io,
            "torch.load to the device, and copy": bench.torch_load,
            "torch.load of the mapped file, and copy": bench.torch_load_mapped,
        }
        ways: Ways = {name: (call, lambda name=name: bench.check(name)) for name, call in restores.items()}  # type: ignore[misc]
        loads = rounds_of(bench, ways, options.rounds)
        found = {
            "device": where,
            "first_saves_s": first,
            "first_saves_prepared_s": prepared,
            "saves": saved,
            "restores": show("Restores", loads, size),
            "fit": {} if options.no_fit else fit(device),
        }
        print(json.dumps(found))
        stall, restore = found["saves"][OURS]["to_copy"], found["restores"][OURS_DCP]["to_copy"]
        print(f"gpu_stall_ratio_to_pinned_copy={stall:.2f} gpu_restore_ratio_to_pinned_copy={restore:.2f}")


def first_saves(bench: Bench, io: Any, *, prepared: bool) -> list[float]:
    """Seconds of the first three saves of an IO, prepared as a Lightning fit has it, or one right after another."""
    took, capturer = [], io.checkpointer.session.open().capturer
    for _ in range(3):
        if prepared:
            io.checkpointer.prepare(sum(tensor.nbytes for tensor in bench.state.values()))
            # A training does many steps meanwhile.
            capturer._preparing.join(LIMIT_S)
        bench.wait()
        with measure() as taken:
            bench.ours(io)
            bench.wait()
        took.append(taken.seconds)
    return took


if __name__ == "__main__":
    main()
