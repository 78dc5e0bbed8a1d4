"""One set of defaults: the dataclass, the YAML file and the document say the same, key by key."""

import os
import re
from dataclasses import MISSING, fields
from pathlib import Path

from omegaconf import OmegaConf

from tiered_checkpoint_io.model.config import TieredCheckpointConfig, keys
from tiered_checkpoint_io.model.support import Support

ROOT = Path(__file__).parents[2]
YAML = ROOT / "configs" / "s3_checkpointing" / "default.yaml"
DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN, END = "| Key | Default | Meaning |", "\n\n## "


def defaults():
    """Every key with its default, as YAML has it, in the order of the dataclass."""
    found = {}
    for field in fields(TieredCheckpointConfig):
        if field.name not in keys():
            continue
        default = "???" if field.default is MISSING else field.default
        found[field.name] = list(default) if isinstance(default, tuple) else default
    return found


def meanings(of=TieredCheckpointConfig):
    """Every key with what the dataclass's docstring says of it."""
    text = of.__doc__.partition("Attributes:")[2].partition("Raises:")[0]
    entries = re.findall(r"^        (\w+): (.*(?:\n            .*)*)", text, re.MULTILINE)
    return {key: re.sub(r"\s+", " ", words).replace("``", "`") for key, words in entries}


def table():
    rows = [BEGIN, "|---|---|---|"]
    said = meanings()
    for key, default in defaults().items():
        shown = "required" if default == "???" else "`" + OmegaConf.to_yaml([default])[2:].strip() + "`"
        rows.append(f"| `{key}` | {shown} | {said[key]} |")
    return "\n".join(rows)


def test_the_yaml_file_has_every_key_with_the_dataclass_default_in_its_order():
    block = OmegaConf.to_container(OmegaConf.load(YAML))
    assert list(block.items()) == list(defaults().items())


def yaml_text():
    """The file: each key with its default, and the first sentence of what it means."""
    lines = [YAML.read_text().partition("\n")[0]]
    for key, default in defaults().items():
        entry = f"{key}: " + OmegaConf.to_yaml([default])[2:].strip().replace("'???'", "???")
        lines.append(f"{entry:<36}# {meanings()[key].partition('. ')[0].rstrip('.').replace('`', '')}")
    assert max(map(len, lines)) <= 120, "a first sentence is too long"
    return "\n".join(lines) + "\n"


def test_the_yaml_file_says_of_each_key_the_first_sentence_of_its_meaning():
    if os.environ.get("TIERED_UPDATE_EXPECTED") == "1":
        YAML.write_text(yaml_text())
        return
    assert YAML.read_text() == yaml_text(), "write it anew by TIERED_UPDATE_EXPECTED=1"


def test_the_settings_for_support_cases_stand_in_the_document():
    said = meanings(Support)
    for field in fields(Support):
        assert f"| `{field.name}` | `{field.default}` | {said[field.name]} |" in DOCUMENT.read_text()


def test_every_key_has_a_meaning():
    assert list(meanings()) == list(defaults())


def test_the_document_has_every_key():
    text = DOCUMENT.read_text()
    start = text.index(BEGIN)
    there = text[start : text.index(END, start)]
    if os.environ.get("TIERED_UPDATE_EXPECTED") == "1":
        DOCUMENT.write_text(text.replace(there, table()))
        return
    assert there == table(), "write it anew by TIERED_UPDATE_EXPECTED=1"
