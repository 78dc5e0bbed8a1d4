"""The command that looks at this node, its durable tier and its network before a training needs them.

Probes measure (``probe_*``), pure functions judge what was measured (``judge_*``, ``rights``), and this shows it. A
probe writes below ``.tiered/doctor/`` alone, and removes what it wrote.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tiered_checkpoint_io.cli.doctor import probe_durable, settings
from tiered_checkpoint_io.cli.doctor.facts import Check, Setting, State
from tiered_checkpoint_io.cli.doctor.judge_durable import (
    judge_bucket,
    judge_folder,
    judge_refusal,
    judge_tries,
    missing_policy,
    recommend_for_bucket,
)
from tiered_checkpoint_io.cli.doctor.judge_network import judge_network, judge_rate, recommend_for_rate
from tiered_checkpoint_io.cli.doctor.judge_node import judge_node, recommend_for_node
from tiered_checkpoint_io.cli.doctor.probe_network import probe_network
from tiered_checkpoint_io.cli.doctor.probe_node import last_configs, last_state, probe_node
from tiered_checkpoint_io.cli.doctor.rights import policy
from tiered_checkpoint_io.cli.options import (
    SHM,
    TIMEOUT_S,
    Endpoint,
    Json,
    MemoryDir,
    Profile,
    Region,
    Timeout,
    config_of,
    wrong_use,
)
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.cli.roots import all_roots
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?", re.IGNORECASE)
#: Stands for a durable tier where none is named: nothing is asked of it.
_NOWHERE = "/"


def doctor(
    dirpath: Annotated[
        str | None,
        typer.Argument(help="The durable tier; by default that of the last run on this node, if there is just one."),
    ] = None,
    memory_dir: MemoryDir = SHM,
    endpoint_url: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    state_size: Annotated[
        str | None,
        typer.Option(help="Of one checkpoint on this node, such as 40GiB; the last run's by default."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="Another node, for the way to it; MASTER_ADDR by default.", envvar="MASTER_ADDR")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure the throughput.")] = False,
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Looks at this node, the durable tier and the network, and says what to mend.

    Each right on the durable tier is tried below .tiered/doctor/, which is emptied again. "fail" is what saves or
    restarts fail for, and gives exit status 1; "warn" is what makes them worse than they could be.
    """
    size = _bytes_of(state_size)
    configs = last_configs(all_roots(memory_dir)) if os.path.isdir(memory_dir) else {}
    config, root = _config(configs, dirpath, endpoint_url, region, profile, timeout)
    config = replace(config, memory_dir=os.path.abspath(memory_dir))
    state = State(size, "given") if size is not None else last_state(root) if root is not None else State()
    visit = _Visit(config, state)
    visit.node()
    if config.dirpath == _NOWHERE:
        known = ", ".join(sorted({each.dirpath for each in configs.values()}))
        what = f"none is named; runs on this node: {known or 'none'}"
        visit.checks.append(Check("durable", "warn", "durable tier", what, "name one: tiered-ckpt doctor DIRPATH"))
    else:
        visit.durable(quick=quick)
    has_peers = peer is not None or config.replication_factor > 1
    visit.checks += judge_network(probe_network(peer), state, wanted=has_peers)
    (visit.as_json if as_json else visit.show)()
    raise typer.Exit(1 if any(each.status == "fail" for each in visit.checks) else 0)


class _Visit:
    """What is found."""

    def __init__(self, config: TieredCheckpointConfig, state: State) -> None:
        self._config, self._state = config, state
        self.checks: list[Check] = []
        self._missing: list[dict[str, Any]] = []
        self._settings: list[Setting] = []

    def node(self) -> None:
        node = probe_node(self._config)
        self.checks += judge_node(node, self._state, self._config)
        self._settings += recommend_for_node(node, self._state, self._config)

    def durable(self, *, quick: bool) -> None:
        try:
            checks = self._bucket() if ids.is_s3_url(self._config.dirpath) else self._other()
        except TieredCheckpointError as error:
            checks = judge_refusal(error)
        self.checks += checks
        # What fails in the small fails in the large, too; and a directory that is not there is not made.
        if quick or self._is_absent or any(each.status == "fail" for each in checks):
            return
        try:
            rate = probe_durable.rates(self._config)
        except TieredCheckpointError as error:
            self.checks.append(Check("durable", "fail", "throughput", error.message, error.hint or "try again"))
            return
        self.checks += judge_rate(rate, self._state)
        self._settings += recommend_for_rate(rate, self._config)

    def _bucket(self) -> list[Check]:
        facts = probe_durable.bucket_facts(self._config)
        self._missing = missing_policy(facts, self._config)
        self._settings += recommend_for_bucket(facts)
        return judge_bucket(facts, self._config)

    def _other(self) -> Sequence[Check]:
        url = self._config.dirpath
        if self._is_absent:
            near = next(each for each in Path(url).parents if each.exists())
            return judge_folder(url, str(near), can_be_made=near.is_dir() and os.access(near, os.W_OK | os.X_OK))
        return judge_tries(probe_durable.tried(self._config), url)

    @property
    def _is_absent(self) -> bool:
        url = self._config.dirpath
        return ids.url_scheme(url) is None and not os.path.isdir(url)

    def show(self) -> None:
        """A line for each check, the missing statements, and the settings."""
        for number, group in enumerate(dict.fromkeys(each.group for each in self.checks)):
            say(f"{chr(10) if number else ''}{group}:")
            for each in self.checks:
                if each.group == group:
                    do = f" -> {each.do}" if each.do else ""
                    say(f"{each.status:<4}  {printable(f'{each.what}: {each.measured}{do}')}")
        if self._missing:
            say("\nAdd these IAM statements to the policy of the role or user that trains:")
            say(json.dumps(policy(self._missing), indent=2))
        lines = settings.as_yaml(self._settings)
        if lines:
            say("\nRecommended settings:")
        for line in lines:
            say(printable(line))

    def as_json(self) -> None:
        """The same as one document."""
        document = {
            "dirpath": self._config.dirpath if self._config.dirpath != _NOWHERE else None,
            "memory_dir": self._config.memory_dir,
            "state_size_bytes": self._state.size,
            "checks": [each._asdict() for each in self.checks],
            "missing_policy": policy(self._missing) if self._missing else None,
            "recommended": [each._asdict() for each in settings.differing(self._settings)],
        }
        write_json("doctor", document)


def _config(
    configs: dict[Path, TieredCheckpointConfig],
    dirpath: str | None,
    endpoint_url: str | None,
    region: str | None,
    profile: str | None,
    timeout: int,
) -> tuple[TieredCheckpointConfig, Path | None]:
    """The configuration to look at, and the memory of the run that had it: with its other options, where one is there.

    Without a dirpath, that of the only run.
    """
    given = {"endpoint_url": endpoint_url, "region": region, "profile": profile}
    named = {key: value for key, value in given.items() if value is not None}
    wanted = config_of(dirpath, endpoint_url, region, profile, timeout) if dirpath is not None else None
    dirpaths = {each.dirpath for each in configs.values()}
    if wanted is None and len(dirpaths) != 1:
        if named:
            raise typer.BadParameter("options of a server need its dirpath", param_hint="DIRPATH")
        return config_of(_NOWHERE, None, None, None, timeout), None
    meant = wanted.dirpath if wanted is not None else next(iter(dirpaths))
    fitting = [root for root, each in configs.items() if each.dirpath == meant]
    if not fitting:
        assert wanted is not None
        return wanted, None
    with wrong_use():
        last = TieredCheckpointConfig.from_any(configs[fitting[-1]], durable_timeout_s=timeout, **named)
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
