"""The command that tries the needs of saves, as a training does before its first batch, and advises."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import typer

from tiered_checkpoint_io.cli.options import Address, AnyDirpath, Memory, Output
from tiered_checkpoint_io.cli.output import show, write_json
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.stores import last_config
from tiered_checkpoint_io.inventory.node import roots_of
from tiered_checkpoint_io.logs import size_text
from tiered_checkpoint_io.memory.tier import spill_dir_of
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import place_of

_NOWHERE = "/"


@dataclass(frozen=True, slots=True)
class Check:
    """One try, its result, and what to do; ``warn`` if training begins all the same, ``fail`` if not."""

    what: str
    status: Literal["ok", "warn", "fail"]
    measured: str
    do: str | None = ""


@dataclass(frozen=True, kw_only=True)
class Doctor(Output, Address, Memory):
    """Tries everything that saves need of this node and of the durable tier, and says what to mend.

    The tries are those of a training before its first batch. An object below .tiered/preflight/ is written, read and
    deleted. The exit status is 1 if a try fails.
    """

    dirpath: AnyDirpath = None

    def run(self) -> None:
        """Prints a row for each try."""
        config = replace(self._config(), memory_dir=os.path.abspath(self.memory_dir))
        checks = _node(config) + (_durable(config) if self.dirpath is not None else [])
        if self.as_json:
            document = {
                "dirpath": self.dirpath and config.dirpath,
                "memory_dir": config.memory_dir,
                "checks": checks,
            }
            write_json("doctor", document)
        else:
            show(checks, {"status": "status", "what": "what", "found": "measured", "what to do": "do"})
        raise typer.Exit(any(each.status == "fail" for each in checks))

    def _config(self) -> TieredCheckpointConfig:
        """Returns the configuration of the last run on this node that saved to this dirpath; else the defaults."""
        given = self.config(_NOWHERE if self.dirpath is None else self.dirpath)
        named = {key: value for key, value in self.keys.items() if value is not None}
        roots = roots_of(self.memory_dir, place_of(given)) if os.path.isdir(self.memory_dir) else []
        last = last_config(roots[0]) if roots else None
        return replace(last, **named) if last is not None else given


def _node(config: TieredCheckpointConfig) -> list[Check]:
    # Not before: the drain imports all commands, and must not import torch.
    from tiered_checkpoint_io.engine.preflight import Need, judge_room, room_of

    try:
        room = room_of(config)
    except OSError as error:
        return [Check("memory tier", "fail", f"{config.memory_dir}: {error.strerror}", "make it, or name memory_dir")]
    memory = Check("memory tier", "ok", f"{config.memory_dir} can hold {size_text(room.memory)}")
    if not os.access(config.memory_dir, os.W_OK | os.X_OK):
        text = f"{memory.measured}; this user may not write there"
        memory = replace(memory, status="fail", measured=text, do="set its mode, or name another memory_dir")
    where = spill_dir_of(config.spill_dir)
    spill = Check("spill", "ok", f"{where} can hold {size_text(room.spill)}" if where is not None else "none")
    problems = judge_room(Need(0, 0, memory_steps=True, durable_steps=True), room, config)
    found = [
        Check(
            "room", "fail" if each.permanent else "warn", f"{each.error.message}: {each.consequence}", each.error.hint
        )
        for each in problems
    ]
    return [memory, spill, *found]


def _durable(config: TieredCheckpointConfig) -> list[Check]:
    from tiered_checkpoint_io.engine.preflight import try_durable

    failures = try_durable(config, SYSTEM, multipart=True)
    if not failures:
        return [Check("durable tier", "ok", f"{config.dirpath}: list, write, read and delete work")]
    return [
        Check(each.operation or "durable tier", "fail", f"{config.dirpath}: {each.message}", each.hint or "try again")
        for each in failures
    ]
