"""Time from a restart after a kill to its first good step: from node memory, from S3, and with Lightning's IO.

A training is killed (SIGKILL) once its checkpoint of step 3 is saved, and for S3 uploaded; the time is from the start
of the process that follows to the end of its first step, which has to be step 4. From S3 means that it starts on
another node: with an empty node memory. Lightning's own checkpoint is a file on tmpfs. All ways by turns; the server is
on this machine.

Prints, last, a line of JSON: for each way seconds, and what they consist of.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parts import medians
from running import compile_ours, shm_folder

MEMORY, S3, LIGHTNING = "from node memory", "from S3", "Lightning's own IO, tmpfs"
PHASES = ("start and imports", "setting up the training", "restore", "first step")
SAVED_STEP, WIDTH = 3, 1024
DEADLINE_S = 120.0


def train(way: str, folder: str, url: str, mebibytes: int, *, is_first: bool) -> None:
    """The training process: says when each phase has ended."""
    import logging
    import warnings

    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    if way != LIGHTNING:
        from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
        from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

    def tell(word: str) -> None:
        os.write(output, f"{word} {time.time()}\n".encode())

    output = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tell("imported")
    torch.set_num_threads(1)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            # Weights and Adam's two moments.
            layers = max(1, mebibytes * (1 << 20) // (3 * 4 * WIDTH * WIDTH))
            self.net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Marks(Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            tell("ready")

        def on_train_start(self, *_: Any) -> None:
            tell("restored")

        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if is_first and trainer.global_step == SAVED_STEP:
                while io is not None and io.checkpointer.session.open().drain.pending():
                    time.sleep(0.05)
                tell("saved")
                time.sleep(DEADLINE_S)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if not is_first:
                tell("stepped" if trainer.global_step == SAVED_STEP + 1 else "lost")
                os._exit(0)

    common: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    io = None
    if way == LIGHTNING:
        saves: Any = ModelCheckpoint(f"{folder}/lightning", every_n_train_steps=SAVED_STEP, save_last=True)
        latest = None if is_first else f"{folder}/lightning/last.ckpt"
    else:
        memory = tempfile.mkdtemp(dir=folder) if way == S3 else f"{folder}/memory"
        os.makedirs(memory, exist_ok=True)
        dirpath = f"s3://bench/{'memory' if way == MEMORY else 's3'}"
        io = TieredCheckpointIO(dirpath, endpoint_url=url, memory_dir=memory, memory_allocation_percentage=100)
        every = {"memory_every_n_train_steps": SAVED_STEP, "s3_every_n_train_steps": SAVED_STEP if way == S3 else 1000}
        saves, latest = TieredModelCheckpoint(**every), "tiered:latest"
        common["plugins"] = [AsyncCheckpointIO(io)]
    trainer = Trainer(max_steps=1000, accelerator="cpu", default_root_dir=folder, callbacks=[Marks(), saves], **common)
    data = torch.utils.data.DataLoader(torch.ones(100, WIDTH), batch_size=1)
    trainer.fit(Model(), data, ckpt_path=latest)


def start(way: str, folder: str, url: str, mebibytes: int, *, is_first: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", __file__, "--train", way, folder, url, "--mebibytes", str(mebibytes)]
    command += ["--first"] if is_first else []
    # What it says on standard error is shown only if it fails.
    with open(f"{folder}/errors", "w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def marks_of(process: subprocess.Popen[str], last: str) -> dict[str, float]:
    """When a training said what, up to a word.

    Raises:
        RuntimeError: It ended before.
    """
    found: dict[str, float] = {}
    assert process.stdout is not None
    for line in process.stdout:
        word, _, when = line.partition(" ")
        found[word] = float(when)
        if word == last:
            return found
    raise RuntimeError(f"the training ended after {list(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256, help="of weights and Adam's moments")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(*options.train, options.mebibytes, is_first=options.first)
        return
    from s3_process import StoringServer

    compile_ours()
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in (MEMORY, S3, LIGHTNING)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shm_folder())
        url = stack.enter_context(StoringServer()).url
        try:
            for way in found:
                with start(way, folder, url, options.mebibytes, is_first=True) as process:
                    marks_of(process, "saved")
                    process.kill()
            for _ in range(options.rounds):
                for way, rounds in found.items():
                    began = time.time()
                    with start(way, folder, url, options.mebibytes, is_first=False) as process:
                        stack.callback(process.kill)
                        marks = marks_of(process, "stepped")
                    times = [began, *(marks[word] for word in ("imported", "ready", "restored", "stepped"))]
                    rounds.append({phase: b - a for phase, a, b in zip(PHASES, times, times[1:], strict=False)})
        except RuntimeError as error:
            lines = Path(f"{folder}/errors").read_text().strip().splitlines() or [""]
            raise SystemExit(f"{way}: {error}: {lines[-1]}") from error
    ways = {
        way: {"seconds": statistics.median(sum(each.values()) for each in rounds), "parts": medians(rounds)}
        for way, rounds in found.items()
    }
    for way, row in ways.items():
        print(f"{way:28}{row['seconds']:.2f} s")
    print(json.dumps({"ways": ways}))


if __name__ == "__main__":
    main()
