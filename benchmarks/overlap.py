"""Costs of an overlapped capture to training, beside none and an eager one: a Lightning fit on the CPU.

One fit, one torch thread by default, so that a core is free; AdamW on linear layers. By turns, steps without a save,
with an eager one before them, with an overlapped one, with an eager one that the drain then uploads, and with an eager
one after which another process copies as many bytes from memory to memory, or uploads them by obstore (by boto3 if
that is not installed). The server is on this machine, where a real one is not: so it has the lowest priority, as has
the process that copies. Prints, as medians over the run: forward and backward divided by the copy of the state; our
share of the save's call (all that the IO does, or of sharded ones the strategy), by the clock and by the thread's
processor time; how long the optimizer waited; and each step after a save divided by the median of the eight around it
without one, which a machine's slow drift hits alike, with the standard error of that. Last comes a line of JSON: of an
overlapped save ``share_ms`` and its parts; and by mode, if it was asked for, by how much the slower one of the two
steps after the save is longer, ``inflation``, and the standard error of that, ``inflation_error``.

The steps after a capture count too: their bytes are hashed there. ``--threads`` fills more cores. ``--sharded``: by
TieredModelParallelStrategy, with FSDP2 and one rank. ``--accelerator gpu``: on a GPU; each step is waited for. If
steps vary by 5 %, ``--modes overlapped --turns 120`` tells 2 % from noise.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from loop import Raw
from parts import OF_SAVE, Parts, medians
from running import shm_folder
from s3_process import StoringServer
from s3_state import BUCKET
from torch.distributed.fsdp import fully_shard

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.engine.drain.process import give_way
from tiered_checkpoint_io.engine.save.overlap import Overlap, parts_here
from tiered_checkpoint_io.strategies import TieredModelParallelStrategy

NONE, EAGER, OVERLAPPED, DRAINED = "none", "eager", "overlapped", "drained"
COPIED, UPLOADED = "copied", "uploaded"
MODES = (NONE, EAGER, OVERLAPPED, DRAINED, COPIED, UPLOADED)
_ENGINE = "tiered_checkpoint_io.engine"
_BEGIN = [f"{_ENGINE}.save.overlap:Overlap.{name}" for name in ("begin", "begin_state")]
_TO_BACKGROUND = [f"{_ENGINE}.staging.background:BackgroundTask.run"]
OF_CALL = {**OF_SAVE, "finding what may be copied later": _BEGIN, "waking up the background task": _TO_BACKGROUND}
#: A save every so many steps: the second step after it may still be beside its hashing.
PERIOD = 4
WARM_UP = 8


class Layers(LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])

    def configure_model(self) -> None:
        # By Lightning's ModelParallelStrategy alone.
        if self.device_mesh is not None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _: int) -> Any:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
    """A few batches, again and again: for a GPU, all that a fit takes would not fit into memory."""

    def __init__(self, batch: int, width: int) -> None:
        self.batches = [torch.randn(batch, width) for _ in range(4)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.cycle(self.batches)


class Measuring(Callback):
    """The last callback: saves by turns, and takes the times."""

    def __init__(self, io: TieredCheckpointIO, others: dict[str, Any], modes: list[str], saves: Any) -> None:
        self.io, self.others, self.modes, self.mode = io, others, modes, NONE
        self.began = self.fed = 0.0
        #: In their order: each one's mode, and its steps, seconds.
        self.turns: list[tuple[str, list[float]]] = []
        self.calls: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.processor: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.parts: list[dict[str, float]] = []
        #: Entered for the whole of the fit: a class that has just been changed is slow, as all is looked up anew.
        self.ours, self.of_call = Times(saves, "save_checkpoint"), Parts(OF_CALL)
        self.compute: list[float] = []
        self.overlap: Any = None

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_after_backward(self, *_: Any) -> None:
        wait_for_gpu()
        self.fed = time.perf_counter() - self.began

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:  # noqa: ARG002
        wait_for_gpu()
        took, turn = time.perf_counter() - self.began, index // PERIOD
        if turn > WARM_UP:
            if index % PERIOD == 0:
                self.turns.append((self.mode, []))
            self.turns[-1][1].append(took)
            if self.mode == NONE:
                self.compute.append(self.fed)
        if index % PERIOD == PERIOD - 1:
            turns = [mode for each in self.modes for mode in (NONE, each)]
            self.mode = turns[(turn + 1) % len(turns)]
            if self.mode != NONE:
                self.save(trainer, counts=turn > WARM_UP)
            if self.mode in self.others:
                self.others[self.mode].begin()

    def save(self, trainer: Trainer, *, counts: bool) -> None:
        sharded = isinstance(trainer.strategy, TieredModelParallelStrategy)
        saver: Any = trainer.strategy.may_overlap() if sharded else self.io.checkpointer.saver
        self.overlap = self.overlap or saver.overlap
        saver.overlap = self.overlap if self.mode == OVERLAPPED else None
        tiers = ["memory", "durable"] if self.mode == DRAINED else ["memory"]
        ours, parts = self.ours, self.of_call
        ours.restart()
        parts.restart()
        trainer.save_checkpoint(f"{self.mode}.ckpt", storage_options={"tiers": tiers})
        if counts:
            self.processor[self.mode].append(ours.worked)
            self.calls[self.mode].append(ours.total)
            if self.mode == OVERLAPPED:
                self.parts.append({**parts.seconds, "the rest": ours.total - sum(parts.seconds.values())})


class Copier:
    """A process of the lowest priority that copies so many bytes whenever it is asked."""

    def __init__(self, nbytes: int) -> None:
        command = [sys.executable, __file__, "--copier", str(nbytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"copy\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.communicate(timeout=30)

    @staticmethod
    def serve(nbytes: int) -> None:
        give_way(19)
        torch.set_num_threads(1)
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
        print(flush=True)
        for _ in sys.stdin:
            target.copy_(source)


def raw_client(file: str, url: str) -> Raw:
    """A raw S3 client in a process of its own, warm; of ordinary priority, as who uses one has it."""
    try:
        return Raw("obstore", file, url)
    except RuntimeError:
        return Raw("boto3", file, url)


class Times:
    """Durations of a method's calls during the block."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name, self.original = kind, name, getattr(kind, name)
        self.restart()

    def restart(self) -> None:
        self.total = self.worked = 0.0

    def __enter__(self) -> None:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin, worked = time.perf_counter(), time.thread_time()
            try:
                return self.original(*arguments, **options)
            finally:
                self.total += time.perf_counter() - begin
                self.worked += time.thread_time() - worked

        setattr(self.kind, self.name, timed)

    def __exit__(self, *_: object) -> None:
        setattr(self.kind, self.name, self.original)


