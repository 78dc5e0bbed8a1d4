"""Train, get killed, resume: a small GPT through node memory and a real S3 server.

The text is the source code of the running Python's standard library. A first run is never
interrupted. A second one is killed twice with SIGKILL, the second time with its node memory wiped,
and must end with the very same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

from stage import NAMESPACE, Notes, behind_checkpoints, show, stage

STEPS = 60
MEMORY_EVERY = 5
S3_EVERY = 20
#: Killed right after these steps: the first resumes from memory, the second from S3.
KILLS = (33, 48)


def train(dirpath: str, memory_dir: str, report: str) -> None:
    """One life of the trainer; tells what it sees in ``report``."""
    import torch
    from gpt import GPT
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
    from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(dropout=0.1)

        def training_step(self, *_: Any) -> torch.Tensor:
            return self.gpt(self.gpt.batch(self.global_step, 8))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
            return torch.utils.data.DataLoader(torch.zeros(STEPS * 2, 1), batch_size=1)

    io = TieredCheckpointIO(dirpath=dirpath, namespace=NAMESPACE, memory_dir=memory_dir)
    note = Notes(report)

    class Observer(Callback):
        def on_train_start(self, *_: Any) -> None:
            note.began(io)

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            note.stepped(io, trainer.global_step)

    seed_everything(1, verbose=False)
    # One thread: threads that spin for each other crawl on a machine that has other work.
    torch.set_num_threads(1)
    callback = TieredModelCheckpoint(
        memory_every_n_train_steps=MEMORY_EVERY, s3_every_n_train_steps=S3_EVERY, save_top_k=1, save_last=True
    )
    trainer = Trainer(
        plugins=[AsyncCheckpointIO(io)],
        # After the checkpoint callback, so that it sees each save.
        callbacks=[callback, behind_checkpoints(Observer)],
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=memory_dir,
    )
    model = Model()
    trainer.fit(model, ckpt_path="tiered:latest")
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy().tobytes())
    note(end=trainer.global_step, digest=digest.hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", help="your own s3://bucket/prefix, instead of a local server")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
        return 0
    with stage(arguments.s3) as here:
        rows = []
        for name, run, kill_after, wiped in (
            ("never interrupted", "whole", None, True),
            ("1st", "run", KILLS[0], False),
            ("2nd", "run", KILLS[1], True),
            ("3rd", "run", None, True),
        ):
            life = here.live(__file__, run, kill_after=kill_after)
            rows.append((name, life, here.drained()))
            print(f"{name}: {life['life']:.0f} s", flush=True)
            if wiped:
                here.wipe()
        show(f"{STEPS} steps; memory every {MEMORY_EVERY}, S3 every {S3_EVERY}", rows)
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
