"""Figures of one run as a table of the terminal, and as docs/benchmarks.md with its plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from goals import CALL, SHARDED_CALL, split
from measure import ratio


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table of contenders."""
    head = [row["contender"], row["state"]]
    if "error" in row:
        return [*head, f"could not run: {row['error']}"[:160], *[""] * 8]
    sent = statistics.median(row["bytes"]) / (1 << 20)
    return [
        *head,
        row["where"],
        f"{statistics.median(row['stall']):.4f}",
        f"{ratio(row['stall'], row['memcpy']):.2f}",
        f"{ratio(row['done'], row['memcpy']):.2f}",
        f"{row['load'] / statistics.median(row['memcpy']):.2f}" if "load" in row else "-",
        f"{row['peak_MiB'] / row['MiB']:.2f}",
        f"{row['tmpfs_MiB'] / row['MiB']:.2f}",
        f"{statistics.median(row['requests']):.0f}",
        f"{sent / row['MiB']:.2f}",
    ]


COLUMNS = (
    "contender",
    "state",
    "ends in",
    "stall, s",
    "stall / memcpy",
    "until it is there / memcpy",
    "load / memcpy",
    "peak memory / state",
    "tmpfs / state",
    "S3 requests",
    "bytes sent / state",
)


def goal_cells(goal: dict[str, Any]) -> list[str]:
    value = "not measured" if goal["value"] is None else f"{goal['value']:.2f}"
    return [goal["measure"], goal["goal"], value, "yes" if goal["met"] else "no", goal["why"]]


def console(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{found['mebibytes']} MiB, median of {found['rounds']} rounds"
    tables = [(title, COLUMNS, map(cells, found["rows"])), ("Goals", GOALS, map(goal_cells, found["goals"]))]
    for name, columns, rows in tables:
        table = Table(title=name)
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        Console(width=180).print(table)


GOALS = ("measure", "goal", "measured", "met", "where the time of a miss goes")


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def plot(found: dict[str, Any]) -> str:
    """Bars of the stall beside the copy, as SVG; the scale ends at 10 times the copy."""
    rows = [row for row in found["rows"] if "error" not in row and row["state"] == "64 tensors"]
    height, left, scale, limit = 26, 290, 42.0, 10.0
    parts = []
    for number, row in enumerate(rows):
        times, y = ratio(row["stall"], row["memcpy"]), number * height
        colour = "#3949ab" if row["contender"].startswith("ours") else "#9e9e9e"
        width = min(times, limit) * scale
        parts += [
            f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(row["contender"])}</text>',
            f'<rect x="{left}" y="{y + 4}" width="{max(1.0, width):.0f}" height="18" fill="{colour}"/>',
            f'<text x="{left + width + 6:.0f}" y="{y + 17}">{times:.2f}</text>',
        ]
    size = f'width="800" height="{len(rows) * height}" viewBox="0 0 800 {len(rows) * height}"'
    style = 'font-family="sans-serif" font-size="13" fill="#777"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def uploads(found: dict[str, Any]) -> Iterator[list[str]]:
    for scheme, rows in found["clients"]["clients"].items():
        for name, row in rows.items():
            if "error" in row:
                yield [scheme, name, f"could not run: {row['error']}"[:120], ""]
            else:
                yield [scheme, name, f"{row['rate_to_boto3']:.2f}", f"{row['cpu_s_per_GiB']:.2f}"]


