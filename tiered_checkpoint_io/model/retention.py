"""Retention on the durable tier: the policies as data, and one pure decision.

Checkpoints of one training step are one *unit*, kept or removed together: averages and weights, the checkpoints of
several process groups, and those of two callbacks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, TypeAlias, cast

from tiered_checkpoint_io.errors import ConfigError, did_you_mean
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Kind, Manifest

_MOST = 1 << 40
_EXAMPLE = "a mapping such as {latest: 3, every_steps: 1000, best: {best: 2, metric: val_loss, mode: min}}, or a list"


# ----------------------------------------------------------------------------------- checkpoints
UnitKey: TypeAlias = int | str


def unit_of(name: str, step: int) -> UnitKey:
    """Returns the key of a checkpoint's unit: its step, or its name if the step is not known (-1)."""
    return step if step >= 0 else name


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Facts about one checkpoint or alias for the decision: see :class:`Content`."""

    name: str
    save_id: str
    step: int = -1
    created: float = 0.0
    kind: Kind = "full"
    resumable: bool = True
    size: int = 0
    #: Monitored value of a ModelCheckpoint, by its name.
    metrics: Mapping[str, float] = field(default_factory=dict)
    alias_of: str | None = None
    #: True if it is a copy that moves on with the run, as ``last.ckpt``.
    is_copy: bool = False
    #: True while it is overwritten.
    is_changing: bool = False

    @property
    def unit(self) -> UnitKey:
        """Key of the checkpoints that are kept or removed together with this one."""
        return unit_of(self.name, self.step)

    @classmethod
    def of(cls, manifest: Manifest) -> Checkpoint:
        """Returns the facts of a manifest."""
        content = manifest.settled
        return cls(
            name=manifest.name,
            save_id=content.save_id,
            step=content.step,
            created=content.created,
            kind=content.kind,
            resumable=content.resumable,
            size=content.size,
            metrics={content.metric.monitor: content.metric.value} if content.metric is not None else {},
            alias_of=manifest.alias_of,
            is_copy=bool(content.copy_of),
            is_changing=bool(manifest.previous),
        )


_Unit: TypeAlias = Sequence[Checkpoint]


# -------------------------------------------------------------------------------------- policies
@dataclass(frozen=True, slots=True)
class Latest:
    """Keeps the latest saves: so many steps that training can resume from, and so many of others."""

    latest: int

    def __post_init__(self) -> None:
        _check_count("latest", self.latest)

    @property
    def text(self) -> str:
        return f"latest {self.latest}"

    def keeps(self, units: Sequence[_Unit]) -> list[_Unit]:
        """Returns the units that the policy keeps, out of these units, the latest first."""
        whole = [unit for unit in units if _resumable(unit)]
        others = [unit for unit in units if not _resumable(unit)]
        return whole[: self.latest] + others[: self.latest]


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Keeps the first step at or after each multiple of so many."""

    every_steps: int

    def __post_init__(self) -> None:
        _check_count("every_steps", self.every_steps)

    @property
    def text(self) -> str:
        return f"every {self.every_steps} steps"

    def keeps(self, units: Sequence[_Unit]) -> list[_Unit]:
        """See :meth:`Latest.keeps`."""
        first: dict[int, _Unit] = {}
        for unit in sorted(units, key=lambda unit: unit[0].step):
            if unit[0].step >= self.every_steps:
                first.setdefault(unit[0].step // self.every_steps, unit)
        return list(first.values())


@dataclass(frozen=True, slots=True)
class Best:
    """Keeps the best by a metric; of equals the earliest."""

    best: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_count("best", self.best)
        # A value that a configuration did not fill in or resolve is the name of no metric: the best would be deleted.
        if not isinstance(self.metric, str) or not self.metric or self.metric == "???" or "${" in self.metric:
            _refuse("retention.metric", self.metric, "the name of a metric, such as val_loss")
        if self.mode not in ("min", "max"):
            _refuse("retention.mode", self.mode, "min or max")

    @property
    def text(self) -> str:
        return f"best {self.best} by {self.metric} ({self.mode})"

    def keeps(self, units: Sequence[_Unit]) -> list[_Unit]:
        """See :meth:`Latest.keeps`; without a value of the metric, and with one that is no number, none."""
        sign = 1 if self.mode == "min" else -1
        rated = []
        for unit in reversed(units):
            values = [sign * each.metrics[self.metric] for each in unit if self.metric in each.metrics]
            known = [value for value in values if not math.isnan(value)]
            if known:
                rated.append((min(known), unit))
        # The sort is stable.
        return [unit for _, unit in sorted(rated, key=lambda pair: pair[0])[: self.best]]


Policy: TypeAlias = Latest | EverySteps | Best
#: Policies as a user may write them; a configuration holds a tuple of them.
Policies: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any] | Policy]
_POLICIES: tuple[type[Policy], ...] = (Latest, EverySteps, Best)
_BY_KEY: dict[str, type[Policy]] = {fields(each)[0].name: each for each in _POLICIES}


