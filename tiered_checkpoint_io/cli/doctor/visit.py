"""One visit: what is measured, what that means, and how it is shown."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tiered_checkpoint_io.cli.doctor import probe_durable
from tiered_checkpoint_io.cli.doctor.facts import NOWHERE, Check, RateFacts, Setting, StateSize
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
from tiered_checkpoint_io.cli.doctor.probe_node import probe_node
from tiered_checkpoint_io.cli.doctor.rights import policy
from tiered_checkpoint_io.cli.documents import Examined
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.engine.replication.network import interface_towards, megabits_of
from tiered_checkpoint_io.errors import TieredCheckpointError, UsageError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import BLOCK, TieredCheckpointConfig


class Visit:
    """What is found."""

    def __init__(self, config: TieredCheckpointConfig, state: StateSize) -> None:
        self._config, self._state = config, state
        self.checks: list[Check] = []
        self._missing: list[dict[str, Any]] = []
        self._settings: list[Setting] = []
        self._rate: RateFacts | None = None

    def node(self) -> None:
        node = probe_node(self._config)
        self.checks += judge_node(node, self._state, self._config)
        self._settings += recommend_for_node(node, self._state, self._config)

    @property
    def has_failures(self) -> bool:
        return any(each.status == "fail" for each in self.checks)

    def network(self, peer: str | None) -> None:
        wanted = peer is not None or self._config.replication_factor > 1
        try:
            found = interface_towards(peer or "")
        except UsageError as error:
            self.checks.append(Check("network", "fail", "replication", error.message, error.hint or ""))
            return
        megabits = megabits_of(found.name) if found is not None else 0
        self.checks += judge_network(found, megabits, self._state, wanted=wanted)

    def unnamed(self, known: Sequence[str]) -> None:
        """No durable tier is named; ``known`` are those of runs on this node."""
        what = f"none is named; runs on this node: {', '.join(known) or 'none'}"
        self.checks.append(Check("durable", "warn", "durable tier", what, "name one: tiered-ckpt doctor DIRPATH"))

    def durable(self, *, quick: bool) -> None:
        try:
            checks = self._bucket() if ids.is_s3_url(self._config.dirpath) else self._other()
        except TieredCheckpointError as error:
            checks = judge_refusal(error)
        self.checks += checks
        # Where one small request fails, large ones do too; and no directory is made for a measurement.
        if quick or self._is_absent or any(each.status == "fail" for each in checks):
            return
        try:
            rate = probe_durable.rates(self._config)
        except TieredCheckpointError as error:
            self.checks.append(Check("durable", "fail", "throughput", error.message, error.hint or "try again"))
            return
        self._rate = rate
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
        lines = as_yaml(self._settings)
        if lines:
            say("\nRecommended settings:")
        for line in lines:
            say(printable(line))

    def as_json(self) -> None:
        """The same as one document."""
        document = Examined(
            dirpath=self._config.dirpath if self._config.dirpath != NOWHERE else None,
            memory_dir=self._config.memory_dir,
            state_size_bytes=self._state.size,
            upload_bytes_per_s=round(self._rate.up) if self._rate is not None else None,
            download_bytes_per_s=round(self._rate.down) if self._rate is not None else None,
            checks=self.checks,
            missing_policy=policy(self._missing) if self._missing else None,
            recommended=differing(self._settings),
        )
        write_json("doctor", document)


def differing(settings: Iterable[Setting]) -> list[Setting]:
    """Those whose value is not the default."""
    defaults = {field.name: field.default for field in fields(TieredCheckpointConfig)}
    return [each for each in settings if each.value != defaults[each.key]]


def as_yaml(settings: Iterable[Setting]) -> list[str]:
    """The lines of a block ``s3_checkpointing`` with the settings that differ from the defaults; none where none do."""
    # JSON's spelling of a number or a text is YAML's, too.
    lines = [f"  {each.key}: {json.dumps(each.value)}  # {each.reason}" for each in differing(settings)]
    return [f"{BLOCK}:", *lines] if lines else []
