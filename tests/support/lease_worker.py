"""A run that does as it is told, line by line: ``save NAME``, ``close``. Answers each with ``ok``, or the error."""

import json
import os
import sys

import torch

from tiered_checkpoint_io.config import TieredCheckpointConfig
from tiered_checkpoint_io.engine import lease_keeper, leases
from tiered_checkpoint_io.engine.checkpointer import Checkpointer


def answer(text):
    os.write(1, f"{text}\n".encode())


def main():
    told = json.loads(sys.argv[1])
    machine = told.pop("machine")
    if machine:
        # Nodes share neither this nor the numbers of their processes.
        leases._boot_id = lambda: machine
    leases.BEAT_S, leases.TTL_S, lease_keeper._POLL_S = told.pop("times")
    made = Checkpointer(TieredCheckpointConfig.from_any(**told))
    answer("ready")
    for number, line in enumerate(sys.stdin, start=1):
        what, _, name = line.strip().partition(" ")
        try:
            if what == "save":
                made.save({"global_step": number, "w": torch.full((100,), float(number))}, name, wait=True)
            else:
                made.close()
        except Exception as error:
            answer(f"{type(error).__name__}: {error}")
        else:
            answer("ok")


if __name__ == "__main__":
    main()
