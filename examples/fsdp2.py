"""Sharded training, killed and resumed on fewer ranks: the demonstration's GPT under FSDP2, or FSDP1.

Four ranks (processes on the CPU, over gloo) train with a sharded strategy; a checkpoint is four
shards. A first run is never interrupted. A second one is killed with SIGKILL, all ranks at once, and
resumes from node memory; is killed again with its memory wiped, and resumes from S3 on two ranks. Its
losses must be those of the first run: bit for bit on four ranks, within rounding on two.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
from typing import Any

from stage import NAMESPACE, Notes, behind_checkpoints, show, stage

MEMORY_EVERY = 4
S3_EVERY = 8
BATCH = 8
#: On fewer ranks sums are taken in another order.
TOLERANCE = 1e-3


def train(dirpath: str, memory_dir: str, report: str, strategy: str, ranks: str, steps: str) -> None:
    """One life of one rank; the first rank tells what it sees in ``report``."""
    import torch
    import torch.distributed as dist
    from gpt import GPT
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
    from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
    from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # One thread: threads that spin for each other crawl on a machine that has other work.
    torch.set_num_threads(1)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(dropout=0.0)

        def configure_model(self) -> None:
            if strategy == "fsdp2":
                mesh = self.device_mesh["data_parallel"]
                for block in self.gpt.blocks.layers:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.gpt, mesh=mesh)

        def training_step(self, *_: Any) -> torch.Tensor:
            # A step has the same batch on any number of ranks; each takes its share.
            tokens = self.gpt.batch(self.global_step, BATCH)
            loss: torch.Tensor = self.gpt(tokens.chunk(self.trainer.world_size)[self.global_rank])
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            self.loss = float(whole) / self.trainer.world_size
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
            return torch.utils.data.DataLoader(torch.zeros(1000, 1), batch_size=1)

    class FSDP1(TieredFSDPStrategy):
        def _setup_model(self, model: torch.nn.Module) -> FullyShardedDataParallel:
            # Lightning's own takes GPUs alone.
            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    io = TieredCheckpointIO(dirpath=dirpath, namespace=NAMESPACE, memory_dir=memory_dir)
    note = Notes(report)

    class Observer(Callback):
        def on_train_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.is_global_zero:
                note.began(io)

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            if trainer.is_global_zero:
                note.stepped(io, trainer.global_step, loss=module.loss)

    seed_everything(1, verbose=False)
    callback = TieredModelCheckpoint(
        memory_every_n_train_steps=MEMORY_EVERY, s3_every_n_train_steps=S3_EVERY, save_top_k=1, save_last=True
    )
    trainer = Trainer(
        plugins=[AsyncCheckpointIO(io)],
        strategy=TieredModelParallelStrategy(data_parallel_size=int(ranks), tensor_parallel_size=1)
        if strategy == "fsdp2"
        else FSDP1(state_dict_type="sharded"),
        callbacks=[callback, behind_checkpoints(Observer)],
        max_steps=int(steps),
        accelerator="cpu",
        devices=int(ranks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=memory_dir,
    )
    model = Model()
    trainer.fit(model, ckpt_path="tiered:latest")
    if trainer.is_global_zero:
        note(end=trainer.global_step, digest=hashlib.sha256(str(model.loss).encode()).hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", help="your own s3://bucket/prefix, instead of a local server")
    parser.add_argument("--fsdp1", action="store_true", help="FSDP instead of FSDP2")
    parser.add_argument("--steps", type=int, default=32, help="at least 32")
    parser.add_argument("--train", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
        return 0
    strategy, steps = "fsdp1" if arguments.fsdp1 else "fsdp2", arguments.steps
    with stage(arguments.s3) as here:
        rows = []
        for name, run, ranks, kill_after, wiped in (
            ("never interrupted", "whole", 4, None, True),
            ("1st", "run", 4, steps - 18, False),
            ("2nd", "run", 4, steps - 6, True),
            ("3rd, on 2 ranks", "run", 2, None, True),
        ):
            life = here.live(__file__, run, strategy, str(ranks), str(steps), kill_after=kill_after)
            rows.append((name, life, here.drained()))
            print(f"{name}: {life['life']:.0f} s", flush=True)
            if wiped:
                here.wipe()
        show(f"{strategy}, {steps} steps; memory every {MEMORY_EVERY}, S3 every {S3_EVERY}", rows)
        reference, *lives = (life for _, life, _ in rows)
        came = [life["start"] for life in lives]
        if came != ["scratch", "memory", "durable"]:
            print(f"FAILED: the lives began from {came}")
            return 1
        for life, tolerance in zip(lives, (0.0, 0.0, TOLERANCE), strict=True):
            for step, loss in life["losses"].items():
                if not math.isclose(loss, reference["losses"][step], rel_tol=tolerance):
                    print(f"FAILED: the loss of step {step} is {loss}, not {reference['losses'][step]}")
                    return 1
        worst = max(abs(loss / reference["losses"][step] - 1) for step, loss in lives[-1]["losses"].items())
        print(f"losses on 4 ranks: bit-identical; on 2 ranks: within {worst:.1e}")
        return 0


if __name__ == "__main__":
    sys.exit(main())
