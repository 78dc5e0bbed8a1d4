"""docs/troubleshooting.md: each message that it quotes is one of the code's, and each class of errors is explained."""

import ast
import re
from pathlib import Path

from support.messages import ROOT, has_message, messages

PAGE = ROOT / "docs/troubleshooting.md"


def quoted():
    rows = [re.match(r"\| `([^`]+)` \|", line) for line in PAGE.read_text().partition("## By class")[0].splitlines()]
    return [row[1] for row in rows if row]


def test_each_message_exists():
    assert len(quoted()) > 60
    assert [each for each in quoted() if not has_message(each)] == []


def test_a_message_that_changed_is_found():
    """The comparison is no formality."""
    assert has_message("unknown key … (value …) in s3_checkpointing")
    assert not has_message("unknown key … (value …) in s3_checkpoint_ing")
    assert "…" in "".join(messages())


def test_each_class_is_explained():
    tree = ast.parse(Path(ROOT, "tiered_checkpoint_io/errors.py").read_text())
    classes = {each.name for each in tree.body if isinstance(each, ast.ClassDef)}
    table = PAGE.read_text().partition("## By class")[2]
    assert classes == set(re.findall(r"`(\w+Error)`", table))