# -------------------------------------------------------------------------------------- decision
def kept(checkpoints: Iterable[Checkpoint], policies: Sequence[Policy]) -> dict[str, tuple[str, ...]]:
    """Returns the reasons to keep each of all checkpoints and aliases; one without a reason is to be removed.

    Under any policies, these stay: the newest resumable checkpoint of each payload, and the newest resumable one that
    is named last; aliases and their targets; copies such as ``last.ckpt``, except those that the run has replaced;
    checkpoints that are being overwritten. All checkpoints of one step stay or go together. Without a policy all stay.
    """
    there = list(checkpoints)
    units = _units(there)
    reasons: dict[str, list[str]] = {each.name: [] for each in there}

    def give(members: Iterable[Checkpoint], reason: str) -> None:
        for each in members:
            reasons[each.name].append(reason)

    good = sorted((each for unit in units for each in unit if each.resumable), key=lambda each: each.save_id)
    newest = {each.kind: each for each in good}
    for unit in units:
        if any(each in unit for each in newest.values()):
            give(unit, "newest")
    for policy in policies:
        for unit in policy.keeps(units):
            give(unit, policy.text)
    # A checkpoint named last is no copy if its step is not among the best.
    named_last = [each for each in good if ids.is_last(each.name)]
    give(named_last[-1:], "the newest that is named last")
    moved_on = _moved_on(there)
    for each in there:
        if each.name in moved_on:
            pass
        elif each.alias_of is not None:
            give([each], f"alias of {each.alias_of}")
            give((target for target in there if target.name == each.alias_of), f"target of {each.name}")
        elif each.is_copy:
            give([each], "a copy, which the run replaces")
        if each.is_changing:
            give([each], "being overwritten")
        if not policies:
            give([each], "no policy")
    for unit in units:
        # Policies judge a step by all of its checkpoints, and training may resume only from all of them.
        if any(reasons[each.name] for each in unit):
            give((each for each in unit if not reasons[each.name]), "another of its step is kept")
    return {name: tuple(dict.fromkeys(why)) for name, why in reasons.items()}


def _moved_on(checkpoints: Iterable[Checkpoint]) -> set[str]:
    """Returns copies and aliases named "last" that the run has replaced: the names differ only by numbers."""
    later: set[str] = set()
    found = set()
    for each in sorted(checkpoints, key=lambda each: each.save_id, reverse=True):
        if each.is_copy or (each.alias_of is not None and ids.is_last(each.name)):
            series = ids.series_of(each.name)
            found |= {each.name} if series in later else set()
            later.add(series)
    return found


def _units(checkpoints: Iterable[Checkpoint]) -> list[_Unit]:
    """Returns the units that policies decide on, the latest save first; aliases and copies are no saves."""
    units: defaultdict[int | str, list[Checkpoint]] = defaultdict(list)
    for each in checkpoints:
        if each.alias_of is None and not each.is_copy:
            units[each.unit].append(each)
    return sorted(units.values(), key=lambda unit: max(each.save_id for each in unit), reverse=True)


def _resumable(unit: _Unit) -> bool:
    return any(each.resumable for each in unit)


# --------------------------------------------------------------------------------- configuration
def policies_from(value: object) -> tuple[Policy, ...]:
    """Returns policies from a policy, a mapping, a list of both, or None for none; raises ConfigError for others."""
    if value is None or value == {}:
        return ()
    several = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return tuple(policy for each in several for policy in _each(each))


def _each(raw: object) -> list[Policy]:
    if isinstance(raw, _POLICIES):
        return [raw]
    if not isinstance(raw, Mapping) or not raw:
        _refuse("retention", raw, _EXAMPLE)
    # {best: 3, metric: val_loss}: the keys of one policy side by side.
    own = {key: raw[key] for key in ("metric", "mode") if key in raw}
    found: list[Policy] = []
    for key, value in raw.items():
        kind = _BY_KEY.get(str(key))
        if kind is None and key not in own:
            raise ConfigError(f"unknown key {key!r} in retention", hint=did_you_mean(key, (*_BY_KEY, "metric", "mode")))
        if kind is Best:
            found += _best(value, own)
        elif kind is not None:
            found.append(cast("Callable[[Any], Policy]", kind)(value))
    if own and Best not in {type(each) for each in found}:
        _refuse("retention", dict(raw), "metric and mode beside best alone")
    return found


def _best(value: object, own: Mapping[str, Any]) -> list[Policy]:
    """Returns policies for the best: from a number and the other keys, a mapping, or a list of these."""
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    found: list[Policy] = []
    for each in several:
        raw = {**own, **(each if isinstance(each, Mapping) else {"best": each})}
        if not {"best", "metric"} <= raw.keys() <= {"best", "metric", "mode"}:
            _refuse("retention.best", each, "{best: 3, metric: val_loss, mode: min}")
        found.append(Best(**raw))
    return found


def _check_count(key: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        _refuse(f"retention.{key}", value, "a whole number above 0")


def _refuse(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{key} is {value!r}", hint=f"allowed: {allowed}")
