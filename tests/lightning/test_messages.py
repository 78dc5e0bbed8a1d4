"""What a user reads: a script of their own, run in a process of its own, with logging as they have configured it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.launch import zygote

pytestmark = pytest.mark.timeout(360)
WAIT_S = 120

SCRIPT = """
import logging, logging.config, signal, sys, time
# As at a terminal: a process in the background of a shell has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
from lightning.pytorch import Trainer
sys.path.insert(0, sys.argv[1])
from support.training import Model
from support.supporting import build
from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

logger = None
{setting}


class Training(Model):
    def on_train_batch_end(self, *_):
        if {stops} and self.global_step == 10:
            print("waiting for Ctrl-C", flush=True)
            while True:
                time.sleep(0.1)


io = build(
    TieredCheckpointIO,
    dirpath=sys.argv[2], memory_dir=sys.argv[3], namespace="gpt-1", wait_timeout_s=60, logger=logger, {options}
)
callback = TieredModelCheckpoint(
    memory_every_n_train_steps=5, s3_every_n_train_steps=10, save_top_k=-1, filename='{{step}}'
)
trainer = Trainer(
    plugins=[AsyncCheckpointIO(io)], callbacks=[callback], max_steps=20, logger=False, accelerator="cpu",
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[4],
)
trainer.fit(Training(), ckpt_path="tiered:latest")
"""
SLOW = """
import threading
from tiered_checkpoint_io.stores.directory import DirectoryStore
DirectoryStore.upload = DirectoryStore.upload_if = lambda *_, **__: threading.Event().wait()
"""
OURS = re.compile(r"(?:\[[^]]*\] ){2}\[tiered_checkpoint_io[\w.]*\] \[(\w+)\] \[[^]]*\] \[[^]]*\] (.*)")

RESUME = 'INFO to resume: trainer.fit(..., ckpt_path="tiered:latest")'
STORY = [
    "INFO no checkpoint to resume from at DIR",
    "INFO Step 10: saved step=10.ckpt to memory: AMOUNT; upload to DIR queued",
    "INFO Step 10: step=10.ckpt is durable on DIR: AMOUNT",
    "INFO Step 20: saved step=20.ckpt to memory: AMOUNT; upload to DIR queued",
    "INFO Step 20: step=20.ckpt is durable on DIR: AMOUNT",
    "INFO newest checkpoints: step=20.ckpt in node memory; step=20.ckpt on DIR",
    RESUME,
]
MEMORY_STEPS = [f"DEBUG Step {n}: saved memory/epoch=0-step={n}.ckpt to memory: AMOUNT" for n in (5, 15)]


@pytest.fixture
def job(tmp_path, memory_dir):
    durable, script, output = (tmp_path / name for name in ("durable", "train.py", "output.txt"))

    def start(setting="", *, stops=False, options=""):
        script.write_text(SCRIPT.format(setting=setting, stops=stops, options=options))
        tests = str(Path(__file__).parents[1])
        arguments = [tests, str(durable), memory_dir, str(tmp_path)]
        return zygote().start(script, *arguments, environment=os.environ.copy(), out=output, cwd=tmp_path).started()

    def read(process):
        try:
            assert process.wait(WAIT_S) is not None, output.read_text()
            return said(output.read_text(), durable, memory_dir)
        finally:
            process.kill()

    start.read, start.durable, start.output = read, durable, output
    return start


def said(output, durable, memory_dir):
    """The lines that are ours, without what differs from run to run."""
    lines = []
    for line in output.splitlines():
        match = OURS.fullmatch(line)
        text = f"{match[1]} {match[2]}" if match else line
        if match or re.match("(DEBUG|INFO|WARNING|ERROR) ", line):
            text = text.replace(str(durable), "DIR").replace(memory_dir, "MEMORY")
            lines.append(re.sub(r"[\d.]+ .iB in [\d.]+ s \([^)]*\)", "AMOUNT", text))
    # Lightning's own, where its loggers propagate.
    return [line for line in lines if re.search(r"DIR|MEMORY|\.ckpt|to resume|not on", line) and "Restor" not in line]


def test_a_training_in_lines(job):
    lines = job.read(job("logging.getLogger('tiered_checkpoint_io').setLevel(logging.DEBUG)"))
    assert sorted(lines) == sorted([*STORY, *MEMORY_STEPS])
    # When an upload ends is not known; all else has its order.
    assert [line for line in lines if "is durable" not in line and line not in MEMORY_STEPS] == [
        line for line in STORY if "is durable" not in line
    ]


def test_an_upload_that_fails_is_logged_once_with_what_to_do(job):
    name = "step=20.ckpt"
    (job.durable / name / "in the way").mkdir(parents=True)
    lines = job.read(job())
    why = "put failed: Is a directory"
    command = "tiered-ckpt flush --namespace gpt-1 --memory-dir MEMORY"
    (failure,) = [line for line in lines if line.startswith("ERROR Step 20:")]
    assert failure.startswith(f"ERROR Step 20: {name} did not reach the durable tier: {why}")
    assert failure.endswith(f"it stays in node memory and is tried again; by hand: {command}")
    (left,) = [line for line in lines if line.startswith("ERROR") and line != failure]
    again = f"it stays in node memory; retry with: {command}"
    assert left == f"ERROR 1 queued checkpoint was not uploaded ({name}) — {again}", "why is said once"
    newest, pending, resume = lines[-3:]
    assert newest == f"INFO newest checkpoints: {name} in node memory; step=10.ckpt on DIR"
    assert pending.startswith(f"INFO 1 checkpoint is not on DIR yet ({name}): uploaded by a drain that runs, ")
    assert pending.endswith(f"or by: {command}")
    assert resume == RESUME


@pytest.mark.matrix
def test_a_second_ctrl_c_ends_the_wait_for_an_upload(job):
    """Lightning ignores it from the first one on, and a large upload takes minutes."""
    process = job(SLOW, stops=True, options="drain='thread', preflight='off'")
    deadline = began = time.monotonic() + WAIT_S
    for what in ("waiting for Ctrl-C", "waiting for the upload of the checkpoint, 60 s at most; Ctrl-C ends the wait"):
        while what not in job.output.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.signal(signal.SIGINT)
        began = time.monotonic()
    lines = job.read(process)
    assert time.monotonic() - began < 30
    left = lines[-1]
    assert left.startswith("WARNING 1 queued checkpoint was not uploaded (step=10.ckpt): "), job.output.read_text()
    assert left.endswith("it stays in node memory; retry with: tiered-ckpt flush --namespace gpt-1 --memory-dir MEMORY")
