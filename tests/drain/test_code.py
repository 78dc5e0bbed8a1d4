"""Code that the drain's process runs: its trainer's, from whatever folder the trainer has it."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.draining import Node

import tiered_checkpoint_io

PACKAGE = Path(tiered_checkpoint_io.__file__).parent
TRAINER = """
import logging, os, pathlib, sys
sys.path.append(sys.argv[1])
sys.path.insert(0, os.path.abspath("first"))
from tiered_checkpoint_io.engine.drain.process import start_process
os.chdir("/")
sys.exit(start_process(pathlib.Path(sys.argv[2]), logging.getLogger()).wait(60))
"""


@pytest.fixture
def copy(tmp_path):
    """Copies the package to a folder of this name, as a clone or an installation elsewhere has it."""

    def make(name):
        place = tmp_path / name
        shutil.copytree(PACKAGE, place / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        return place

    return make


def python(code, *arguments, cwd):
    """Returns the output of code, in a process that finds the package by its arguments, or as installed."""
    command = [sys.executable, "-I", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("is_zipped", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_the_drain_runs_the_code_of_its_trainer_and_of_no_other_installation(copy, tmp_path, memory_dir, is_zipped):
    node, place = Node(memory_dir, str(tmp_path / "durable")), copy("clone")
    with (place / PACKAGE.name / "engine/drain/process.py").open("a") as file:
        file.write('\n\ndef main() -> None:\n    print("this is", __file__, sys.argv[-1])\n')
    # Neither a folder that comes last nor one that was put first, later, hides anything of the standard library.
    (tmp_path / "first").mkdir()
    (tmp_path / "first/logging.py").write_text("raise SystemExit('not the one of the standard library')")
    (place / "threading.py").write_text("raise SystemExit('not the one of the standard library')")
    if is_zipped:
        archive = tmp_path / "app.pyz"
        with zipfile.ZipFile(archive, "w") as file:
            for path in place.rglob("*.py"):
                file.write(path, path.relative_to(place))
        place = archive
    # A relative path, as in a notebook, which then changes its folder.
    python(TRAINER, place.name, node.root, cwd=tmp_path)
    standalone = place / PACKAGE.name / "engine/drain/process.py"
    assert (node.root / "status/drain.log").read_text() == f"this is {standalone} {node.root}\n"


GONE = """
import logging, pathlib, shutil, sys
sys.path.insert(0, sys.argv[1])
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.errors import DrainError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
root = pathlib.Path(sys.argv[2])
config = TieredCheckpointConfig.from_json((root / "drain.json").read_text())
handle = DrainHandle(MemoryTier(root), config, logging.getLogger())
shutil.rmtree(sys.argv[1])
handle.start()
try:
    handle.flush(100)
except DrainError as error:
    print(error)
"""


def test_a_drain_that_cannot_import_its_code_is_said_at_once(copy, memory_dir, tmp_path):
    node, place = Node(memory_dir, str(tmp_path / "durable")), copy("clone")
    node.save("a.ckpt", b"A")
    said = python(GONE, place, node.root, cwd=tmp_path)
    assert re.search(rf"can't import what it needs.*stay in node memory.*no longer at .*{place}", said), said
