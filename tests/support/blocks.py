"""The blocks of code in other libraries' documents that this project serves, and their environment.

The blocks are in ``tests/data/blocks``, word for word. Libraries that are not available (SageMaker's) are mocks with
the same names, over ours. Only buckets, folders, devices, and the texts in ``REPLACED`` are replaced.
"""

import contextlib
import dataclasses
import functools
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

from support.supporting import build

FOLDER = Path(__file__).parents[1] / "data" / "blocks"

#: In this order. Devices: these ranks have only CPUs, on which DDP needs a group of its own: with NCCL and gloo, the
#: collectives of training never mix with those of a save in the background.
REPLACED = {
    'backend="nccl"': 'backend="gloo"',
    "torch.cuda.set_device(dist.get_rank())": "pass",
    ".cuda()": "",
    "device_ids=[dist.get_rank()]": "process_group=group_of_ddp()",
    # Placeholders.
    "<num_of_distributed_processes>": "dist.get_world_size()",
    "[s3_uri]": "s3_uri",
    "[True|False]": "True",
    "[application logger instance]": "logger",
    # A call with colons is no Python; a job of these ranks.
    "in_memory_namespace: my-ml-workload": 'in_memory_namespace="my-ml-workload"',
    "s3_base_path: ": "s3_base_path=",
    "s3_every_n_steps: ": "s3_every_n_steps=",
    "world_size = 100": "world_size = dist.get_world_size()",
    # Torch's functions of these names take no checkpoint_id, and its page calls them save and load.
    "dist_cp.save_state_dict(\n    state_dict=state_dict, #": "dist_cp.save(\n    state_dict=state_dict, #",
    "dist_cp.load_state_dict(": "dist_cp.load(",
    # Torch has since changed the arguments of these.
    "storage_reader=reader,\n        process_group=process_group,\n    )\n    flat": "storage_reader=reader,\n    )\n    flat",
    'optim_state["optimizer"], model, optimizer,': 'model, optimizer, optim_state["optimizer"],',
}


_groups = []


def group_of_ddp():
    """Returns a group that outlives the block.

    Freed by the block, while gloo's thread lets go of the last gradients, it waits for that thread, which waits for the
    interpreter's lock.
    """
    import torch.distributed as dist

    _groups.append(dist.new_group())
    return _groups[-1]


def blocks(document):
    """Returns the blocks of a document by their names."""
    text = (FOLDER / f"{document}.txt").read_text()
    return dict(re.findall(r"## ([^\n]+)\n```\w+\n(.*?)```", text, re.DOTALL))


def run(document, name, namespace, places):
    """Runs a block in a namespace; ``places`` are the replacements of buckets and folders."""
    text = textwrap.dedent(blocks(document)[name])
    for old, new in {**REPLACED, **places}.items():
        text = text.replace(old, new)
    namespace["group_of_ddp"] = group_of_ddp
    exec(compile(text, f"{document}: {name}", "exec"), namespace)


@dataclasses.dataclass
class SageMakerCheckpointConfig:
    """The same fields as in the SageMaker library."""

    namespace: str
    world_size: int
    s3_tier_base_path: str | None = None
    save_to_s3: bool | None = None
    logger: Any = None


def modules(**by_name):
    """Puts modules of these names there to be imported; two underscores mean a dot."""
    for name, content in by_name.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                sys.modules[path] = types.ModuleType(path)
                parent, _, last = path.rpartition(".")
                if parent:
                    setattr(sys.modules[parent], last, sys.modules[path])
        vars(sys.modules[".".join(parts)]).update(content)


def stand_in_for_the_sagemaker_library(**options):
    """Mocks the library's classes; ``options`` are keys that a user need not give, such as memory_dir."""
    from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter

    classes = {
        "SageMakerTieredStorageWriter": functools.partial(TieredStorageWriter, **options),
        "SageMakerTieredStorageReader": functools.partial(TieredStorageReader, **options),
    }
    modules(
        amzn_sagemaker_checkpointing__config__sagemaker_checkpoint_config={
            "SageMakerCheckpointConfig": SageMakerCheckpointConfig
        },
        amzn_sagemaker_checkpointing__checkpointing__filesystem=classes,
        amzn_sagemaker_checkpointing__checkpointing__filesystem__filesystem=classes,
    )
    # The names under which the page has the same.
    return {
        "sagemaker_checkpointing": types.SimpleNamespace(**classes),
        "sm_ckpt": types.SimpleNamespace(CheckpointConfig=dict),
    }


def stand_in_for_smp(rep_groups, **options):
    """Mocks ``torch.sagemaker``: the ranks that hold the same, and its functions by ours.

    A local checkpoint of ours has one name, and a part for each shard; in the blocks each shard has a folder of its own,
    whose name ends with the shard. The kind of a state is that of the context in which it was taken.
    """
    from torch.distributed import get_process_group_ranks
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    from tiered_checkpoint_io import TieredStorageReader, dcp

    kinds = ["sharded"]

    @contextlib.contextmanager
    def sm_state_dict_type(model, kind):
        kinds.append(kind)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            yield

    def init_optim_state(optimizer, skip_empty_param):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().clone().zero_()
        optimizer.step()
        optimizer.zero_grad()

    def group(process_group, coordinator_rank):
        name = "replication_group" if kinds[-1] == "local" else "process_group"
        return {name: process_group, "coordinator_rank": coordinator_rank, "kind": kinds[-1]}

    def named(checkpoint_id):
        return checkpoint_id.partition("_fsdp")[0]

    def async_save(state_dict, *, checkpoint_id, process_group, coordinator_rank):
        how = {**options, **group(process_group, coordinator_rank), "require_step": False}
        return build(dcp.async_save, state_dict, checkpoint_id=named(checkpoint_id), **how)

    def load(state_dict, *, process_group, coordinator_rank, storage_reader=None, checkpoint_id=None):
        how = {"checkpoint_id": named(checkpoint_id)} if checkpoint_id else {}
        how |= {"storage_reader": storage_reader} if storage_reader else options
        build(dcp.load, state_dict, **how, **group(process_group, coordinator_rank))

    def reader(checkpoint_id):
        return build(TieredStorageReader, path=named(checkpoint_id), **options)

    ranker = types.SimpleNamespace(
        get_rep_groups=lambda: rep_groups,
        get_rep_rank=lambda rank: next(group.index(rank) for group in rep_groups if rank in group),
    )
    checkpoint = {
        "state_dict_saver": {"async_save": async_save, "maybe_finalize_async_calls": dcp.maybe_finalize_async_calls},
        "state_dict_loader": {"load": load},
        "state_dict_utils": {
            "sm_state_dict_type": sm_state_dict_type,
            "SMStateDictType": types.SimpleNamespace(SM_LOCAL_STATE_DICT="local"),
            "init_optim_state": init_optim_state,
        },
        "filesystem": {"DistributedFileSystemReader": reader},
    }
    modules(
        torch__sagemaker={"state": types.SimpleNamespace(tp_rank=0, ep_rank=0, ranker=ranker)},
        torch__sagemaker__utils__process_group_utils={"get_global_ranks": get_process_group_ranks},
        **{f"torch__sagemaker__distributed__checkpoint__{name}": content for name, content in checkpoint.items()},
    )
