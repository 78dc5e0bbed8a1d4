"""The blocks of README.md and docs/, word for word, over a real S3 server: nothing in them is replaced.

A heading with a block ``title="train.py"`` is a story: its files are written, its commands run, its lines printed.
Any other block of Python runs in a fresh namespace, after a prelude that makes the names that a reader has already.
"""

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer
from support.first_hour import blocks_of
from support.messages import has_message
from support.supporting import supported

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
STATE = """
import torch
state, step = {"step": 5, "weights": torch.ones(1000)}, 100
"""
#: The prelude of each block of Python that is no story, by page, heading and place below it.
PRELUDES = {
    ("README.md", "Use", 0): TRAINING,
    ("docs/quickstart.md", "Preemption", 0): "",
    ("docs/lightning.md", "The best and the newest", 0): TRAINING,
    ("docs/sharded.md", "Lightning: FSDP, FSDP2, tensor parallel", 0): "",
    ("docs/sharded.md", "The SageMaker library's loop", 0): STATE,
    ("docs/sharded.md", "Each rank its own state", 0): STATE,
    ("docs/python-api.md", "Any loop", 0): STATE,
}
#: Stories that represent the others in `make test`.
SHORT = {"One process, killed"}
#: Blocks of Python with tests of their own.
ELSEWHERE = {
    ("docs/python-api.md", "Finding checkpoints"): "test_python_api.py",
    ("docs/python-api.md", "Evaluating each checkpoint"): "test_python_api.py",
    ("docs/nemo.md", "One line"): "make test-nemo",
    ("docs/nemo.md", "Or one function"): "make test-nemo",
}


def pages():
    """Returns all documents of users, by their place in the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


def sections():
    """Returns the blocks below each heading: language, title and text of each."""
    found = {}
    for page, text in pages().items():
        for heading, info, block in blocks_of(text):
            language, _, title = info.partition(" title=")
            found.setdefault((page, heading), []).append((language, title.strip('"'), block))
    return found


SECTIONS = sections()
STORIES = [key for key, blocks in SECTIONS.items() if any(title.endswith(".py") for _, title, _ in blocks)]
BLOCKS = {
    (*key, number): text
    for key, blocks in SECTIONS.items()
    if key not in STORIES
    for number, text in enumerate(text for language, _, text in blocks if language == "python")
}


def run(story, line):
    """Runs one line of a story; returns its output."""
    command, _, comment = line.partition("#")
    program, *arguments = command.split()
    if program == "torchrun":
        _, ranks, script, *arguments = arguments
        output, status = story.python(script, *arguments, ranks=int(ranks))
    elif program == "python":
        output, status = story.python(*arguments)
    else:
        assert program == "tiered-ckpt", line
        story.drained()
        output, status = story.tiered_ckpt(*arguments)
    assert status == (None if "killed" in comment else 0), f"{line}\n{output[-3000:]}"
    return output


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, id=key[1], marks=() if key[1] in SHORT else pytest.mark.matrix) for key in STORIES],
)
def test_a_story_prints_its_lines(key, story):
    output = ""
    for language, title, text in SECTIONS[key]:
        if title == "prints":
            assert [line for line in text.splitlines() if line not in output.splitlines()] == [], output[-3000:]
        elif title:
            (story.folder / title).write_text(text)
        else:
            assert language == "bash", f"{key}: a block of {language} that nothing runs"
            output = "".join(run(story, line) for line in text.splitlines())


@pytest.mark.parametrize("block", PRELUDES, ids=lambda block: f"{block[0]}-{block[1]:.14}")
def test_a_block_of_python(block, story):
    (story.folder / "block.py").write_text(BLOCKS[block])
    with supported(drain="thread"):
        output, status = story.python("block.py", prelude=PRELUDES[block])
    assert status == 0, output[-3000:]
    assert "Traceback" not in output
    if PRELUDES[block] == TRAINING:
        assert [root.name for root in story.roots()] == ["gpt-1"], "not in the machine's own memory"
    if block[0] == "README.md":
        (log,) = [text for language, _, text in SECTIONS[block[:2]] if language == "text"]
        assert [part for part in re.split("; |\n", log) if part not in output] == []


def test_every_block_of_python_is_run():
    assert {key for key in BLOCKS if key[:2] not in ELSEWHERE} == PRELUDES.keys()
    texts = [text for blocks in SECTIONS.values() for language, _, text in blocks if language == "python"]
    for text in texts:
        ast.parse(text)
    assert {heading for _, heading in STORIES} >= SHORT


def test_the_blocks_of_yaml():
    from omegaconf import OmegaConf

    from tiered_checkpoint_io.model.config import TieredCheckpointConfig

    texts = [text for blocks in SECTIONS.values() for language, _, text in blocks if language == "yaml"]
    blocks = [OmegaConf.create(text) for text in texts if "s3_checkpointing:\n" in text]
    assert len(blocks) >= 3
    for block in blocks:
        TieredCheckpointConfig.from_any(block.s3_checkpointing)


#: The example's steps take as long as those of a small model.
HURRY = """
import time
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds / 100 if seconds == 0.05 else seconds)
"""


def test_the_commands_of_readme(story):
    output, status = story.python(str(ROOT / "examples" / "quickstart.py"), "s3://bucket/run", prelude=HURRY)
    assert status == 0, output[-3000:]
    assert "trained to step 1000" in output
    story.drained()
    lines = [
        line for language, _, text in SECTIONS["README.md", "Use"] if language == "bash" for line in text.split("\n")
    ]
    commands = [line.partition("#")[0].split()[1:] for line in lines if line.startswith("tiered-ckpt")]
    assert len(commands) == 2
    for command in commands:
        output, status = story.tiered_ckpt(*command)
        assert status == 0, output[-3000:]
        assert "step=1000" in output


def test_every_command_of_the_documents_is_understood():
    root = typer.main.get_command(cli.app)
    known = root.commands
    # A command keeps the names of its option for help as the first context has them.
    parent = typer.Context(root, **root.context_settings)
    used = set()
    for page, text in pages().items():
        for block in (block for _, info, block in blocks_of(text) if info == "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.shlex(line, posix=True, punctuation_chars=True)
                words.whitespace_split = True
                program, name, *arguments = [
                    *itertools.takewhile(lambda word: not set(word) <= set("();<>|&"), words),
                    "",
                    "",
                ]
                if program == "tiered-ckpt":
                    # Parsed, and not run; an unknown option is an error.
                    known[name].make_context(name, arguments[:-2], parent=parent)
                    used |= {name} if page == "docs/command-line.md" else set()
    assert used == set(known)


def test_each_example_is_run():
    runs = [ROOT / "Makefile", *(ROOT / "tests").rglob("*.py")]
    said = "".join(path.read_text() for path in runs)
    imported = "".join(path.read_text() for path in (ROOT / "examples").rglob("*.py"))
    for path in (ROOT / "examples").rglob("*.py"):
        assert path.name in said or re.search(rf"from {path.stem} import", said + imported), f"nothing runs {path}"


def test_each_message_that_the_page_of_troubleshooting_quotes_exists():
    quoted = re.findall(r"^\| `([^`]+)` \|", pages()["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 25
    assert [each for each in quoted if not has_message(each)] == []
