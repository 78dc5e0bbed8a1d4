"""A kill amid a capture that overlaps training."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
sys.path.insert(0, "tests/lightning")
from test_overlapped import ADAMW, Normed
from support.training import Runs
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.save.part import PartSave

dirpath, memory_dir, root, amid = sys.argv[1:]
beside, seal = PartSave.fill_beside, PartSave.seal

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def copying(part, overlapped):
    if part.facts.step == 6 and amid == "the copy":
        part.fill()
        kill()
    beside(part, overlapped)

def sealing(part, *args, **options):
    seal(part, *args, **options)
    if part.facts.step == 6:
        kill()

PartSave.fill_beside, PartSave.seal = copying, sealing
runs = Runs(dirpath, memory_dir, Path(root))
model = Normed(ADAMW)
io = runs.io(staging="overlapped")
runs.fit(TieredModelCheckpoint(memory_every_n_train_steps=3), model=model, io=io, ckpt_path=None, max_steps=16)
"""


@pytest.mark.parametrize(("amid", "step"), [("the copy", 3), pytest.param("what follows", 6, marks=pytest.mark.matrix)])
def test_a_kill_amid_a_capture_leaves_the_old_checkpoint_or_the_new_one(amid, step, runs):
    place = [runs.dirpath, runs.memory_dir, str(runs.root)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *place, amid], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    io = runs.io()
    assert io.load_checkpoint("tiered:latest", weights_only=False)["global_step"] == step
    io.teardown()
