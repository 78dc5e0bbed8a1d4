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
from test_overlapped import OPTIMIZERS, Normed
from support.training import Runs
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.engine.save.full import FullSaver
from tiered_checkpoint_io.engine.save.overlap import Overlapped

dirpath, memory_dir, root, amid = sys.argv[1:]
finish = FullSaver._finish

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def finishing(saver, part, *taken):
    if part.facts.step == 6 and amid == "the copy":
        Overlapped.check = lambda *_: kill()
    finish(saver, part, *taken)
    if part.facts.step == 6:
        kill()

FullSaver._finish = finishing
runs = Runs(dirpath, memory_dir, Path(root))
model = Normed(OPTIMIZERS["AdamW foreach"])
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
