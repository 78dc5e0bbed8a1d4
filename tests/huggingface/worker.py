"""One rank of a training with transformers.Trainer, or with Accelerate; is told what to do by a JSON object."""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from support.supporting import build
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.huggingface import AcceleratorCheckpoints, TieredCheckpointCallback

EXAMPLES, LENGTH, BATCH, VOCABULARY = 24, 8, 2, 64
GRID = 2.0**16
BOUND_S = 60.0


class Examples(torch.utils.data.Dataset):
    """Each example depends on its number alone; with ``noisy`` on the random state as well."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        ids = (torch.arange(LENGTH) * (index + 3)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


def gpt2():
    """Tiny, random, with dropout: a random state that differs shows in the weights."""
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=1, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
        )
    )
    for parameter in model.parameters():
        # DDP adds up in another order behind the first step of a process; sums of such few digits are exact.
        parameter.register_hook(lambda gradient: (gradient * GRID).round() / GRID)
    return model


def digest(model):
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Death(TrainerCallback):
    """Kills the rank in the step after one; both are saved by then."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == told.get("die_after"):
            die()

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == told.get("die_evaluating"):
            die()


class Shortage(TrainerCallback):
    """Memory runs out once, in the step after one; notes from where the training begins, each time."""

    began = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.began.append(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == told.get("short_after"):
            told["short_after"] = None
            raise RuntimeError("CUDA out of memory.")


class Stop(TrainerCallback):
    """Ends the training by the evaluation of an epoch, as EarlyStoppingCallback does."""

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop |= state.epoch == told.get("stops")


class Cleaner(TrainerCallback):
    """Removes what lies about in output_dir, such as the folder that training has just resumed from."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if told.get("cleans"):
            for folder in Path(args.output_dir).glob(".tiered-restored-*"):
                shutil.rmtree(folder)


class LoggingTrainer(Trainer):
    """Logs a tensor of a graph and a NumPy value, as loss functions of several terms do."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if told.get("logs_tensors") and not isinstance(loss, tuple):
            self.log({"term": loss * 2, "terms": torch.stack([loss, loss]), "value": np.float32(1.5), "of": object})
        return loss


def by_trainer():
    tiered = build(TieredCheckpointCallback, **told["options"])
    args = TrainingArguments(
        told["output_dir"],
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", **told.get("args", {})},
    )
    data = Examples()
    callbacks = [tiered, Death(), Shortage(), Stop(), Cleaner()]
    trainer = LoggingTrainer(gpt2(), args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    if told.get("starts_anew"):
        began = time.monotonic()
        try:
            trainer.train()
        except TieredCheckpointError as error:
            return {"failed": type(error).__name__, "said": str(error), "took_s": time.monotonic() - began}
    folder = tiered.restore()
    if "beside" in told:
        other = build(TieredCheckpointCallback, **told["options"] | told["beside"])
        Trainer(gpt2(), args, train_dataset=data, callbacks=[other])
        other.restore()
    trainer.train(resume_from_checkpoint=folder)
    restored = tiered.checkpointer.restored
    return {
        "weights": digest(trainer.model),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "began": Shortage.began,
        "from": restored and (restored.step, restored.tier),
        "left": os.listdir(told["output_dir"]) if os.path.isdir(told["output_dir"]) else [],
    }


class Counter:
    """Registered for checkpointing, as what a loop counts itself."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def by_accelerate():
    checkpoints = build(AcceleratorCheckpoints, **told["options"])
    accelerator = Accelerator(cpu=True)
    model, counter = gpt2(), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=told["steps"])
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(counter)
    first = checkpoints.load(accelerator) or 0
    examples, losses = Examples(), []
    for step in range(first + 1, told["steps"] + 1):
        batch = examples[random.randrange(EXAMPLES)]
        loss = model(**{name: value[None] for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.seen += 1
        losses.append(loss.item())
        checkpoints.save(accelerator, step)
        if step == told.get("die_after"):
            die()
    checkpoints.close()
    restored = checkpoints.checkpointer.restored
    weights = digest(accelerator.unwrap_model(model))
    return {
        "weights": weights,
        "losses": losses,
        "seen": counter.seen,
        "from": restored and (restored.step, restored.tier),
    }


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    started = time.monotonic()
    answer = {"trainer": by_trainer, "accelerate": by_accelerate}[told["loop"]]()
    assert time.monotonic() - started < BOUND_S
    with open(told["answer"] + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(told["answer"] + ".new", told["answer"])
