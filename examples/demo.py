"""Train, get killed, resume: a small GPT through node memory and a real S3 server.

The text is the source code of the running Python's standard library. A first run is never
interrupted. A second one is killed twice with SIGKILL, the second time with its node memory wiped,
and must end with the very same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS = 60
MEMORY_EVERY = 5
S3_EVERY = 20
#: Killed right after these steps: the first resumes from memory, the second from S3.
KILLS = (33, 48)
LIFE_TIMEOUT_S = 240.0
DRAIN_TIMEOUT_S = 60.0


# ----------------------------------------------------------------------------------- the trainer
def text(length: int = 1 << 20) -> bytes:
    """The first ``length`` bytes of the standard library's sources."""
    data = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= length:
            break
    return data[:length]


def train(dirpath: str, memory_dir: str, report: str) -> None:
    """One life of the trainer; writes what it sees to ``report``, a line of JSON at a time."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from torch import nn

    from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
    from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

    context, batch, width = 64, 8, 192

    class GPT(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(256, width)
            self.place = nn.Parameter(torch.randn(context, width) / 50)
            layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(width, 256)
            self.register_buffer("text", torch.frombuffer(bytearray(text()), dtype=torch.uint8), persistent=False)
            mask = nn.Transformer.generate_square_subsequent_mask(context)
            self.register_buffer("mask", mask, persistent=False)

        def training_step(self, *_: Any) -> torch.Tensor:
            # What a step sees and drops depends on the step alone: a resumed run sees the same.
            torch.manual_seed(1_000_003 * self.global_step + 17)
            starts = torch.randint(0, len(self.text) - context - 1, (batch,))
            tokens = torch.stack([self.text[start : start + context + 1] for start in starts]).long()
            hidden = self.blocks(self.token(tokens[:, :-1]) + self.place, mask=self.mask, is_causal=True)
            return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
            return torch.utils.data.DataLoader(torch.zeros(STEPS * 2, 1), batch_size=1)

    def note(**facts: Any) -> None:
        with open(report, "a") as file:
            file.write(json.dumps(facts) + "\n")

    io = TieredCheckpointIO(dirpath=dirpath, namespace="demo", memory_dir=memory_dir)

    class Notes(Callback):
        def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:  # noqa: ARG002
            restored = io.checkpointer.restored
            if restored is None:
                note(start="scratch", step=0, seconds=0.0)
            else:
                note(start=restored.tier, step=restored.step, seconds=restored.seconds)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            save = io.checkpointer.progress().last_save
            if save is not None and save.step == trainer.global_step:
                note(save=save.step, stall=save.stall_s, size=save.size, tiers=sorted(save.tiers))
            note(at=trainer.global_step)

    seed_everything(1, verbose=False)
    # One thread: threads that spin for each other crawl on a machine that has other work.
    torch.set_num_threads(1)
    callback = TieredModelCheckpoint(
        memory_every_n_train_steps=MEMORY_EVERY, s3_every_n_train_steps=S3_EVERY, save_top_k=1, save_last=True
    )
    trainer = Trainer(
        plugins=[AsyncCheckpointIO(io)],
        # Behind the checkpoint callback, so that it sees each save.
        callbacks=[callback, _last(Notes)],
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=memory_dir,
    )
    model = GPT()
    trainer.fit(model, ckpt_path="tiered:latest")
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    note(end=trainer.global_step, digest=digest.hexdigest())


def _last(callback: type[Any]) -> Any:
    """An instance that Lightning runs behind all checkpoint callbacks (it moves these to the end)."""
    from lightning.pytorch.callbacks import Checkpoint

    return type(callback.__name__, (callback, Checkpoint), {"state_key": callback.__name__})()


# ------------------------------------------------------------------------------------ the stage
def live(dirpath: str, memory_dir: str, folder: Path, kill_after: int | None, env: dict[str, str]) -> dict[str, Any]:
    """Runs one life of the trainer, to its end or until it is killed."""
    report = folder / f"life-{secrets.token_hex(4)}.jsonl"
    report.touch()
    began = time.monotonic()
    with open(folder / "trainer.log", "ab") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--train", dirpath, memory_dir, str(report)],
            env=env,
            stdout=log,
            stderr=log,
        )
    try:
        while trainer.poll() is None:
            at = max((line["at"] for line in read(report) if "at" in line), default=0)
            if kill_after is not None and at >= kill_after:
                os.kill(trainer.pid, signal.SIGKILL)
                trainer.wait()
                break
            if time.monotonic() - began > LIFE_TIMEOUT_S:
                raise RuntimeError("the trainer takes too long")
            time.sleep(0.02)
    finally:
        if trainer.poll() is None:
            trainer.kill()
            trainer.wait()
    lines = read(report)
    if kill_after is None and not any("digest" in line for line in lines):
        raise RuntimeError("the trainer failed:\n" + (folder / "trainer.log").read_text()[-3000:])
    start = next(line for line in lines if "start" in line)
    return {
        **start,
        "died": max(line["at"] for line in lines if "at" in line) if kill_after is not None else None,
        "saves": [line for line in lines if "save" in line],
        "digest": next((line["digest"] for line in lines if "digest" in line), None),
        "life": time.monotonic() - began,
    }


def read(report: Path) -> list[dict[str, Any]]:
    """The whole lines of a report that may be being written."""
    return [json.loads(line) for line in report.read_text().splitlines(keepends=True) if line.endswith("\n")]


def drained(memory_dir: str) -> dict[str, int]:
    """Waits until the drain, which outlives its trainer, has left; what it counted."""
    from tiered_checkpoint_io.engine.drain import LOCK_FILE, try_lock
    from tiered_checkpoint_io.engine.queue import Queue
    from tiered_checkpoint_io.storage.memory import namespace_root

    root = namespace_root(memory_dir, "demo")
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while (lock := try_lock(root / LOCK_FILE)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("the drain does not leave")
        time.sleep(0.05)
    os.close(lock)
    return Queue(root).progress().counters


def show(rows: list[tuple[str, dict[str, Any], dict[str, int]]]) -> None:
    """The table of all lives."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{STEPS} steps; memory every {MEMORY_EVERY}, S3 every {S3_EVERY}")
    for column in ("life", "began from", "at step", "restore", "ended", "stalls of its saves, ms", "to S3", "requests"):
        table.add_column(column)
    for name, life, counters in rows:
        stalls = " ".join(f"{line['stall'] * 1000:.0f}" for line in life["saves"])
        requests = sum(count for key, count in counters.items() if key.startswith("requests."))
        table.add_row(
            name,
            life["start"],
            str(life["step"]),
            f"{life['seconds']:.2f} s" if life["step"] else "-",
            f"killed after {life['died']}" if life["died"] else "finished",
            stalls,
            f"{counters.get('bytes.up', 0) / (1 << 20):.0f} MiB",
            str(requests),
        )
    Console(width=130 if not sys.stdout.isatty() else None).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", help="your own s3://bucket/prefix, in place of a local server")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
        return 0

    from tiered_checkpoint_io.testing.servers import RcloneServer

    with contextlib.ExitStack() as stack:
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        memory_dir = tempfile.mkdtemp(prefix="tiered-demo-", dir=shm)
        stack.callback(shutil.rmtree, memory_dir, ignore_errors=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-demo-")))
        env = dict(os.environ)
        if arguments.s3:
            base = f"{arguments.s3.rstrip('/')}/demo-{secrets.token_hex(4)}"
        else:
            server = stack.enter_context(RcloneServer())
            env.update(server.env())
            base = server.make_bucket("demo")
        print(f"checkpoints: {memory_dir} and {base}", flush=True)

        rows = []
        for name, run, kill_after, wiped in (
            ("never interrupted", "whole", None, True),
            ("1st", "run", KILLS[0], False),
            ("2nd", "run", KILLS[1], True),
            ("3rd", "run", None, True),
        ):
            life = live(f"{base}/{run}", memory_dir, folder, kill_after, env)
            rows.append((name, life, drained(memory_dir)))
            print(f"{name}: {life['life']:.0f} s", flush=True)
            if wiped:
                shutil.rmtree(memory_dir)
                os.mkdir(memory_dir, 0o700)
        show(rows)
        ours, reference = rows[-1][1], rows[0][1]
        came = [life["start"] for _, life, _ in rows[1:]]
        print(f"weights, never interrupted: {reference['digest']}")
        print(f"weights, killed twice:      {ours['digest']}")
        if came != ["scratch", "memory", "durable"]:
            print(f"FAILED: the lives began from {came}")
            return 1
        if ours["digest"] != reference["digest"]:
            print("FAILED: the weights differ")
            return 1
        print("the final weights are bit-identical")
        return 0


if __name__ == "__main__":
    sys.exit(main())
