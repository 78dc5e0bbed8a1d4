"""A rank of examples/huggingface.py; a JSON object says what it is to do."""

import hashlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from transformers import TrainerCallback

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface.py"


class Death(TrainerCallback):
    """Notes the step that training begins from; kills the rank in the step after one, which is saved by then."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = state.global_step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == job.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    death = Death()
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    trainer = example["train"](job["dirpath"], job["output_dir"], [death], **job["options"])
    weights = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        weights.update(name.encode() + value.numpy().tobytes())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    left = os.listdir(job["output_dir"]) if os.path.isdir(job["output_dir"]) else []
    with open(job["answer"] + ".new", "w") as file:
        json.dump({"weights": weights.hexdigest(), "began": death.began, "losses": losses, "left": left}, file)
    os.rename(job["answer"] + ".new", job["answer"])
