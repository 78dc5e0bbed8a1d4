"""Runs that carry out commands, line by line: ``save NAME``, ``keep NAME`` only in memory, ``close``; each answers ``ok``, or the error.

One process imports everything and listens; each connection is a run, forked from it, that takes its
options from the first line and answers that with the number of its process.
"""

import json
import os
import signal
import socket
import sys

import torch
from clocks import quick
from support.supporting import build

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


def live(lines):
    def answer(text):
        lines.write(f"{text}\n")
        lines.flush()

    job = json.loads(lines.readline())
    clock = quick(**job.pop("times"))
    os.environ.update(job.pop("env"))
    config = build(TieredCheckpointConfig.from_any, **job)
    made = Checkpointer(config, session=Session(config, clock=clock))
    answer(os.getpid())
    for number, line in enumerate(lines, start=1):
        what, _, name = line.strip().partition(" ")
        try:
            if what == "keep":
                made.save({"global_step": number, "w": torch.full((100,), float(number))}, name, tiers={"memory"})
            elif what == "save":
                made.save({"global_step": number, "w": torch.full((100,), float(number))}, name, wait=True)
            else:
                made.close()
        except Exception as error:
            answer(f"{type(error).__name__}: {error}")
        else:
            answer("ok")


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with connection.makefile("rw") as lines:
                    live(lines)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main()
