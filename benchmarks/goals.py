"""The goals of this project's speed, and whether figures of one run meet them; pure."""

from __future__ import annotations

import statistics
from typing import Any

from measure import ratio

OURS, DURABLE = "ours, memory step", "ours, durable step"


def row_of(found: dict[str, Any], contender: str, state: str) -> dict[str, Any]:
    """The figures of a contender with a state; {} where it was not run or could not."""
    for row in found["rows"]:
        if (row["contender"], row["state"]) == (contender, state) and "error" not in row:
            return dict(row)
    return {}


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each goal with what was measured; ``met`` is False also where nothing was, and ``value`` says so."""
    even, many = (row_of(found, OURS, state) for state in ("64 tensors", "20,000 tensors"))
    sent = row_of(found, DURABLE, "LoRA")
    restore, sharded = found.get("restore", {}), found.get("sharded", {})
    http = found.get("clients", {}).get("clients", {}).get("http", {})
    drain = http.get("ours", {})

    def stall(row: dict[str, Any]) -> float | None:
        return ratio(row["stall"], row["memcpy"]) if row else None

    def firsts(row: dict[str, Any]) -> float | None:
        return max(row["first_saves"]) / row["cold_copy"] if row else None

    raw = [rate for name, row in http.items() if not name.startswith("ours") and (rate := row.get("rate_to_boto3"))]
    peers = [sharded.get(f"sharded_stall_ratio_to_dcp_{kind}") for kind in ("thread", "process")]
    return [
        goal("eager stall / memcpy, 64 tensors", "<=", 1.1, stall(even)),
        goal("the same, 20,000 tensors", "<=", 1.5, stall(many)),
        goal("the slowest of the first three saves / cold copy", "<=", 1.1, firsts(even)),
        goal(
            "restore from memory into parameters / memcpy, DCP",
            "<=",
            1.0,
            restore.get("restore_memory_ratio_to_memcpy"),
        ),
        goal("restore from S3: rate / raw boto3, DCP", ">=", 0.85, restore.get("restore_s3_rate_to_raw")),
        goal(
            "store of the drain: rate / the best raw client",
            ">=",
            0.95,
            drain["rate_to_boto3"] / max(raw) if drain else None,
        ),
        goal("the same: CPU s/GiB", "<=", 0.4, drain.get("cpu_s_per_GiB")),
        goal(
            "bytes sent for a LoRA step / all",
            "<=",
            0.05,
            statistics.median(sent["bytes"]) / (sent["MiB"] * (1 << 20)) if sent else None,
        ),
        goal(
            "sharded save / DCP thread, process: the greater",
            "<=",
            0.7,
            None if None in peers else max(map(float, peers)),
        ),
        goal("a Python loop beside a drain loses / beside the best raw client", "<=", 1.1, None),
        goal("step inflation while a capture or a drain runs", "<=", 0.02, None),
    ]


def goal(measure: str, relation: str, limit: float, value: float | None) -> dict[str, Any]:
    is_met = value is not None and (value <= limit if relation == "<=" else value >= limit)
    return {"measure": measure, "goal": f"{relation} {limit:g}", "value": value, "met": is_met}
