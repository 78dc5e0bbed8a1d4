"""The recommended settings, as YAML."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields

from tiered_checkpoint_io.cli.doctor.facts import Setting
from tiered_checkpoint_io.model.config import BLOCK, TieredCheckpointConfig


def differing(settings: Iterable[Setting]) -> list[Setting]:
    """Those whose value is not the default."""
    defaults = {field.name: field.default for field in fields(TieredCheckpointConfig)}
    return [each for each in settings if each.value != defaults[each.key]]


def as_yaml(settings: Iterable[Setting]) -> list[str]:
    """The lines of a block ``s3_checkpointing`` with the settings that differ from the defaults; none where none do."""
    # JSON's spelling of a number or a text is YAML's, too.
    lines = [f"  {each.key}: {json.dumps(each.value)}  # {each.reason}" for each in differing(settings)]
    return [f"{BLOCK}:", *lines] if lines else []
