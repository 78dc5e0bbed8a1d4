"""One rank of a training with a sharded strategy; is told what to do by a JSON object."""

import json
import os
import sys
import threading

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import fsdp
from support.supporting import build
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
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.save.overlap import Overlap, Overlapped
from tiered_checkpoint_io.engine.save.part import PartSave
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 16) if "joins" in told else None
        self.seen = {}

    def configure_model(self):
        for part in filter(None, (self.net, self.head)):
            if told.get("wrapped"):
                part[0] = checkpoint_wrapper(part[0])
            if told.get("compiled"):
                part[0] = torch.compile(part[0], backend="eager")
            if told.get("grid") == "tensor parallel":
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(part, self.device_mesh["tensor_parallel"], plan)
            if told["strategy"] == "fsdp2":
                fully_shard(part, mesh=self.grid())

    def grid(self):
        if told.get("grid") == "the module's":
            return init_device_mesh("cpu", (1, told["ranks"]), mesh_dim_names=("replicas", "shards"))
        return self.device_mesh["data_parallel"]

    def training_step(self, *_):
        # By the step, because not all releases of Lightning go on with the same number of the batch.
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(self.global_step))
        output = self.net(inputs)
        if self.head is not None and self.global_step >= told["joins"]:
            # Until then, it has no gradients, and its optimizer no state of it.
            output = output + self.head(inputs)
        loss = (output - inputs).pow(2).mean()
        self.seen[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self):
        if "optimizer" in told:
            # By layers, each from the last to the first; and a group of what this model does not have.
            layers = (self.net[2].parameters(), [], self.net[0].parameters())
            groups = [{"params": list(each)[::-1], "lr": 1e-2 / (i + 1)} for i, each in enumerate(layers)]
            return getattr(torch.optim, told["optimizer"])(groups)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(100, 1))


class Average(Callback):
    # A moving average of the weights, sharded as they are.
    def on_fit_start(self, trainer, module):
        if not hasattr(self, "mean"):
            self.mean = {name: value.detach().clone() for name, value in module.named_parameters()}

    def on_train_batch_end(self, trainer, module, *_):
        for name, value in module.named_parameters():
            self.mean[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def state_dict(self):
        return {"mean": self.mean, "kind": "average"}

    def load_state_dict(self, state):
        self.mean = {name: value.clone() for name, value in state["mean"].items()}


class First(Callback):
    # Saves before the first step.
    def on_train_start(self, trainer, _):
        trainer.save_checkpoint(f"{told['dirpath']}/first.ckpt")


class Unpicklable(Callback):
    # Its state can't be saved at one step; rank 0 alone saves what is not sharded.
    def state_dict(self):
        return {"lock": threading.Lock()} if trainer.global_step == told["unpicklable"] else {}


class Undescribed(Callback):
    # Its state holds, at one step, a sharded tensor whose mesh has no names.
    def state_dict(self):
        if trainer.global_step != told["undescribed"]:
            return {}
        mesh = init_device_mesh("cpu", (told["ranks"],))
        return {"mean": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}


class Held(Callback):
    # Has the drain send nothing of a checkpoint before training ends.
    def __init__(self):
        self.ended, upload = threading.Event(), DirectoryStore._upload

        def waits(store, key, *args, **options):
            assert "step" not in key or self.ended.wait(30)
            return upload(store, key, *args, **options)

        DirectoryStore._upload = waits

    def on_train_end(self, *_):
        self.ended.set()


def unsealed(name):
    """Has rank 1 fail to complete its part of a save."""
    seal = PartSave.seal

    def fails(part, *args, **options):
        if (part.facts.name, part.rank) == (name, 1):
            raise OSError("no such device")
        seal(part, *args, **options)

    PartSave.seal = fails


def refusing(rank):
    """Has one rank take no state to copy it beside training."""
    begin = Overlap.begin_state
    Overlap.begin_state = lambda self, state: None if dist.get_rank() == rank else begin(self, state)


class Late:
    # Captures that overlap training begin only once training waits for them; counts them.
    begun = 0

    def let_caller_return(self):
        Late.begun += 1
        self.wanted.wait(10)


class FSDP2(TieredModelParallelStrategy):
    # Notes whether the call of each save that overlaps training has told of it.
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.told = []

    def save_checkpoint(self, *args, **options):
        engine = self._tiered_io.checkpointer
        before = engine.session.last_save
        super().save_checkpoint(*args, **options)
        made = engine.session.last_save
        if made is not None and made.overlapped:
            self.told.append(made is not before and made.size > 0)


class FSDP1(TieredFSDPStrategy):
    # Lightning's own takes GPUs alone.
    def _setup_model(self, model):
        flat = told.get("flat", False)
        policy = ModuleWrapPolicy({nn.Linear}) if told.get("wrapped") or flat else None
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=not flat
        )


