"""One rank that runs the blocks of a document, as the job on its command line says; answers what they have done."""

import contextlib
import faulthandler
import functools
import io
import json
import logging
import os
import sys
import time
import warnings
from types import SimpleNamespace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import lightning.pytorch as lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from support import blocks


class Model(torch.nn.Linear):
    """A model that the blocks leave to their reader."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__(5, 3)


def total(*states):
    """Returns the sum of all numbers in the tensors of states, which a load has to restore."""
    found = 0.0
    for state in states:
        if isinstance(state, torch.Tensor):
            found += float(state.detach().double().sum())
        elif isinstance(state, dict):
            found += total(*state.values())
    return found


def names(job):
    return {"os": os, "time": time, "torch": torch, "dist": dist, "epoch": 4, "__name__": "block"} | vars(
        job["stand_ins"]
    )


def run(job, name, namespace):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        blocks.run(job["document"], name, namespace, job["places"])
    return said.getvalue()


def library(job):
    """Saves by its loop, loads the newest and one of before, and then goes through all other blocks."""
    space = names(job) | {"MyModel": Model}
    said = run(job, "quick start", space)
    space["future"].result()
    space["storage_writer"].wait(120)
    model, loaded = space["model"], []
    weights = total(dict(model.state_dict()))
    load = space["load"]

    def recorded(state_dict, **arguments):
        model.weight.data.zero_()
        load(state_dict, **arguments)
        loaded.append([state_dict["step"], state_dict["epoch"], total(dict(model.state_dict())) == weights])

    said += run(job, "loading", space | {"load": recorded})
    scheduler = torch.optim.lr_scheduler.StepLR(space["optimizer"], step_size=100, gamma=0.9)
    space |= {"lr_scheduler": scheduler, "s3_uri": job["base"], "logger": logging.getLogger("application")}
    found = []
    for name, step in (("configuration", 2001), ("namespaces", 2002), ("save frequency", 2003)):
        space |= {"training_step": step, "world_size": dist.get_world_size()}
        run(job, name, space)
        space["checkpoint_config"] = space["config"]
        run(job, "steps from paths", space)
        by_path = space["storage_writer"]
        by_step = space["SageMakerTieredStorageWriter"](checkpoint_config=space["config"], step=step)
        state = {"model": model.state_dict(), "optimizer": space["optimizer"].state_dict()}
        state |= {"lr_scheduler": scheduler.state_dict(), "step": step}
        for writer in (by_path, by_step):
            space["future"] = space["async_save"](state_dict=state, storage_writer=writer)
            said += run(job, "errors of saves", space)
        said += run(job, "errors of loads", space)
        found.append([space["start_step"], by_path.checkpoint_id.removeprefix(job["base"])])
        by_step.close()
    dist.destroy_process_group()
    return {"said": said, "loaded": loaded, "found": found}


def complete(job):
    """Runs the complete example; returns its output."""
    return run(job, "complete example", names(job) | {"__name__": "__main__"})


def hyperpod(job):
    dist.init_process_group("gloo")
    import torch.distributed.checkpoint as dist_cp

    space, found = names(job) | {"dist_cp": dist_cp}, []
    run(job, "configuration", space)
    for number, writer, save in ((5, "writer", "save by its name"), (100, "writer with a step", "save by its step")):
        space |= {"step_number": number, "number": number, "state_dict": {"t": torch.full((3,), float(number))}}
        run(job, writer, space)
        run(job, save, space)
        space |= {"state_dict": {"t": torch.zeros(3)}, "checkpoint_dir": f"step_{number}"}
        run(job, "load", space)
        found.append([space["state_dict"]["t"].tolist(), "durable" in space["smWriter"].last_save.tiers])
    with contextlib.suppress(TypeError):
        # Torch's own refuses what the page writes; so it runs here as `save`.
        dist_cp.save_state_dict(state_dict={}, checkpoint_id="step_1", storage_writer=space["smWriter"])
        found.append("torch takes it")
    space["smWriter"].close()
    dist.destroy_process_group()
    return found


def fsdp(seed):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(seed)
    model = FullyShardedDataParallel(torch.nn.Linear(7, 6), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def held(model, optimizer):
    """Returns this rank's state: the sums over its shards."""
    return [total(*(each.detach() for each in model.parameters())), total(optimizer.state_dict()["state"])]


