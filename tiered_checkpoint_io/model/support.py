"""Settings for support cases and tests: one environment variable, no keys of the configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal

from tiered_checkpoint_io.clock import DURABLE_TIMEOUT_S, PENDING_TIMEOUT_S, SWEEP_AGE_S, WAIT_TIMEOUT_S
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.numbers import did_you_mean

#: Holds settings such as ``wait_timeout_s=60,drain=thread``.
VARIABLE = "TIERED_CHECKPOINT_SUPPORT"
_DAY_S = 24 * 3600
_RANGES = {
    "max_pending": (1, 1_000),
    "durable_timeout_s": (1, _DAY_S),
    "pending_timeout_s": (1, _DAY_S),
    "wait_timeout_s": (1, 7 * _DAY_S),
    "sweep_age_s": (1, 7 * _DAY_S),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Settings that a job needs only if a maintainer asks for them.

    Attributes:
        drain: Upload from a ``process`` of its own, or from a ``thread`` of the trainer, as always for ``memory://``.
        max_pending: Checkpoints that may wait for the durable tier at once; a further one stays in memory.
        durable_timeout_s: Bound of a restart's wait for a durable tier that does not answer, seconds.
        pending_timeout_s: Bound of a save's wait for a durable tier that does not answer, seconds. Then the checkpoint
            stays in memory, and training continues.
        wait_timeout_s: Bound of every wait for the durable tier, seconds.
        sweep_age_s: Age at which objects that no manifest names are removed, seconds.

    Raises:
        ConfigError: A value is not allowed.
    """

    drain: Literal["process", "thread"] = "process"
    max_pending: int = 2
    durable_timeout_s: int = DURABLE_TIMEOUT_S
    pending_timeout_s: int = PENDING_TIMEOUT_S
    wait_timeout_s: int = WAIT_TIMEOUT_S
    sweep_age_s: int = SWEEP_AGE_S

    def __post_init__(self) -> None:
        if self.drain not in ("process", "thread"):
            _refuse(f"drain is {self.drain!r}", "allowed: process, thread")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                _refuse(f"{name} is {value!r}", f"allowed: a whole number from {low} to {high}")

    @classmethod
    def from_environment(cls) -> Support:
        """Returns the settings that the environment variable has; without it, the defaults.

        Raises:
            ConfigError: The variable has an unknown name (the error names the nearest one), or a value is not allowed.
        """
        known = [each.name for each in fields(cls)]
        given: dict[str, int | str] = {}
        for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
            name, _, value = (part.strip() for part in entry.partition("="))
            if name not in known:
                _refuse(f"unknown name {name!r}", did_you_mean(name, known))
            given[name] = int(value) if value.isdecimal() else value
        return cls(**given)  # type: ignore[arg-type] # checked there


def _refuse(what: str, hint: str) -> None:
    raise ConfigError(f"{VARIABLE}: {what}", hint=hint)
