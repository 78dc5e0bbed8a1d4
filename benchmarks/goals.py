"""The goals of this project's speed, whether figures of one run meet them, and where the time went; pure.

The reason of a miss is made of figures of the same run: see ``parts.py``. A goal that lacks its figures is missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from measure import ratio

OURS = "ours, memory step"
Judged = tuple[float, str]


class Goal(NamedTuple):
    """One goal: its measure, its limit, its script ("" for the contenders), and the judge of the script's figures."""

    measure: str
    relation: str
    limit: float
    script: str
    judge: Callable[[Mapping[str, Any]], Judged]


def row_of(found: Mapping[str, Any], contender: str, state: str) -> dict[str, Any]:
    """The figures of a contender with a state.

    Raises:
        KeyError: It was not run, or could not.
    """
    for row in found["rows"]:
        if (row["contender"], row["state"]) == (contender, state) and "error" not in row:
            return dict(row)
    raise KeyError(contender)


def split(parts: Mapping[str, float], unit: float = 1.0, name: str = "") -> str:
    """Parts in one line, those that do not show left out, as multiples of a unit."""
    shown = [f"{part} {value / unit:.2f}" for part, value in parts.items() if abs(value / unit) >= 0.005]
    return ", ".join(shown) + (f" (in {name})" if name else "")


def _stall(state: str) -> Callable[[Mapping[str, Any]], Judged]:
    def judge(found: Mapping[str, Any]) -> Judged:
        row = row_of(found, OURS, state)
        copy = statistics.median(row["memcpy"])
        hashing = f"; hashing makes the copy longer by {row['hashing_s'] / copy:.2f}"
        return ratio(row["stall"], row["memcpy"]), split(row["parts"], copy, "copies") + hashing

    return judge


def _first_saves(way: str) -> Callable[[Mapping[str, Any]], Judged]:
    def judge(found: Mapping[str, Any]) -> Judged:
        row = found["first"]["ways"][way]
        slowest = max(row["saves"])
        which = ("first", "second", "third")[row["saves"].index(slowest)]
        return slowest, f"the {which}; of the slowest of a round: {split(row['parts'], name='cold copies')}"

    return judge


def _planning(found: Mapping[str, Any]) -> Judged:
    figures = found["planning"]
    return figures["plan_us"], f"torch.save takes {figures['torch_save_us']:.1f}"


def _restore(way: str, way_in_text: str, floor: str) -> Callable[[Mapping[str, Any]], Judged]:
    def judge(found: Mapping[str, Any]) -> Judged:
        ways, copy = found["restore"]["ways"], found["restore"]["copy_s"]
        parts = split(ways[way]["parts"], copy, "copies")
        bare = f"a bare loop that does the same takes {ways[floor]['to_copy']:.2f}"
        return ways[way]["to_copy"], f"{way_in_text}: {parts}; {bare}"

    return judge


def _restore_s3(found: Mapping[str, Any]) -> Judged:
    ways = found["restore"]["ways"]
    ours, raw = ways["dcp_s3"], ways["raw"]
    used = f"CPU s/GiB {ours['cpu_s_per_GiB']:.2f}, of the raw client {raw['cpu_s_per_GiB']:.2f}"
    return ours["to_raw"], f"{split(ours['parts'], raw['seconds'], 'times of the raw client')}; {used}"


