"""What a command prints with ``--json``."""

import json


def document_of(command, done):
    """The one document that a command printed."""
    (line,) = done.stdout.splitlines()
    return check(command, json.loads(line))


def check(command, document):
    """The document, which says of which command it is."""
    assert {"version": 1, "command": command}.items() <= document.items()
    return document
