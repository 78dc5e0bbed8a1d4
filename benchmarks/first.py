"""The first three saves of a process beside a copy of the state into memory that was never touched.

By turns, each time in a new process: in a Lightning fit with a save every eight steps, where room is made while the
first batches run; and by saves one right after another, without a Trainer, for which nothing was made. All are eager,
into node memory. A save is the time that its caller waits; the copy is made once, before the first of them.

Prints, last, a line of JSON: for each way the medians over the rounds of the three saves divided by the copy, and of
what the slowest save of a round consists of.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from measure import MIB, measure
from overlap import Layers
from parts import OF_SAVE, Parts, medians
from running import shm_folder, show_table

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

FIT, ALONE = WAYS = ("in a fit", "alone")
SAVES, EVERY, WIDTH = 3, 8, 1024
LIMIT_S = 60.0


class Taking:
    """Times of each call of a plugin's ``save_checkpoint``, beside a copy of the first one's tensors."""

    def __init__(self, io: TieredCheckpointIO) -> None:
        self.save = io.save_checkpoint
        self.copy_s = 0.0
        self.seconds: list[float] = []
        self.parts: list[dict[str, float]] = []
        self.copies: list[torch.Tensor] = []
        io.save_checkpoint = self  # type: ignore[method-assign]

    def __call__(self, state: Any, *arguments: Any, **options: Any) -> None:
        if not self.copies:
            tensors: list[torch.Tensor] = []
            torch.utils._pytree.tree_map_only(torch.Tensor, tensors.append, state)
            with measure() as copied:
                self.copies = [tensor.clone() for tensor in tensors]
            self.copy_s = copied.seconds
        with Parts(OF_SAVE) as parts, measure() as taken:
            self.save(state, *arguments, **options)
        self.seconds.append(taken.seconds)
        self.parts.append({**parts.seconds, "the rest": taken.seconds - sum(parts.seconds.values())})

    @property
    def figures(self) -> dict[str, Any]:
        # A training saves once more at its end.
        first = self.seconds[:SAVES]
        slowest = self.parts[first.index(max(first))]
        ratios = [seconds / self.copy_s for seconds in first]
        return {"saves": ratios, "parts": {part: each / self.copy_s for part, each in slowest.items()}}


def run(way: str, folder: str, mebibytes: int) -> dict[str, Any]:
    """The saves of this process."""
    torch.set_num_threads(1)
    io = TieredCheckpointIO(
        f"{folder}/durable",
        memory_dir=folder,
        memory_allocation_percentage=100,
        staging="eager",
        on_save_error="raise",
    )
    taking = Taking(io)
    if way == ALONE:
        state = {f"w{index}": torch.randn(mebibytes * MIB // 4 // 64) for index in range(64)}
        for number in range(1, SAVES + 1):
            saved = {"state_dict": state, "global_step": number}
            io.save_checkpoint(saved, f"step={number}.ckpt", storage_options={"tiers": ["memory"]})
        io.teardown()
        return taking.figures
    saves: list[Callback] = [TieredModelCheckpoint(memory_every_n_train_steps=EVERY, s3_every_n_train_steps=10**6)]
    trainer = Trainer(
        max_steps=SAVES * EVERY,
        accelerator="cpu",
        plugins=[io],
        callbacks=saves,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Weights, and AdamW's two moments of each.
    layers = max(1, mebibytes * MIB // (3 * 4 * WIDTH * WIDTH))
    trainer.fit(Layers(WIDTH, layers), torch.utils.data.DataLoader(torch.ones(SAVES * EVERY, WIDTH)))
    return taking.figures


def child(way: str, mebibytes: int) -> dict[str, Any]:
    with shm_folder() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--run", way, folder, "--mebibytes", str(mebibytes)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True).stdout
    figures: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        out = os.dup(1)
        os.dup2(2, 1)
        os.write(out, (json.dumps(run(*options.run, options.mebibytes)) + "\n").encode())
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, rounds in found.items():
            rounds.append(child(way, options.mebibytes))
    ways = {
        way: {
            "saves": [statistics.median(each) for each in zip(*[one["saves"] for one in rounds], strict=True)],
            "parts": medians([one["parts"] for one in rounds]),
        }
        for way, rounds in found.items()
    }
    show_table(
        f"the first saves of {options.mebibytes} MiB / a copy into fresh memory",
        ("first", "second", "third"),
        {way: [f"{each:.2f}" for each in row["saves"]] for way, row in ways.items()},
    )
    print(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
