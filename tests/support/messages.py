"""The texts of the code's messages: each literal, with "…" for the values."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PLACE = re.compile(r"%(?:\.\d+)?[sdrf]|…")


@cache
def messages():
    """Returns the messages of the whole package, callbacks included."""
    found = set()
    for folder in ("tiered_checkpoint_io", "callbacks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = list(ast.walk(ast.parse(path.read_text())))
            docstrings = {id(node.value) for node in tree if isinstance(node, ast.Expr)}
            found |= {text for node in tree if id(node) not in docstrings and (text := _text(node))}
    return found


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PLACE.sub("…", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
        return _PLACE.sub("…", "".join(parts))
    return ""


def has_message(quoted):
    """Returns True if some text of the code, filled in somehow, contains the quoted text; "…" matches anything."""
    return any(quoted in text for text in messages())
