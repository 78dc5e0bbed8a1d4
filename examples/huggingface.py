"""Hugging Face's Trainer over both tiers; kill it and start it again, and it resumes.

pip install transformers accelerate; python examples/huggingface.py s3://bucket/run
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from tiered_checkpoint_io import TieredCheckpointIO

#: The files of the Trainer's own checkpoint folder, by the entries of ours.
FILES = {"model": "pytorch_model.bin", "optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}


class TieredCallback(TrainerCallback):
    """Saves full checkpoints of one device or DDP, and makes the folder that ``train`` resumes from.

    A step is saved right before the next one: the Trainer has logged and evaluated it by then.
    """

    def __init__(self, io: TieredCheckpointIO, *, memory_every: int = 10, durable_every: int = 50) -> None:
        self.io, self.memory_every, self.durable_every = io, memory_every, durable_every
        self.saved, self.folder = 0, Path()

    def restore(self, args: TrainingArguments) -> str | None:
        """Writes the newest intact checkpoint as the Trainer reads it, once a node; every rank calls this.

        Returns:
            The folder for ``resume_from_checkpoint``; None if there is no checkpoint yet.
        """
        found = self.io.load_checkpoint("tiered:latest")
        if not found:
            return None
        # Nodes may share output_dir.
        self.folder = Path(args.output_dir, f".tiered-{socket.gethostname()}")
        with args.main_process_first(local=True):
            if args.local_process_index == 0:
                write_folder(self.folder, found)
        return str(self.folder)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.saved = state.global_step

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **parts: Any) -> None:  # noqa: ARG002
        step = state.global_step
        if step == self.saved:
            return
        if step % self.durable_every == 0:
            self.save(args, state, {"tiers": ["memory", "durable"], "wait": False}, **parts)
        elif step % self.memory_every == 0:
            self.save(args, state, {"tiers": ["memory"]}, **parts)

    #: Before the data of the next epoch are shuffled.
    on_epoch_begin = on_step_begin

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        # All ranks have read it by now.
        if self.folder.name and args.local_process_index == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **parts: Any) -> None:  # noqa: ARG002
        # The model may hold the best weights instead of the last.
        if state.global_step != self.saved and not args.load_best_model_at_end:
            self.save(args, state, {"tiers": ["memory", "durable"]}, **parts)
        # Waits for uploads.
        self.io.teardown()

    def save(self, args: TrainingArguments, state: Any, options: dict[str, Any], **parts: Any) -> None:
        """Saves the training state by the first rank; every rank calls this."""
        self.saved = state.global_step
        rng = random_states(args.world_size)
        if not state.is_world_process_zero:
            return
        found = {"model": parts["model"], "optimizer": parts["optimizer"], "scheduler": parts["lr_scheduler"]}
        if scaler := getattr(parts["optimizer"], "scaler", None):
            found["scaler"] = scaler
        content = {name: each.state_dict() for name, each in found.items()}
        trainer_state = json.dumps(asdict(state), default=str)
        content |= {"rng": rng, "trainer_state": trainer_state, "global_step": state.global_step}
        self.io.save_checkpoint(content, f"step={state.global_step}.ckpt", options)


def random_states(ranks: int) -> list[Any]:
    """Returns the random state of each rank, as plain data and tensors."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the Trainer uses this one
    numpy_state = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    own = {"python": random.getstate(), "numpy": numpy_state, "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state_all() if ranks > 1 else torch.cuda.get_rng_state()
    states: list[Any] = [own] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(states, own)
    return states


def write_folder(folder: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint in the layout of the Trainer."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, file in FILES.items():
        if name in state:
            torch.save(state[name], folder / file)
    for rank, rng in enumerate(state["rng"]):
        kind, keys, *rest = rng["numpy"]
        taken = {**rng, "numpy": (kind, keys.numpy().astype(np.uint32), *rest)}
        torch.save(taken, folder / (f"rng_state_{rank}.pth" if len(state["rng"]) > 1 else "rng_state.pth"))
    (folder / "trainer_state.json").write_text(state["trainer_state"])


def train(dirpath: str, output_dir: str, callbacks: Sequence[TrainerCallback] = (), **options: Any) -> Trainer:
    """Trains a tiny GPT-2; ``options`` are further keys of docs/configuration.md."""
    set_seed(1)
    sizes: dict[str, Any] = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = [(torch.arange(8) * (number + 3)) % 64 for number in range(256)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    plain: dict[str, Any] = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir, num_train_epochs=2, logging_steps=10, **plain)
    tiered = TieredCallback(TieredCheckpointIO(dirpath, namespace="huggingface", **options))
    trainer = Trainer(model, args, train_dataset=data, callbacks=[tiered, *callbacks])
    trainer.train(resume_from_checkpoint=tiered.restore(args))
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        train(sys.argv[1], output)