def restores(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in found["restore"]["ways"].items():
        yield [RESTORES[name], *(f"{row[key]:.2f}" for key in ("seconds", "to_copy", "to_raw", "cpu_s_per_GiB"))]


def planning(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, key in PLANS.items():
        yield [name, f"{found['planning'][key]:.2f}"]


def first_saves(found: dict[str, Any]) -> Iterator[list[str]]:
    for way, row in found["first"]["ways"].items():
        yield [way, *(f"{each:.2f}" for each in row["saves"]), split(row["parts"])]


def overlapped(script: str) -> Callable[[dict[str, Any]], Iterator[list[str]]]:
    def rows(found: dict[str, Any]) -> Iterator[list[str]]:
        figures = found[script]
        yield ["a step without a save, ms", f"{figures['step_ms']:.1f}"]
        yield ["our share of the call of an overlapped save, ms", f"{figures['share_ms']:.2f}"]
        yield ["the optimizer waits for it, ms a step", f"{figures['waited_ms']:.3f}"]
        for mode, name in BESIDE.items():
            shown = f"{figures['inflation'][mode]:+.1%} ± {figures['inflation_error'][mode]:.1%}"
            yield [f"a step {name}", shown]

    return rows


def calls(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, script in (("full", CALL), ("sharded", SHARDED_CALL)):
        if "share_ms" in (figures := found.get(script, {})):
            yield [name, f"{figures['share_ms']:.2f}", split(figures["parts_ms"])]


def beside(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in found["loop"]["ways"].items():
        yield [name, *(f"{row[f'{key}_per_GiB']:.2f}" for key in ("lost_s", "cpu_s", "server_cpu_s"))]


def replication(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in found["replication"]["ways"].items():
        yield [name, *(f"{row[key]:.2f}" for key in ("rate_GiB_s", "cpu_s_per_GiB"))]


def restarts(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in found["restart"]["ways"].items():
        yield [name, f"{row['seconds']:.2f}", split(row["parts"])]


def recoveries(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, seconds in found["recovery"]["seconds"].items():
        yield [name, f"{seconds:.2f}"]


#: Reference of a step, by the name that ``overlap.py`` has for it.
BESIDE = {
    "overlapped": "beside its capture",
    "eager": "after an eager save",
    "drained": "after an eager save, beside its drain",
    "copied": "the same, beside one copy of as many bytes by another process",
    "uploaded": "the same, beside a raw client's upload of as many bytes by another process",
}
RESTORES = {
    "raw": "raw boto3, readinto, 8 threads",
    "floor_read": "a bare loop from memory: read, hash",
    "dcp_memory": "dcp.load from memory",
    "floor_map": "a bare loop from memory: map, hash, copy",
    "io_memory": "load_checkpoint from memory, and a copy",
    "dcp_s3": "dcp.load from S3",
    "io_s3": "load_checkpoint from S3, and a copy",
}
PLANS = {
    "a state": "plan_us",
    "the first with so many tensors": "first_us",
    "torch.save": "torch_save_us",
}


class Section(NamedTuple):
    """A part of the page: the figures of one script."""

    title: str
    script: str
    text: str
    columns: tuple[str, ...]
    rows: Callable[[dict[str, Any]], Iterator[list[str]]]


SECTIONS = (
    Section(
        "Planning",
        "planning",
        "Processor time for each of 20,000 tensors before the copy; torch.save writes to memory.",
        ("what is planned", "us a tensor"),
        planning,
    ),
    Section(
        "The first saves",
        "first",
        "Eager saves, relative to a copy into untouched memory.",
        ("saves", "first", "second", "third", "the slowest of a round"),
        first_saves,
    ),
    Section(
        "The call of an overlapped save",
        CALL,
        "In a Lightning fit whose steps use more than the caches.",
        ("checkpoint", "our share, ms", "of this"),
        calls,
    ),
    Section(
        "Training steps beside a save",
        "overlap",
        "A Lightning fit on one thread, with AdamW. The slower of the two steps after a save counts; ± is the standard"
        " error of its median.",
        ("measure", "value"),
        overlapped("overlap"),
    ),
    Section(
        "The same, sharded",
        "overlap --sharded",
        "TieredModelParallelStrategy with FSDP2 and one rank, DCP's exchanges included.",
        ("measure", "value"),
        overlapped("overlap --sharded"),
    ),
    Section(
        "Restores",
        "restore",
        "Four times as many bytes as above, into parameters that exist. The raw client verifies nothing.",
        ("way", "seconds", "/ memcpy", "rate / raw client", "CPU s/GiB"),
        restores,
    ),
    Section(
        "After a kill",
        "restart",
        "From the start of the next process to the end of its first step.",
        ("way", "seconds", "of these"),
        restarts,
    ),
    Section(
        "A lost node",
        "recovery",
        "A sharded load by two ranks, one of which has lost its node's memory.",
        ("its part comes", "seconds"),
        recoveries,
    ),
    Section(
        "Uploads",
        "clients",
        "The rate relative to boto3's parts in the same round, and the client's processor time.",
        ("over", "client", "rate / boto3", "CPU s/GiB"),
        uploads,
    ),
    Section(
        "A Python loop beside an upload",
        "loop",
        "Time that the loop loses. Each raw client has its own process.",
        ("upload by", "lost, s/GiB", "CPU s/GiB", "server's CPU s/GiB"),
        beside,
    ),
    Section(
        "Replication",
        "replication",
        "Two processes, over the loopback interface, both ways at once. Only ours hashes and keeps the bytes.",
        ("way", "GiB/s each way", "CPU s/GiB, both ranks"),
        replication,
    ),
)


def section(each: Section, found: dict[str, Any]) -> str:
    figures = found.get(each.script)
    if figures is None:
        body = "Not measured in this run."
    elif "error" in figures:
        body = f"It could not be measured: {figures['error']}."
    else:
        body = markdown(each.columns, list(each.rows(found)))
    return f"## {each.title}\n\n{each.text}\n\n{body}"


def write(found: dict[str, Any], docs: Path) -> None:
    """docs/benchmarks.md and docs/benchmarks.svg."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    met = sum(goal["met"] for goal in found["goals"])
    sections = "\n\n".join(section(each, found) for each in SECTIONS)
    text = f"""# Benchmarks

Made by `make bench ARGS='{found["options"]}'` from one run, on {machine["date"]}: {machine["cores"]} cores,
{machine["memory_GiB"]} GiB, {machine["system"]}, no GPU; Python {machine["python"]}, {versions};
commit {machine["commit"]}; load {machine["load_before"]:.1f} before and {machine["load_after"]:.1f} after. The S3
server is on the same machine. [On a GPU](benchmarks-gpu.md).

## Stalls

States of {found["mebibytes"]} MiB (the GPT's is smaller), medians of {found["rounds"]} rounds, each beside a copy into
warm tensors by one thread. The load is into tensors that exist. Peak memory is anonymous memory of the trainer.
An overlapped save returns before it has copied the tensors.

![Stall beside a copy](benchmarks.svg)

{markdown(COLUMNS, [cells(row) for row in found["rows"]])}

{sections}

## Goals

The parts of each miss were timed in the same run.

{markdown(GOALS, [goal_cells(goal) for goal in found["goals"]])}

`goals_met={met} of {len(found["goals"])}`
"""
    (docs / "benchmarks.md").write_text(text)
    (docs / "benchmarks.svg").write_text(plot(found))
