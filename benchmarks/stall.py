"""Time for which training waits for a checkpoint: ours beside a plain copy and other savers.

One process, one state of 1 GiB on the CPU, warm: ours and the copy in turn, then the others in turn. Prints the
median of each, how much resident memory ours adds to the training process, and, last,
``stall_ratio_to_memcpy=X``: the median over rounds of ours divided by the copy of the same round. Other states, first
saves and what a save consists of: ``contender.py``; planning alone: ``planning.py``.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import warnings

import torch
from installed import Contender, DCPThread, Lightning, LightningAsync, Ours, TorchSave
from measure import GIB, measure, ratio
from running import shm_folder, show_table, spread_of
from states import all_tensors, make_state

COPY, OURS = "memcpy into warm buffers", "ours, sync memory step"
WAYS: dict[str, type[Contender]] = {
    OURS: Ours,
    "torch.save to tmpfs": TorchSave,
    "Lightning TorchCheckpointIO": Lightning,
    "Lightning AsyncCheckpointIO, blocking part": LightningAsync,
    "DCP async_save, blocking part": DCPThread,
}
WARM_ROUNDS = 2


def compare(folder: str, mebibytes: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """Seconds of each round by name, how many times the copy each takes, and the size of the state in bytes."""
    state = make_state(mebibytes)
    sources = all_tensors(state)
    targets = [torch.empty_like(tensor) for tensor in sources]
    ways = {name: kind(folder, "") for name, kind in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in (COPY, *WAYS)}
    ratios = {COPY: 1.0}
    # Ours beside the copy first, and then the others, which leave memory in disorder.
    for group in ([OURS], [name for name in WAYS if name != OURS]):
        copies: list[float] = []
        for number in range(1, rounds + WARM_ROUNDS + 1):
            with measure() as copied:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
            if number > WARM_ROUNDS:
                copies.append(copied.seconds)
            for name in group:
                with measure() as taken:
                    ways[name].save(state, number)
                ways[name].finish()
                ways[name].clean(number)
                if number > WARM_ROUNDS:
                    times[name].append(taken.seconds)
        ratios |= {name: ratio(times[name], copies) for name in group}
        times[COPY] = times[COPY] or copies
    for way in ways.values():
        way.close()
    return times, ratios, sum(tensor.nbytes for tensor in sources)


def extra_memory(folder: str, mebibytes: int) -> float:
    """Peak of resident anonymous memory over what it was before the first save, in MiB."""
    state, ours = make_state(mebibytes), Ours(folder, "")
    # What is loaded once, and not for a checkpoint, is not a checkpoint's cost.
    ours.save({"global_step": 1, "w": torch.zeros(10)}, 0)
    with measure(memory=True) as taken:
        for number in range(1, 6):
            ours.save(state, number)
    ours.close()
    return taken.peak_MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("tiered_checkpoint_io").addHandler(logging.NullHandler())
    with shm_folder() as folder:
        if arguments.memory:
            print(f"{extra_memory(folder, arguments.mebibytes):.1f}")
            return
        times, ratios, size = compare(folder, arguments.mebibytes, arguments.rounds)
    rows = {}
    for name, seconds in times.items():
        rate = size / GIB / statistics.median(seconds)
        rows[name] = [*spread_of(seconds), f"{rate:.1f}", f"{ratios[name]:.2f}"]
    title = f"How long training waits: {size / GIB:.2f} GiB, median of {arguments.rounds} rounds"
    show_table(title, ("seconds", "fastest", "slowest", "GiB/s", "x memcpy"), rows)
    # In a process of its own, whose memory nothing else has used.
    command = [sys.executable, __file__, "--memory", "--mebibytes", str(arguments.mebibytes)]
    extra = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1]
    print(f"extra_resident_MiB={extra}")
    print(f"stall_ratio_to_memcpy={ratios[OURS]:.2f}")


if __name__ == "__main__":
    main()
