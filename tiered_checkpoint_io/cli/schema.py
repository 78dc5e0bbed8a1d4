"""The command that prints the JSON Schema of what another prints, made from the dataclasses in :mod:`documents`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from tiered_checkpoint_io.cli.documents import DOCUMENTS
from tiered_checkpoint_io.cli.output import JSON_VERSION, say

_PLAIN: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"},
    Path: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    # What is no finite number is null.
    float: {"type": ["number", "null"]},
    object: {},
    datetime: {"type": "string", "format": "date-time"},
}


def schema(command: Annotated[str, typer.Argument(help=f"One of {', '.join(DOCUMENTS)}.")]) -> None:
    """Prints the JSON Schema of what a command prints with --json."""
    if command not in DOCUMENTS:
        raise typer.BadParameter(f"{command!r} is none of {', '.join(DOCUMENTS)}")
    say(json.dumps(schema_of(command), indent=2))


def schema_of(command: str) -> dict[str, Any]:
    """The schema of a command's document."""
    shared: dict[str, Any] = {}
    told = "Raised when a key changes its meaning or goes; keys may be added."
    head = {"version": {"const": JSON_VERSION, "description": told}, "command": {"const": command}}
    made = [_object(kind, shared, head) for kind in DOCUMENTS[command]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"tiered-ckpt {command} --json",
        **(made[0] if len(made) == 1 else {"anyOf": made}),
        "$defs": shared,
    }


def _object(kind: type, shared: dict[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
    text = kind.__doc__ or ""
    attributes = re.findall(r"^        (\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    hints = get_type_hints(kind, include_extras=True)
    keys = {**head, **{each.name: _value(hints[each.name], shared) for each in fields(kind)}}
    for name, said in attributes:
        keys[name] = {**keys[name], "description": _plain(said)}
    return {"type": "object", "description": _plain(text), "properties": keys, "required": list(keys)}


def _value(kind: Any, shared: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {**_value(inner[0], shared), "description": _plain(inner[1])}
    if origin in (Union, UnionType):
        (known,) = (_value(each, shared) for each in inner if each is not NoneType)
        return {"anyOf": [known, {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(inner)}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        shared.setdefault(kind.__name__, _object(kind, shared, {}))
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _value(inner[1], shared)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _value(inner[0], shared)}
    return _PLAIN[kind]


def _plain(text: str) -> str:
    """The first paragraph of a docstring, without its marks, on one line."""
    words = " ".join(text.partition("\n\n")[0].split())
    return re.sub(r"\bNone\b", "null", re.sub(r":\w+:`([^`]*)`|``", r"\1", words))