def _upload(found: Mapping[str, Any]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Ours, and the best raw client with its name."""
    rows = found["clients"]["clients"]["http"]
    raw = {name: row for name, row in rows.items() if not name.startswith("ours") and "error" not in row}
    best = max(raw, key=lambda name: float(raw[name]["rate_to_boto3"]))
    return rows["ours"], best, raw[best]


def _store_rate(found: Mapping[str, Any]) -> Judged:
    ours, name, best = _upload(found)
    shares = split(ours["shares"], 0.01, "% of its threads' time")
    used = f"CPU s/GiB {ours['cpu_s_per_GiB']:.2f}, of {name} {best['cpu_s_per_GiB']:.2f}"
    return ours["rate_to_boto3"] / best["rate_to_boto3"], f"{shares}; {used}"


def _store_cpu(found: Mapping[str, Any]) -> Judged:
    ours, name, best = _upload(found)
    shares = split(ours["shares"], 0.01, "% of its threads' time")
    return ours["cpu_s_per_GiB"], f"{shares}; {name} uses {best['cpu_s_per_GiB']:.2f}"


def _sharded(found: Mapping[str, Any]) -> Judged:
    figures = found["sharded"]
    value, kind = max((figures[f"sharded_stall_ratio_to_dcp_{kind}"], kind) for kind in ("thread", "process"))
    parts = split(figures["parts"], figures[f"{kind}_s"], f"stalls of DCP's {kind}")
    return value, f"{parts}; one copy of the same into warm memory takes {figures['copy_s'] / figures[f'{kind}_s']:.2f}"


def _loop(found: Mapping[str, Any]) -> Judged:
    ways = dict(found["loop"]["ways"])
    ours = ways.pop("ours")
    best = min(ways, key=lambda name: float(ways[name]["lost_s_per_GiB"]))
    shown = {"ours": ours, best: ways[best]}
    why = "; ".join(
        f"{name} loses {row['lost_s_per_GiB']:.2f} s/GiB and uses {row['cpu_s_per_GiB']:.2f} CPU s/GiB,"
        f" the server {row['server_cpu_s_per_GiB']:.2f}"
        for name, row in shown.items()
    )
    return ours["lost_s_per_GiB"] / ways[best]["lost_s_per_GiB"], why


def _inflation(found: Mapping[str, Any]) -> Judged:
    figures = found["overlap"]
    inflation, errors = figures["inflation"], figures["inflation_error"]
    shown = {mode: f"{inflation[mode]:+.1%} ± {errors[mode]:.1%}" for mode in inflation}
    why = (
        f"beside a capture {shown['overlapped']}; after an eager save {shown['eager']}, beside its drain"
        f" {shown['drained']}, or beside a raw client's upload by another process {shown['uploaded']};"
        f" {figures['cores']} cores, training on 1"
    )
    return max(inflation["overlapped"], inflation["drained"]), why


def _overlapped_call(script: str) -> Callable[[Mapping[str, Any]], Judged]:
    def judge(found: Mapping[str, Any]) -> Judged:
        figures = found[script]
        return figures["share_ms"], split(figures["parts_ms"], name="ms")

    return judge


def _replication(found: Mapping[str, Any]) -> tuple[float, float, str]:
    """The rate of ours, in GiB/s, and as a share of the socket's."""
    ways = found["replication"]["ways"]
    ours, bare, both = (ways[name] for name in ("ours", "socket", "ours, both ways at once"))
    used = f"CPU s/GiB {ours['cpu_s_per_GiB']:.2f}, of a socket {bare['cpu_s_per_GiB']:.2f}"
    why = f"{used}; a socket has {bare['rate_GiB_s']:.2f} GiB/s; both ways at once {both['rate_GiB_s']:.2f} each"
    return ours["rate_GiB_s"], ours["rate_GiB_s"] / bare["rate_GiB_s"], why


def _replication_rate(found: Mapping[str, Any]) -> Judged:
    rate, _, why = _replication(found)
    return rate, why


def _replication_share(found: Mapping[str, Any]) -> Judged:
    _, share, why = _replication(found)
    return share, why


def _recovery(found: Mapping[str, Any]) -> Judged:
    figures = found["recovery"]
    why = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in figures["seconds"].items())
    return figures["recovery_ratio_to_s3"], why


#: Commands as in a job: no saves or uploads of other kinds come between.
CALL, SHARDED_CALL = (f"{script} --modes overlapped --turns 80" for script in ("overlap", "overlap --sharded"))

GOALS = (
    Goal("eager stall / memcpy, 64 tensors", "<=", 1.1, "", _stall("64 tensors")),
    Goal("the same, 20,000 tensors", "<=", 3.0, "", _stall("20,000 tensors")),
    Goal("the slowest of a training's three first saves / cold copy", "<=", 1.1, "first", _first_saves("in a fit")),
    Goal("the same without a training, one right after another", "<=", 1.1, "first", _first_saves("alone")),
    Goal("planning, us a tensor", "<=", 10.0, "planning", _planning),
    Goal("our share of the call of an overlapped save, ms", "<=", 1.0, CALL, _overlapped_call(CALL)),
    Goal("step inflation while a capture or a drain runs", "<=", 0.02, "overlap", _inflation),
    Goal("sharded save / DCP thread, process: the greater", "<=", 0.7, "sharded", _sharded),
    Goal(
        "the call of an overlapped sharded save, ms",
        "<=",
        1.0,
        SHARDED_CALL,
        _overlapped_call(SHARDED_CALL),
    ),
    Goal(
        "restore from memory into parameters / memcpy, DCP",
        "<=",
        1.0,
        "restore",
        _restore("dcp_memory", "DCP's load", "floor_read"),
    ),
    Goal(
        "the same through CheckpointIO",
        "<=",
        1.5,
        "restore",
        _restore("io_memory", "load_checkpoint, and the copy", "floor_map"),
    ),
    Goal("restore from S3: rate / raw boto3, DCP", ">=", 0.85, "restore", _restore_s3),
    Goal("store of the drain: rate / the best raw client", ">=", 0.95, "clients", _store_rate),
    Goal("the same: CPU s/GiB", "<=", 0.4, "clients", _store_cpu),
    Goal("a Python loop beside a drain loses / beside the best raw client", "<=", 1.1, "loop", _loop),
    Goal("replication from one node to another, GiB/s", ">=", 1.5, "replication", _replication_rate),
    Goal("the same / a bare socket", ">=", 0.75, "replication", _replication_share),
    Goal("recovery of a lost node from a peer / from S3", "<=", 1.0, "recovery", _recovery),
)


def judged(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal with what was measured, and for each that is not met, why."""
    return [_judged(goal, found) for goal in GOALS]


def _judged(goal: Goal, found: Mapping[str, Any]) -> dict[str, Any]:
    value: float | None = None
    try:
        value, why = goal.judge(found)
    except KeyError:
        failed = found.get(goal.script, {}).get("error")
        why = f"its benchmark failed: {failed}" if failed else "it was not measured in this run"
    is_met = value is not None and (value <= goal.limit if goal.relation == "<=" else value >= goal.limit)
    limit = f"{goal.relation} {goal.limit:g}"
    return {"measure": goal.measure, "goal": limit, "value": value, "met": is_met, "why": "" if is_met else why}