def full_on_cpu(module, world_size, rank0_only=True):
    # What torch offloads from the CPU to the CPU is no copy, and is overwritten.
    configs = [config(False, rank0_only) for config in (FullStateDictConfig, FullOptimStateDictConfig)]
    return FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, *configs)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    if told["strategy"] == "fsdp2":
        across = told["ranks"] if told.get("grid") == "tensor parallel" else 1
        strategy = FSDP2(told["ranks"] // across, across, save_distributed_checkpoint=not told.get("full"))
    elif told["strategy"] == "ddp":
        strategy = "ddp"
    else:
        fsdp._get_full_state_dict_context = full_on_cpu
        strategy = FSDP1(state_dict_type="full" if told.get("full") else "sharded")
    block = {
        "dirpath": told["dirpath"],
        "memory_dir": told["memory_dir"],
        "wait_timeout_s": told.get("wait_timeout_s", 60),
        "enable_async_checkpointing": told.get("async", True),
        "on_save_error": told.get("on_save_error", "raise"),
        "staging": told.get("staging", "eager"),
        "memory_every_n_train_steps": 2,
        "s3_every_n_train_steps": 4,
        **told.get("config", {}),
    }
    Overlapped.let_caller_return = Late.let_caller_return
    io = build(TieredCheckpointIO.from_config, block)
    unsealed(told.get("unsealed"))
    average = Average()
    callbacks = [
        build(
            TieredModelCheckpoint.from_config,
            block,
            filename="{step}",
            save_last=not told.get("held"),
            save_top_k=1 if told.get("held") else 2,
            monitor="step",
            mode="max",
            save_weights_only=told.get("weights_only", False),
        )
    ]
    trainer = Trainer(
        plugins=[io],
        strategy=strategy,
        callbacks=callbacks
        + ([average] if told.get("average") else [])
        + ([First()] if told.get("first") else [])
        + ([Undescribed()] if "undescribed" in told else [])
        + ([Held()] if told.get("held") else [])
        + ([Unpicklable()] if "unpicklable" in told else []),
        max_steps=told["steps"],
        accelerator="cpu",
        devices=told["ranks"],
        logger=False,
        accumulate_grad_batches=told.get("accumulate", 1),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, prepared = Toy(), []
    if "refuses" in told:
        refusing(told["refuses"])
    # The toy's state is too small for it.
    Checkpointer.prepare = lambda _, size: prepared.append(size)
    try:
        trainer.fit(model, ckpt_path=told.get("ckpt_path", "tiered:latest"))
    except Exception as error:
        with open(told["answer"], "w") as file:
            json.dump({"error": str(error)}, file)
        os._exit(1)
    restored = io.checkpointer.restored
    answer = {
        "from": restored and (restored.name, restored.step, restored.tier),
        "losses": model.seen,
        "asked": io.checkpointer.session.asked,
        "overlapped": Late.begun,
        "told": getattr(strategy, "told", None),
        "prepared": prepared,
    }
    if told.get("average"):
        answer["mean"] = {name: value.full_tensor().sum().item() for name, value in average.mean.items()}
    with open(told["answer"] + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(told["answer"] + ".new", told["answer"])
