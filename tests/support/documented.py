"""Runs commands, and reads what they print: with ``--json``, and in a pipe."""

import json

from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app


def command(*arguments):
    """Runs a command in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def document_of(command, done):
    """Returns the one document that a command printed."""
    (line,) = done.stdout.splitlines()
    return check(command, json.loads(line))


def check(command, document):
    """Checks a document, which names its command, and returns it."""
    assert {"version": 1, "command": command}.items() <= document.items()
    return document


def verified(*rows):
    """Returns the output of ``verify`` in a pipe; a row has state, tier, name, and further cells if any."""
    table = [("state", "tier", "name", "rank", "copy", "note"), *((*row, "", "", "")[:6] for row in rows)]
    return "".join("\t".join(row) + "\n" for row in table)
