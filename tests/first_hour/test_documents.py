"""The blocks of README.md and docs/, word for word, over a real S3 server: nothing in them is replaced.

A block runs in a fresh namespace, which has what its prelude makes: what a reader has already, and the text takes as given.
"""

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer
from support.first_hour import blocks_of

from tiered_checkpoint_io import cli

ROOT = Path(__file__).parents[2]

TRAINING = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

class Model(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().validation_step(batch, batch_idx)["x"])

model, data = Model(), DataLoader(RandomDataset(32, 64))
"""
COMPOSED = """
import os
from hydra import compose, initialize_config_dir

with initialize_config_dir(os.getcwd(), version_base=None):
    cfg = compose("config", overrides=["hydra.searchpath=[pkg://tiered_checkpoint_io.configs]"])
"""
STATE = """
import torch
state, step, rank, shards = {"step": 5, "weights": torch.ones(1000)}, 100, 0, 1
"""
CHECKED = """
from tiered_checkpoint_io import TieredCheckpointConfig
print(TieredCheckpointConfig.from_any(cfg.s3_checkpointing))
"""
#: What each block of Python is run with, by document, heading and place below it.
PRELUDES = {
    ("README.md", "In your script", 0): TRAINING,
    ("README.md", "In your script", 1): TRAINING + COMPOSED,
    ("README.md", "In your script", 2): "",
    ("README.md", "In your script", 3): STATE,
    ("docs/sharded.md", "Lightning: FSDP, FSDP2, tensor parallel", 0): "",
    ("docs/sharded.md", "torch.distributed.checkpoint (DCP)", 0): STATE,
    **{
        ("docs/migration.md", heading, number): prelude
        for heading, number, prelude in (
            ("ModelCheckpoint", 0, TRAINING),
            ("Lightning's asynchronous IO", 0, TRAINING),
            ("s3torchconnector", 0, TRAINING),
            ("s3torchconnector", 1, STATE),
            ("SageMaker's tiered storage (HyperPod)", 0, STATE),
            ("SageMaker's model parallel library (SMP)", 0, STATE),
            ("NVRx", 0, STATE),
        )
    },
}
#: What is not run, and why.
NOT_RUN = {
    ("docs/sharded.md", "Each rank its own state", 0): "needs a rank for each shard: tests/dcp/test_smp.py",
}


def blocks(document, language):
    """The blocks of a language: those below one heading are counted."""
    found = {}
    for heading, given, text in blocks_of((ROOT / document).read_text()):
        if given == language:
            found[document, heading, sum(key[1] == heading for key in found)] = text
    return found


DOCUMENTS = (
    "README.md",
    *(f"docs/{page}.md" for page in ("sharded", "migration", "operations", "configuration", "command-line")),
)
PYTHON, YAML, BASH = (
    {key: text for document in DOCUMENTS for key, text in blocks(document, language).items()}
    for language in ("python", "yaml", "bash")
)


def test_every_block_is_run():
    assert set(PYTHON) == PRELUDES.keys() | NOT_RUN.keys()
    languages = {given for _, given, _ in blocks_of((ROOT / "README.md").read_text())}
    assert languages == {"python", "yaml", "bash"}


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=pytest.mark.matrix if "migration" in block[0] else ()) for block in PRELUDES],
    ids=lambda block: f"{block[0]}-{block[1]:.14}-{block[2]}",
)
def test_a_block_of_python(block, story):
    (story.folder / "block.py").write_text(PYTHON[block])
    yaml = [text for (document, heading, _), text in YAML.items() if (document, heading) == block[:2]]
    (story.folder / "config.yaml").write_text("".join(yaml))
    output, status = story.python("block.py", prelude=PRELUDES[block])
    assert status == 0, output[-3000:]
    assert "Traceback" not in output
    if TRAINING in PRELUDES[block]:
        assert [root.name for root in story.roots()] in (["gpt-1"], ["run"]), "not in the machine's own memory"


def test_what_others_have_is_python():
    """The blocks that migration begins with: their libraries are not installed here."""
    before = blocks("docs/migration.md", 'python title="before"')
    assert {key[1] for key in PYTHON if key[0] == "docs/migration.md"} == {key[1] for key in before}
    for (_, heading, _), text in before.items():
        ast.parse(text, heading)


def test_the_blocks_of_yaml(story):
    script = ""
    for index, text in enumerate(YAML.values()):
        (story.folder / f"config{index}.yaml").write_text(text)
        script += COMPOSED.replace('"config"', f'"config{index}"') + CHECKED
    (story.folder / "block.py").write_text(script)
    output, status = story.python("block.py")
    assert status == 0, output[-3000:]
    assert output.count("TieredCheckpointConfig(") == len(YAML)


#: The example's steps take as long as those of a small model.
HURRY = """
import time
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds / 100 if seconds == 0.05 else seconds)
"""


def test_the_first_five_minutes(story):
    """The example, and the commands that README.md has after it."""
    output, status = story.python(str(ROOT / "examples" / "quickstart.py"), "s3://bucket/run", prelude=HURRY)
    assert status == 0, output[-3000:]
    assert "trained to step 1000" in output
    story.drained()
    commands = [
        line.partition("#")[0].split() for text in blocks("README.md", "bash").values() for line in text.splitlines()
    ]
    # What doctor says is of the machine: tests/contract/test_doctor.py.
    commands = [command[1:] for command in commands if command[:1] == ["tiered-ckpt"] and command[1] != "doctor"]
    assert len(commands) == 4
    for command in commands:
        output, status = story.tiered_ckpt(*command)
        assert status == 0, output[-3000:]
        assert "step=1000" in output or command[0] in ("report", "flush"), output
        # The run's own events, though its namespace was named by the script.
        assert "without events" not in output


#: Pages whose blocks of Python have tests of their own, and those that need what is not installed here.
ELSEWHERE = {"docs/nemo.md": "make test-nemo", "docs/python-api.md": "test_python_api.py"}


def pages():
    """All documents of users, by their place in the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def test_no_block_of_python_is_left_out():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page, text in pages().items():
        blocks = [(heading, block) for heading, info, block in blocks_of(text) if info.startswith("python")]
        is_run = f'{page.rpartition("/")[2]}"' in tests or page in ELSEWHERE or page.startswith("docs/tutorials/")
        assert is_run or not blocks, f"nothing runs the blocks of {page}"
        for heading, block in blocks:
            ast.parse(block, f"{page}: {heading}")


