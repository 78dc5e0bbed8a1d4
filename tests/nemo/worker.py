"""One rank of a NeMo training; a JSON object describes the work."""

import hashlib
import json
import os
import sys

import torch
from omegaconf import OmegaConf
from support.nemo_training import Model, NeMoRuns, callback_of, io_of, restored

from tiered_checkpoint_io.nemo import checkpoint


def write(path, answer):
    with open(path + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(path + ".new", path)


def no_folder(**_):
    raise OSError("no folder")


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if told.get("endpoint_url"):
        # Of this rank's own, and for every S3 client in the process.
        os.environ["AWS_ENDPOINT_URL_S3"] = told["endpoint_url"]
    runs = NeMoRuns(told["dirpath"], told["memory_dir"], told["logs"])
    config = runs.config(*told.get("config", []))
    if told.get("no_folder"):
        checkpoint.tempfile.TemporaryDirectory = no_folder
    strategy = {"strategy": "ddp"} if told["ranks"] > 1 else {}
    try:
        trainer = runs.trainer(
            config, way=told["way"], max_steps=told["steps"], devices=told["ranks"], limit_train_batches=100, **strategy
        )
        module = Model(OmegaConf.create(config["model"]), trainer, stop_at=told.get("stop_at", 0), how=told.get("how"))
        trainer.fit(module)
    except Exception as error:
        write(told["answer"], {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    weights = b"".join(each.detach().numpy().tobytes() for each in module.parameters())
    answer = {
        "from": restored(trainer),
        "steps": sorted(module.seen),
        "weights": hashlib.sha256(weights).hexdigest(),
        "asked": io_of(trainer).checkpointer.session.asked,
        "best": sorted(callback_of(trainer).best_k_models),
        "last": callback_of(trainer).last_model_path,
        "path": trainer.ckpt_path,
    }
    write(told["answer"], answer)
