"""The command that looks at this node, its durable tier and its network before a training needs them.

Probes measure (``probe_*``), pure functions judge what was measured (``judge_*``, ``rights``), and this shows it. A
probe writes below ``.tiered/doctor/`` alone, and removes what it wrote.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.doctor.facts import NOWHERE, StateSize
from tiered_checkpoint_io.cli.options import SERVER, SHM, Json, MemoryDir, Server, wrong_use
from tiered_checkpoint_io.inventory.roots import all_roots
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?", re.IGNORECASE)


def doctor(
    dirpath: Annotated[
        str | None,
        typer.Argument(help="The durable tier; by default that of the last run on this node, if there is just one."),
    ] = None,
    memory_dir: MemoryDir = SHM,
    server: Server = SERVER,
    state_size: Annotated[
        str | None,
        typer.Option(help="Of one checkpoint on this node, such as 40GiB; the last run's by default."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="Another node, to find the interface that reaches it.", envvar="MASTER_ADDR")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure the throughput.")] = False,
    as_json: Json = False,
) -> None:
    """Looks at this node, the durable tier and the network, and says what to mend.

    Each right on the durable tier is tried below .tiered/doctor/, which is emptied again. "fail" is what saves or
    restarts fail for, and gives exit status 1; "warn" is what makes them worse than they could be.
    """
    # Not before: the drain imports all commands, and has to be small.
    from tiered_checkpoint_io.cli.doctor.probe_node import last_configs, last_state
    from tiered_checkpoint_io.cli.doctor.visit import Visit

    size = _bytes_of(state_size)
    configs = last_configs(all_roots(memory_dir)) if os.path.isdir(memory_dir) else {}
    config, root = _config(configs, dirpath, server)
    config = replace(config, memory_dir=os.path.abspath(memory_dir))
    state = StateSize(size, "given") if size is not None else last_state(root) if root is not None else StateSize()
    visit = Visit(config, state)
    visit.node()
    if config.dirpath == NOWHERE:
        visit.unnamed(sorted({each.dirpath for each in configs.values()}))
    else:
        visit.durable(quick=quick)
    visit.network(peer)
    (visit.as_json if as_json else visit.show)()
    raise typer.Exit(1 if visit.has_failures else 0)


def _config(
    configs: dict[Path, TieredCheckpointConfig],
    dirpath: str | None,
    server: Server,
) -> tuple[TieredCheckpointConfig, Path | None]:
    """The configuration to look at, and the memory of the run that had it: with its other options, where one is there.

    Without a dirpath, that of the only run.
    """
    given = {key: value for key, value in server.keys.items() if value is not None}
    wanted = server.config(dirpath) if dirpath is not None else None
    dirpaths = {each.dirpath for each in configs.values()}
    if wanted is None and len(dirpaths) != 1:
        if given:
            raise typer.BadParameter("options of a server need its dirpath", param_hint="DIRPATH")
        return server.config(NOWHERE), None
    meant = wanted.dirpath if wanted is not None else next(iter(dirpaths))
    fitting = [root for root, each in configs.items() if each.dirpath == meant]
    if not fitting:
        assert wanted is not None
        return wanted, None
    with wrong_use():
        last = server.patient(TieredCheckpointConfig.from_any(configs[fitting[-1]], **given))
    return last, fitting[-1]


def _bytes_of(text: str | None) -> int | None:
    """``40GiB``, ``40G`` or ``42949672960``; KB, MB and so on are meant as powers of 1,000."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match:
        base = 1000 if (match[3] or "").lower() == "b" and match[2] else 1024
        size = int(float(match[1]) * base ** _UNITS[match[2].upper()])
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size", param_hint="--state-size: such as 40GiB")
    return size