def wait_for_gpu() -> None:
    """Until a GPU that is in use has done what was asked of it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def copy_s(tensors: list[torch.Tensor]) -> float:
    """The copy of the same bytes into warm memory by one thread, seconds: the median of five."""
    is_gpu = any(each.is_cuda for each in tensors)
    targets = [torch.zeros_like(each, device="cpu", pin_memory=is_gpu) for each in tensors]
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        for target, source in zip(targets, tensors, strict=True):
            target.copy_(source)
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1448)
    parser.add_argument("--layers", type=int, default=8, help="of eight tensors each, with AdamW's")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--turns", type=int, default=160, help="of four steps each, beyond the first nine")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--copier", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.copier:
        Copier.serve(arguments.copier)
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(arguments.threads)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shm_folder())
        os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
        url = stack.enter_context(StoringServer(elsewhere=True)).url
        io = TieredCheckpointIO(
            f"s3://{BUCKET}/run",
            endpoint_url=url,
            memory_dir=folder,
            memory_allocation_percentage=100,
            staging="overlapped",
            on_save_error="raise",
        )
        # Weights, and two moments of each.
        nbytes = arguments.layers * arguments.width**2 * 12
        with open(f"{folder}/uploaded", "wb") as file:
            file.write(os.urandom(1 << 20) * (nbytes >> 20))
        made = {COPIED: lambda: Copier(nbytes), UPLOADED: lambda: raw_client(f"{folder}/uploaded", url)}
        others = {
            mode: stack.enter_context(contextlib.closing(make()))
            for mode, make in made.items()
            if mode in arguments.modes
        }
        saves = TieredModelParallelStrategy if arguments.sharded else AsyncCheckpointIO
        measuring, model = Measuring(io, others, arguments.modes, saves), Layers(arguments.width, arguments.layers)
        steps = (WARM_UP + 1 + arguments.turns) * PERIOD
        trainer = Trainer(
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator=arguments.accelerator,
            devices=1,
            strategy=TieredModelParallelStrategy(1, 1) if arguments.sharded else "auto",
            plugins=[AsyncCheckpointIO(io)],
            callbacks=[measuring],
            default_root_dir=folder,
        )
        waited = Times(Overlap, "wait")
        with waited, measuring.ours, measuring.of_call:
            trainer.fit(model, torch.utils.data.DataLoader(Batches(arguments.batch, arguments.width), batch_size=None))
        state = [each for group in trainer.optimizers[0].state.values() for each in group.values()]
        show(measuring, copy_s(list(parts_here([*model.parameters(), *state]))), waited.total / steps)


def beside(turns: list[tuple[str, list[float]]], mode: str) -> list[list[float]]:
    """Returns steps by their place after a save, as multiples of the median of steps around them without a save."""
    found: list[list[float]] = [[] for _ in range(PERIOD)]
    for number, (each, steps) in enumerate(turns):
        if each == mode:
            around = [step for other, some in turns[max(0, number - 1) : number + 2] if other == NONE for step in some]
            for place, step in enumerate(steps):
                found[place].append(step / statistics.median(around))
    return found


def error(values: list[float]) -> float:
    """The standard error of the median of values that spread as a normal distribution does, but for outliers."""
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median([abs(each - middle) for each in values])
    return float(1.2533 * spread / len(values) ** 0.5)


def show(measured: Measuring, copy: float, waited: float) -> None:
    middle = statistics.median
    base = middle([each for mode, steps in measured.turns if mode == NONE for each in steps])
    print(f"load {os.getloadavg()[0]:.1f}; step {base * 1e3:.1f} ms, copy of the state {copy * 1e3:.1f} ms")
    print(f"forward_backward_to_copy={middle(measured.compute) / copy:.2f}")
    inflation, errors = {}, {}
    for mode in measured.modes:
        ratios = beside(measured.turns, mode)
        later = [middle(each) for each in ratios]
        share, worked = middle(measured.calls[mode]) * 1e3, middle(measured.processor[mode]) * 1e3
        print(f"{mode}: our share of the call {share:.2f} ms, of it on the processor {worked:.2f} ms")
        shown = ", ".join(f"{each:.3f} ± {error(some):.3f}" for each, some in zip(later, ratios, strict=True))
        print(f"{mode}: steps after it / steps without: {shown}")
        slower = later.index(max(later[:2]))
        inflation[mode], errors[mode] = later[slower] - 1, error(ratios[slower])
        cost = middle(measured.calls[mode]) + (sum(later) - PERIOD) * base
        print(f"{mode}_cost_to_copy={cost / copy:.2f}")
    print(f"optimizer_waited_ms_a_step={waited * 1e3:.3f}")
    figures = {
        "share_ms": middle(measured.calls[OVERLAPPED]) * 1e3 if measured.calls[OVERLAPPED] else None,
        "parts_ms": {part: seconds * 1e3 for part, seconds in medians(measured.parts).items()},
        "inflation": inflation,
        "inflation_error": errors,
        "step_ms": base * 1e3,
        "waited_ms": waited * 1e3,
        "cores": os.cpu_count(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
