"""The blocks of README.md and docs/, word for word, over a real S3 server: nothing in them is replaced.

A block runs in a fresh namespace, which has what its prelude makes: what a reader has already, and the text takes as given.
"""

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
SHARDED = (
    STATE
    + """
from tiered_checkpoint_io import dcp

weights = {"weights": torch.ones(1000)}
dcp.async_save(weights, checkpoint_id="step_500", dirpath="s3://bucket/sharded", namespace="job").result(60)
"""
)
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
    ("docs/sharded.md", "For inference", 0): SHARDED,
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


PYTHON = {**blocks("README.md", "python"), **blocks("docs/sharded.md", "python")}
YAML = {**blocks("README.md", "yaml"), **blocks("docs/sharded.md", "yaml"), **blocks("docs/configuration.md", "yaml")}


def test_every_block_is_run():
    assert set(PYTHON) == PRELUDES.keys() | NOT_RUN.keys()
    languages = {given for _, given, _ in blocks_of((ROOT / "README.md").read_text())}
    assert languages == {"python", "yaml", "bash"}


@pytest.mark.parametrize("block", PRELUDES, ids=lambda block: f"{block[0]}-{block[1]:.14}-{block[2]}")
def test_a_block_of_python(block, story):
    (story.folder / "block.py").write_text(PYTHON[block])
    yaml = [text for (document, heading, _), text in YAML.items() if (document, heading) == block[:2]]
    (story.folder / "config.yaml").write_text("".join(yaml))
    output, status = story.python("block.py", prelude=PRELUDES[block])
    assert status == 0, output[-3000:]
    assert "Traceback" not in output
    if TRAINING in PRELUDES[block]:
        assert [root.name for root in story.roots()] == ["gpt-1"], "not in the machine's own memory"


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
    commands = [command[1:] for command in commands if command[:1] == ["tiered-ckpt"]]
    assert len(commands) == 3
    for command in commands:
        output, status = story.tiered_ckpt(*command)
        assert status == 0, output[-3000:]
        assert "step=1000" in output


def test_every_command_of_the_documents_is_understood():
    known = typer.main.get_command(cli.app).commands
    texts = [*blocks("README.md", "bash").values(), *blocks("docs/command-line.md", "bash").values()]
    lines = [line.partition("#")[0].split() for text in texts for line in text.splitlines()]
    used = [arguments for program, *arguments in filter(None, lines) if program == "tiered-ckpt"]
    for name, *arguments in used:
        # Parsed, and not run; what is not understood is an error.
        known[name].make_context(name, arguments)
    assert {name for name, *_ in used} == set(known)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