def test_every_command_of_the_documents_is_understood():
    root = typer.main.get_command(cli.app)
    known = root.commands
    # A command keeps the names of its option for help as the first context has them.
    parent = typer.Context(root, **root.context_settings)
    used = {page: [] for page in pages()}
    for page, text in pages().items():
        for block in (block for _, info, block in blocks_of(text) if info == "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.shlex(line, posix=True, punctuation_chars=True)
                words.whitespace_split = True
                program, *arguments = list(
                    itertools.takewhile(lambda word: not set(word) <= set("();<>|&"), words)
                ) or [""]
                used[page] += [arguments] if program == "tiered-ckpt" else []
    for name, *arguments in (command for commands in used.values() for command in commands):
        # Parsed, and not run; what is not understood is an error.
        known[name].make_context(name, arguments, parent=parent)
    assert {name for page in ("README.md", "docs/command-line.md") for name, *_ in used[page]} == set(known)


def test_each_example_is_run():
    runs = [ROOT / "Makefile", *(ROOT / "tests").rglob("*.py")]
    said = "".join(path.read_text() for path in runs)
    imported = "".join(path.read_text() for path in (ROOT / "examples").rglob("*.py"))
    for path in (ROOT / "examples").rglob("*.py"):
        assert path.name in said or re.search(rf"from {path.stem} import", imported), f"nothing runs {path}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