def smp(job):
    """Saves and loads local and sharded checkpoints, each into another model; returns whether they are equal."""
    dist.init_process_group("gloo")
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    from tiered_checkpoint_io import dcp

    space, same = names(job), {}
    for kind in ("local", "sharded"):
        blocks.stand_in_for_smp([[rank] for rank in range(dist.get_world_size())], **job["options"], namespace=kind)
        model, optimizer = fsdp(1)
        saved = held(model, optimizer)
        space |= {"model": model, "optimizer": optimizer}
        run(job, f"save a {kind} checkpoint", space)
        dcp.maybe_finalize_async_calls(blocking=True)
        model, optimizer = fsdp(2)
        assert held(model, optimizer) != saved
        space |= {"model": model, "optimizer": optimizer}
        run(job, f"load a {kind} checkpoint", space)
        if kind == "local":
            load = space["load"]

            def into_nothing(state_dict, model=model, load=load, **arguments):
                # Its tensors are those of the model.
                for parameter in model.parameters():
                    parameter.detach().zero_()
                load(state_dict, **arguments)

            kw = {"process_group": space["current_replication_group"], "coordinator_rank": space["coordinator_rank"]}
            space |= {"checkpoint_dir": job["key"], "your_s3_bucket": job["bucket"], "kw": kw, "load": into_nothing}
            for more in ("to S3", ""):
                with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
                    model.load_state_dict(space["state_dict"]["model"])
                optimizer.load_state_dict(space["state_dict"]["optimizer"])
                same.setdefault(kind, []).append(held(model, optimizer) == saved)
                if more:
                    run(job, more, space)
        else:
            same[kind] = held(model, optimizer) == saved
    dist.destroy_process_group()
    return same


class NLPDDPStrategy(lightning.strategies.DDPStrategy):
    """NeMo's, without what it does for Megatron's models."""

    def __init__(self, no_ddp_communication_hook, nccl_communicator_config_path, sharp, **arguments):
        super().__init__(process_group_backend="gloo", **arguments)


def nemo(job):
    """Trains, then resumes; returns the steps at which each began and ended."""
    from tiered_checkpoint_io.nemo.connector import NeMoCheckpointConnector
    from tiered_checkpoint_io.nemo.io import S3CheckpointIO

    texts = blocks.blocks(job["document"])
    # The page has left out the spaces before dirpath.
    params = OmegaConf.create(texts["config"].replace("\ndirpath", "\n  dirpath").replace(*job["nemo"]))
    cfg = OmegaConf.create({"exp_manager": params, "model": {"gradient_as_bucket_view": True}})
    cfg = OmegaConf.merge(cfg, OmegaConf.create(texts["config of s3_checkpointing"]))
    space = names(job) | {"self": SimpleNamespace(cfg=cfg), "NLPDDPStrategy": NLPDDPStrategy}
    space |= {"S3CheckpointIO": functools.partial(S3CheckpointIO, **job["options"])}
    space |= {"NeMoCheckpointConnector": NeMoCheckpointConnector}
    # Lightning takes back what a launcher has set there.
    steps, environment = [], dict(os.environ)
    for count in (3, 5):
        os.environ.update(environment)
        run(job, "example usage", space)
        callback = ModelCheckpoint(dirpath=space["dirpath"], every_n_train_steps=1, save_top_k=-1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        ranks = {"devices": int(os.environ["WORLD_SIZE"]), "strategy": space["strategy"]}
        trainer = space["trainer"] = lightning.Trainer(max_steps=count, callbacks=[callback], **ranks, **quiet)
        run(job, "connector", space)
        model, begun = BoringModel(), []
        model.on_train_start = lambda trainer=trainer, begun=begun: begun.append(trainer.global_step)
        trainer.fit(model, ckpt_path="tiered:latest")
        steps.append([*begun, trainer.global_step])
    return steps


def main():
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(150)
    warnings.simplefilter("ignore")
    job = json.loads(sys.argv[1])
    job["stand_ins"] = SimpleNamespace(**blocks.stand_in_for_the_sagemaker_library(**job["options"]))
    answer = globals()[job["scenario"]](job)
    with open(job["answer"] + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(job["answer"] + ".new", job["answer"])


if __name__ == "__main__":
    main()
