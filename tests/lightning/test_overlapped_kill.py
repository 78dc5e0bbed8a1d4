"""A kill amid a capture that overlaps training."""

import os
import signal
from pathlib import Path

import pytest
from support.launch import scripts

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop())
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


@pytest.mark.parametrize(("amid", "step"), [("the copy", 3), ("what follows", 6)])
def test_a_kill_amid_a_capture_leaves_the_old_checkpoint_or_the_new_one(amid, step, runs, tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    place = [runs.dirpath, runs.memory_dir, str(runs.root), amid, str(Path(__file__).parent)]
    (ended,) = scripts(tmp_path, script, (place, os.environ.copy()))
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    io = runs.io()
    assert io.load_checkpoint("tiered:latest", weights_only=False)["global_step"] == step
    io.teardown()
