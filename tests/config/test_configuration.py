"""One set of defaults: dataclass, YAML file and document agree; settings for support cases; namespaces by dirpath."""

import os
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.draining import Node
from support.supporting import build, supported
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import VARIABLE, Support, TieredCheckpointConfig, keys

ROOT = Path(__file__).parents[2]
YAML = ROOT / "configs" / "s3_checkpointing" / "default.yaml"
DOCUMENT = ROOT / "docs" / "configuration.md"
BEGIN, END = "| Key | Default | Meaning |", "\n\n## "


def defaults():
    """Returns every key with its default, as YAML has it, in the order of the dataclass."""
    found = {}
    for field in fields(TieredCheckpointConfig):
        if field.name not in keys():
            continue
        default = "???" if field.default is MISSING else field.default
        found[field.name] = list(default) if isinstance(default, tuple) else default
    return found


def meanings(of=TieredCheckpointConfig):
    """Returns every key with its text in the dataclass's docstring."""
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
    """Returns the file: each key with its default, and the first sentence of its meaning."""
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


def test_the_document_has_every_key_and_each_has_a_meaning():
    assert list(meanings()) == list(defaults())
    text = DOCUMENT.read_text()
    start = text.index(BEGIN)
    there = text[start : text.index(END, start)]
    if os.environ.get("TIERED_UPDATE_EXPECTED") == "1":
        DOCUMENT.write_text(text.replace(there, table()))
        return
    assert there == table(), "write it anew by TIERED_UPDATE_EXPECTED=1"


S3 = {"dirpath": "s3://bucket/run"}


def test_a_configuration_keeps_what_the_variable_said_when_it_was_made(monkeypatch):
    assert TieredCheckpointConfig(**S3).support == Support()
    monkeypatch.setenv(VARIABLE, " wait_timeout_s=60, drain = thread,, pending_timeout_s=7 ")
    made = TieredCheckpointConfig(**S3)
    assert made.support == Support(wait_timeout_s=60, drain="thread", pending_timeout_s=7)
    monkeypatch.setenv(VARIABLE, "max_pending=9")
    changed = TieredCheckpointIO(made, memory_keep_last=5).config
    assert (changed.memory_keep_last, changed.support) == (5, made.support)
    # A process that reads the stored settings, as the drain does, has another environment.
    stored = made.to_json()
    monkeypatch.delenv(VARIABLE)
    assert TieredCheckpointConfig.from_json(stored) == made
    assert made != TieredCheckpointConfig(**S3)


@pytest.mark.parametrize(
    ("text", "said", "allowed"),
    [
        ("wait_timeout=60", "unknown name 'wait_timeout'", "did you mean 'wait_timeout_s'?"),
        ("namespace=a", "unknown name 'namespace'", "known names: drain"),
        ("wait_timeout_s", "wait_timeout_s is ''", "1 to 604800"),
        ("wait_timeout_s=0", "wait_timeout_s is 0", "1 to 604800"),
        ("pending_timeout_s=1.5", "pending_timeout_s is '1.5'", "1 to 86400"),
        ("durable_timeout_s=-1", "durable_timeout_s is '-1'", "1 to 86400"),
        ("max_pending=many", "max_pending is 'many'", "1 to 1000"),
        ("drain=forked", "drain is 'forked'", "process, thread"),
    ],
)
def test_a_bad_variable_is_one_clear_error(monkeypatch, text, said, allowed):
    monkeypatch.setenv(VARIABLE, f"drain=thread,{text}")
    with pytest.raises(ConfigError) as caught:
        TieredCheckpointIO(**S3)
    assert str(caught.value).startswith(f"{VARIABLE}: {said}")
    assert allowed in caught.value.hint


@pytest.mark.parametrize("name", [*Support.__dataclass_fields__, "support"])
def test_none_of_them_is_a_key(name):
    for make in (TieredCheckpointIO.from_config, TieredCheckpointConfig.from_any):
        with pytest.raises(ConfigError, match=f"unknown key '{name}'"):
            make({**S3, name: 3})


def test_what_only_one_process_sees_is_uploaded_by_it():
    assert build(TieredCheckpointConfig, dirpath="memory://run", drain="process").support.drain == "thread"
    with supported(drain="process"):
        assert TieredCheckpointConfig(**S3).support.drain == "process"


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=80), st.text(min_size=1, max_size=80))
def test_any_dirpath_gives_a_valid_namespace_and_another_one_another(one, other):
    assert ids.validate_namespace(ids.namespace_of(one)) == ids.namespace_of(one)
    assert (ids.namespace_of(one) == ids.namespace_of(other)) == (one == other)


def test_it_follows_dirpath_and_a_name_stays():
    made = TieredCheckpointConfig(dirpath="s3://bucket/exp/run-1/")
    assert made.namespace.rpartition("-")[0] == "exp-run-1"
    assert TieredCheckpointConfig(dirpath="s3://bucket").namespace.startswith("bucket-")
    moved = TieredCheckpointConfig.from_any(made, dirpath="s3://bucket/exp/run-2")
    assert moved == TieredCheckpointConfig(dirpath="s3://bucket/exp/run-2")
    assert not moved.is_named
    assert TieredCheckpointConfig.from_json(made.to_json()) == made
    named = TieredCheckpointConfig(dirpath="s3://bucket/run", namespace="default")
    assert (named.namespace, named.is_named) == ("default", True)
    assert TieredCheckpointConfig.from_any(named, dirpath="s3://bucket/b").namespace == "default"


def command(memory_dir, *arguments):
    return CliRunner().invoke(app, [*arguments, "--memory-dir", memory_dir])


def test_of_several_namespaces_none_is_taken_for_its_name(memory_dir, tmp_path):
    """A command for another job must not meet "default"."""
    nodes = [Node(memory_dir, str(tmp_path / name), namespace=name) for name in ("default", "x")]
    for node in nodes:
        node.save("a.ckpt", b"A")
        node.save("b.ckpt", b"B", durable=False)
    for what in (["clean"], ["clean", "--yes"], ["flush"], ["flush", "--stay"]):
        refused = command(memory_dir, *what).exception
        assert isinstance(refused, ConfigError), what
        assert "there are 2 namespaces: default, x" in str(refused)
        assert "--namespace" in refused.hint
    assert [[stored.pending for stored in node.tier.parts()] for node in nodes] == [[True, False]] * 2
    nodes[0].drain()
    assert [set(node.states().values()) for node in nodes] == [{"committed"}, set()]
