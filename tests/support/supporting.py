"""Settings for support cases, which tests need: the environment variable, set while a configuration is made."""

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import fields

from tiered_checkpoint_io.model.config import VARIABLE, Support, TieredCheckpointConfig

NAMES = {each.name for each in fields(Support)}
#: Threads that build at the same time would give the variable back in another order than they set it.
_TURN = threading.RLock()


@contextlib.contextmanager
def supported(**settings):
    """Adds these settings to the variable, for configurations that the block makes."""
    before = os.environ.get(VARIABLE)
    entries = [before or "", *(f"{name}={value}" for name, value in settings.items())]
    os.environ[VARIABLE] = ",".join(filter(None, entries))
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def build(make, *arguments, **options):
    """Calls ``make``; what is a setting, among the options or in a mapping, goes into the variable meanwhile."""
    settings = {name: options.pop(name) for name in NAMES & options.keys()}
    blocks = []
    for each in arguments:
        if isinstance(each, Mapping) and NAMES & each.keys():
            settings = {**{name: each[name] for name in NAMES & each.keys()}, **settings}
            each = {key: each[key] for key in each if key not in NAMES}  # noqa: PLW2901
        blocks.append(each)
    # A configuration that is there keeps its settings.
    blocks = [each.with_support(**settings) if isinstance(each, TieredCheckpointConfig) else each for each in blocks]
    with _TURN, supported(**settings):
        return make(*blocks, **options)
