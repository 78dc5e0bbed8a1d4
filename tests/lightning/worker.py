"""One rank of trainings by Lightning, one after the other; a JSON object describes them.

``signals``: lists of a rank, a moment (``train``, ``validation``, ``start``, ``end``) and a step. ``gpu``: the precision
there.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import fsdp

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.clocks import hurry
from support.supporting import build
from support.training import wipe
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.save.overlap import Overlap, Overlapped
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy

job = json.loads(sys.argv[1])
fit_job = job["fits"][0]
noted = {}


def tell(trainer, moment, step=0):
    for rank, when, at in fit_job.get("signals", ()):
        if (rank, when, at) == (trainer.global_rank, moment, step):
            noted.setdefault("at", time.monotonic())
            os.kill(os.getpid(), getattr(signal, fit_job.get("signal", "SIGTERM")))


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 16) if "joins" in fit_job else None
        self.seen, self.asked = {}, {}

    def configure_model(self):
        for part in filter(None, (self.net, self.head)):
            if fit_job.get("wrapped"):
                part[0] = checkpoint_wrapper(part[0])
            if fit_job.get("grid") == "tensor parallel":
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(part, self.device_mesh["tensor_parallel"], plan)
            if fit_job["strategy"] == "fsdp2":
                fully_shard(part, mesh=self.grid())

    def grid(self):
        if fit_job.get("grid") == "the module's":
            return init_device_mesh("cpu", (1, fit_job["ranks"]), mesh_dim_names=("replicas", "shards"))
        return self.device_mesh["data_parallel"]

    def training_step(self, *_):
        # Of the restart only: the lease is looked at again from time to time.
        self.asked = self.asked or self.trainer.strategy.checkpoint_io.checkpointer.session.asked
        tell(self.trainer, "train", self.global_step)
        if fit_job.get("raises") == self.global_rank and self.global_step == 5:
            raise ValueError("a bug of one rank")
        # Not synchronised between the ranks; on one of them always the same.
        self.log("own", float((self.global_rank != fit_job.get("same_on", 0)) * self.global_step))
        # By the step, because not all releases of Lightning continue with the same number of the batch.
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.global_step)).to(self.device)
        output = self.net(inputs)
        if self.head is not None and self.global_step >= fit_job["joins"]:
            # Until then, it has no gradients, and its optimizer no state of it.
            output = output + self.head(inputs)
        loss = (output - inputs).pow(2).mean()
        self.seen[self.global_step] = loss.item()
        return loss

    def validation_step(self, _, index):
        tell(self.trainer, "validation", index)
        if fit_job.get("slow_validation") and noted:
            time.sleep(0.3)

    def configure_optimizers(self):
        if "optimizer" in fit_job:
            # By layers, each from the last to the first; and a group of what this model does not have.
            layers = (self.net[2].parameters(), [], self.net[0].parameters())
            groups = [{"params": list(each)[::-1], "lr": 1e-2 / (i + 1)} for i, each in enumerate(layers)]
            return getattr(torch.optim, fit_job["optimizer"])(groups)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused="gpu" in fit_job)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(fit_job.get("batches", 100), 1))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(fit_job.get("validation", 0), 1))


class Moments(Callback):
    def on_fit_start(self, trainer, _):
        tell(trainer, "start")

    def on_train_end(self, trainer, _):
        tell(trainer, "end")


class Average(Callback):
    # A moving average of the weights, gathered.
    def on_fit_start(self, trainer, module):
        if not hasattr(self, "mean"):
            self.mean = {name: self.whole(value) for name, value in module.named_parameters()}

    @staticmethod
    def whole(value):
        return value.detach().full_tensor().clone()

    def on_train_batch_end(self, trainer, module, *_):
        for name, value in module.named_parameters():
            self.mean[name].mul_(0.9).add_(self.whole(value), alpha=0.1)

    def state_dict(self):
        return {"mean": self.mean, "kind": "average"}

    def load_state_dict(self, state):
        self.mean = {name: value.clone() for name, value in state["mean"].items()}


class First(Callback):
    # Saves before the first step.
    def on_train_start(self, trainer, _):
        trainer.save_checkpoint(f"{fit_job['dirpath']}/first.ckpt")


class Odd(Callback):
    # Its state can't be saved at one step: a lock, which only rank 0 saves; or a sharded tensor.
    step = 0

    def on_train_batch_start(self, trainer, *_):
        self.step = trainer.global_step + 1

    def state_dict(self):
        if self.step == fit_job.get("unpicklable"):
            return {"lock": threading.Lock()}
        if self.step == fit_job.get("sharded"):
            mesh = init_device_mesh("cpu", (fit_job["ranks"],))
            return {"mean": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}
        return {}


class Ended(Callback):
    # Uploads that are held wait for it.
    def __init__(self):
        self.ended = threading.Event()

    def on_train_end(self, *_):
        self.ended.set()


def patches(ended):
    """Yields patches of our own functions: they count, are late, or fail on one rank."""
    begin, upload = Overlap.begin_state, DirectoryStore._upload

    def held(store, key, *args, **options):
        assert "step" not in key or ended.wait(30)
        return upload(store, key, *args, **options)

    def late(overlapped):
        # Captures that overlap training begin only once training waits for them; a GPU's soon, as ever.
        noted["overlapped"] = noted.get("overlapped", 0) + 1
        overlapped.wanted.wait(0.005 if "gpu" in fit_job else 10)

    def refusing(overlap, state):
        return None if fit_job.get("refuses") == dist.get_rank() else begin(overlap, state)

    yield patch.object(DirectoryStore, "_upload", held if fit_job.get("held") else upload)
    yield patch.object(Overlapped, "let_caller_return", late)
    yield patch.object(Overlap, "begin_state", refusing)
    # The toy's state is too small for it.
    yield patch.object(Checkpointer, "prepare", lambda _, size: noted.setdefault("prepared", []).append(size))
    yield patch.object(TieredModelCheckpoint, "CHECKPOINT_NAME_LAST", fit_job.get("name_last", "last"))
    if fit_job["strategy"] == "fsdp1" and "gpu" not in fit_job:
        yield patch.object(fsdp, "_get_full_state_dict_context", full_on_cpu)


class FSDP2(TieredModelParallelStrategy):
    # Notes whether the call of each save that overlaps training has reported this.
    def save_checkpoint(self, *args, **options):
        engine = self._tiered_io.checkpointer
        before = engine.session.last_save
        super().save_checkpoint(*args, **options)
        made = engine.session.last_save
        if made is not None and made.overlapped:
            noted.setdefault("reported", []).append(made is not before and made.size > 0)


class FSDP1(TieredFSDPStrategy):
    # Lightning's own takes only GPUs.
    def _setup_model(self, model):
        flat = fit_job.get("flat", False)
        policy = ModuleWrapPolicy({nn.Linear}) if fit_job.get("wrapped") or flat else None
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=not flat
        )


def full_on_cpu(module, world_size, rank0_only=True):
    # An offload by torch from the CPU to the CPU is no copy, and is overwritten.
    configs = [config(False, rank0_only) for config in (FullStateDictConfig, FullOptimStateDictConfig)]
    return FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, *configs)


def strategy():
    if fit_job["strategy"] == "fsdp2":
        across = fit_job["ranks"] if fit_job.get("grid") == "tensor parallel" else 1
        return FSDP2(fit_job["ranks"] // across, across, save_distributed_checkpoint=not fit_job.get("full"))
    if fit_job["strategy"] == "fsdp1":
        kind = TieredFSDPStrategy if "gpu" in fit_job else FSDP1
        return kind(state_dict_type="full" if fit_job.get("full") else "sharded")
    return fit_job["strategy"]


def fit():
    """Trains, and returns the results."""
    seed_everything(1, verbose=False)
    hurry(failed_together_s=2.0 if "raises" in fit_job else 60.0)
    block = {
        "dirpath": fit_job["dirpath"],
        "memory_dir": fit_job["memory_dir"],
        "wait_timeout_s": 60,
        "drain": "thread",
        "on_save_error": "raise",
        "memory_every_n_train_steps": 2,
        "s3_every_n_train_steps": 4,
        **fit_job.get("config", {}),
    }
    io = build(TieredCheckpointIO.from_config, block)
    named = {"filename": "{step}", "save_last": True, "save_top_k": 2, "monitor": "step", "mode": "max"}
    callbacks = [build(TieredModelCheckpoint.from_config, block, **{**named, **fit_job.get("callback", {})})]
    callbacks += [made() for name, made in (("average", Average), ("first", First)) if fit_job.get(name)]
    callbacks += [Odd()] if "unpicklable" in fit_job or "sharded" in fit_job else []
    if "signals" in fit_job:
        grace = {"grace_seconds": fit_job.get("grace", 20.0), "signals": ("SIGTERM", "SIGUSR1")}
        callbacks += [PreemptionCheckpoint(**grace), Moments()]
    # Saves on all ranks together, if all of them fail.
    callbacks += [OnExceptionCheckpoint(fit_job["dirpath"])] if fit_job.get("on_exception") else []
    accumulate, ended = fit_job.get("accumulate", 1), Ended()
    callbacks += [ended] if fit_job.get("held") else []
    validation = {"val_check_interval": 6 * accumulate, "check_val_every_n_epoch": None}
    trainer = Trainer(
        plugins=[io],
        strategy=strategy(),
        callbacks=callbacks,
        max_steps=fit_job["steps"],
        accelerator="gpu" if "gpu" in fit_job else "cpu",
        precision=fit_job.get("gpu"),
        devices=fit_job["ranks"],
        logger=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(validation if fit_job.get("validation") else {"limit_val_batches": 0}),
    )
    model, answer = Toy(), {"ended": "fit"}
    with contextlib.ExitStack() as stack:
        for each in patches(ended.ended):
            stack.enter_context(each)
        try:
            trainer.fit(model, ckpt_path=fit_job.get("ckpt_path", "tiered:latest"))
        except Preempted as end:
            if fit_job.get("launched"):
                raise
            answer = {"ended": "preempted", "code": end.code, "after": "at" in noted and time.monotonic() - noted["at"]}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    restored = io.checkpointer.restored
    answer |= {
        "from": restored and (restored.name, restored.step, restored.tier),
        "step": trainer.global_step,
        "losses": model.seen,
        "asked": model.asked,
        "durable": sorted(path.name[:-5] for path in Path(fit_job["dirpath"]).glob(".tiered/manifests/*.json")),
        **{key: noted.get(key) for key in ("overlapped", "reported", "prepared")},
    }
    if fit_job.get("average"):
        mean = callbacks[1].mean
        answer["mean"] = {name: value.sum().item() for name, value in mean.items()}
    return answer


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = []
    for fit_job in job["fits"]:
        noted.clear()
        if fit_job.get("wipe") and not dist.is_initialized():
            wipe(fit_job["memory_dir"])
        elif fit_job.get("wipe"):
            dist.barrier()
            if dist.get_rank() == 0:
                wipe(fit_job["memory_dir"])
            dist.barrier()
        answers.append(fit())
        if "error" in answers[-1]:
            break
    if "launched" in fit_job:
        sys.exit()
    Path(job["answer"] + ".new").write_text(json.dumps(answers))
    os.rename(job["answer"] + ".new", job["answer"])
    if "error" in answers[-1]:
        os._exit(1)
    if answers[-1]["ended"] == "preempted":
        # No handler is left: the signal has its earlier effect.
        signal.raise_signal(signal.SIGTERM)
        os.unlink(job["answer"])
