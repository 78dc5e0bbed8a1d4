"""Costs of planning a file, and of ``torch.save``: microseconds a tensor.

As a trainer dumps weights and Adam's moments, with new keys and tensors at each step. A plan holds all of the file but
the tensors' bytes, so the pickle and the records of the zip file too. By processor time, because one thread does it
all. ``torch.save`` writes to memory, and the tensors are small, so that what it copies does not count.

Prints, last, a line of JSON: ``plan_us``, ``first_us``, ``torch_save_us``.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from states import all_tensors, at_step, make_many

from tiered_checkpoint_io.formats.torch_file import plan


def processor_s(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Sixteen bytes each. A third of the count has two moments and a step.
    state = make_many(max(1, options.tensors * 16 >> 20), options.tensors)
    count = len(all_tensors(state))
    unit = 1e6 / count
    plans: list[float] = []
    by_torch: list[float] = []
    for step in range(1, options.rounds + 2):
        now = at_step(state, step)
        plans.append(processor_s(lambda now=now: plan(now).segments) * unit)
        by_torch.append(processor_s(lambda now=now: torch.save(now, io.BytesIO())) * unit)
    figures: dict[str, Any] = {
        "plan_us": statistics.median(plans[1:]),
        "first_us": plans[0],
        "torch_save_us": statistics.median(by_torch),
    }
    print(f"{count:,} tensors, us a tensor: " + "  ".join(f"{name}={value:.2f}" for name, value in figures.items()))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
