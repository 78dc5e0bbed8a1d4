"""What the documents say that a command prints with ``--json``."""

import json
import re
from pathlib import Path

_DOCUMENT = Path(__file__).parents[2] / "docs" / "command-line-moving.md"


def documented(command):
    """The keys of a command's document, and of the checkpoints in it."""
    section = re.search(rf"^## {command}$(.*?)(?=^## |\Z)", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)[1]
    table = section[section.index("| Key |") :]
    return {key for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", cell)}


def document_of(command, done):
    """The document that a command printed: its keys are those that are documented."""
    document = json.loads(done.stdout)
    rows = document.get("checkpoints", [])
    keys = {*document, *(key for row in rows for key in row)} - {"version", "command"}
    # Of what may be missing there is another in its place, or nothing that it would be said of.
    assert keys <= documented(command)
    assert not rows or keys == documented(command)
    assert (document["version"], document["command"]) == (1, command)
    return document
