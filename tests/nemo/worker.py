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
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if job.get("endpoint_url"):
        # Of this rank's own, and for every S3 client in the process.
        os.environ["AWS_ENDPOINT_URL_S3"] = job["endpoint_url"]
    runs = NeMoRuns(job["dirpath"], job["memory_dir"], job["logs"])
    config = runs.config(*job.get("config", []))
    if job.get("no_folder"):
        checkpoint.tempfile.TemporaryDirectory = no_folder
    strategy = {"strategy": "ddp"} if job["ranks"] > 1 else {}
    try:
        trainer = runs.trainer(
            config, way=job["way"], max_steps=job["steps"], devices=job["ranks"], limit_train_batches=100, **strategy
        )
        module = Model(OmegaConf.create(config["model"]), trainer, stop_at=job.get("stop_at", 0), how=job.get("how"))
        trainer.fit(module)
    except Exception as error:
        write(job["answer"], {"error": f"{type(error).__name__}: {error}"})
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
    write(job["answer"], answer)
