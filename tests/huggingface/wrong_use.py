"""A stranger's mistakes with the Hugging Face adapters, one after the other; prints what each is told."""

import json
import os
import sys

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from support.supporting import build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.huggingface import AcceleratorCheckpoints, TieredCheckpointCallback

told = json.loads(sys.argv[1])
folder, memory_dir = told["folder"], told["memory_dir"]
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del os.environ[name]
options = {"namespace": "wrong", "memory_dir": memory_dir, "wait_timeout_s": 60}


def trainer(callback, **args):
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=4, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(folder + "/out", use_cpu=True, report_to=[], disable_tqdm=True, max_steps=1, **args)
    data = [{"input_ids": [1, 2], "labels": [1, 2]}] * 8
    return Trainer(model, args, train_dataset=data, callbacks=[callback])


def refused(call):
    try:
        call()
    except TieredCheckpointError as error:
        print(type(error).__name__, error)


io = build(TieredCheckpointIO, folder + "/durable", **options)
io.save_checkpoint({"another": 1}, "step=1.ckpt")
io.teardown()
tiered = build(TieredCheckpointCallback, folder + "/durable", **options)
refused(tiered.restore)
ready = trainer(tiered)
refused(tiered.restore)
ready.train()
refused(trainer(tiered, save_strategy="no", restore_callback_states_from_checkpoint=True).train)
ready.args.distributed_state.distributed_type = DistributedType.FSDP
refused(ready.train)
ready.args.distributed_state.distributed_type = DistributedType.NO
refused(lambda: TieredCheckpointCallback(folder, save_steps=10))
accelerator = Accelerator(cpu=True)
checkpoints = build(AcceleratorCheckpoints, folder + "/durable", metrics_export=f"textfile={folder}/m.prom", **options)
refused(lambda: checkpoints.load(accelerator, "step=1.ckpt"))
hook = accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
checkpoints.save(accelerator, 1)  # not due, so nothing is looked at
refused(lambda: checkpoints.save(accelerator, 10))
hook.remove()
accelerator.register_load_state_pre_hook(lambda models, folder: None)
refused(lambda: checkpoints.load(accelerator))
# As tensor parallelism and FSDP2 leave it, of which distributed_type says nothing.
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
sharded = trainer(tiered, save_strategy="no")
distribute_module(sharded.model, init_device_mesh("cpu", (1,)))
refused(sharded.train)
accelerator._models.append(sharded.model)
refused(lambda: checkpoints.save(accelerator, 10))
refused(lambda: checkpoints.load(accelerator))
dist.destroy_process_group()
with open(told["answer"], "w") as file:
    json.dump("done", file)
