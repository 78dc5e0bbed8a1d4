"""Figures of one run as a table of the terminal, and as docs/benchmarks.md with its plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

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
        f"{statistics.median(row['stall']):.3f}",
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


def write(found: dict[str, Any], docs: Path) -> None:
    """docs/benchmarks.md and docs/benchmarks.svg."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    met = sum(goal["met"] for goal in found["goals"])
    clients = found.get("clients", {}).get("clients", {})
    uploads = [
        [
            scheme,
            name,
            *(
                [f"could not run: {row['error']}"[:120], ""]
                if "error" in row
                else [f"{row['rate_to_boto3']:.2f}", f"{row['cpu_s_per_GiB']:.2f}"]
            ),
        ]
        for scheme, rows in clients.items()
        for name, row in rows.items()
    ]
    if not uploads:
        uploads = [["-", "not measured in this run", "", ""]]
    text = f"""# Benchmarks

Made by `make bench ARGS='{found["options"]}'` from one run, on {machine["date"]}: {machine["cores"]} cores,
{machine["memory_GiB"]} GiB, {machine["system"]}, no GPU; Python {machine["python"]}, {versions};
commit {machine["commit"]}. The load was {machine["load_before"]:.1f} before and {machine["load_after"]:.1f} after;
where it is above the number of cores, other work ran beside it, and only large factors mean anything. CUDA is not
measured. The S3 server is on the same machine, and uses the same cores.

## How long training waits

States of {found["mebibytes"]} MiB (the GPT is smaller), medians of {found["rounds"]} rounds, each beside a copy into
warm tensors by one thread in the same process. The load is into tensors that exist, once. Peak memory is anonymous
memory of the training process.

![Stall beside a copy](benchmarks.svg)

{markdown(COLUMNS, [cells(row) for row in found["rows"]])}

## Uploads

The rate beside boto3's parts in the same round, and processor seconds a GiB of the client. See
[the choice of the S3 client](design/0001-s3-client.md).

{markdown(("over", "client", "rate / boto3", "CPU s/GiB"), uploads)}

## Goals

{markdown(GOALS, [goal_cells(goal) for goal in found["goals"]])}

`goals_met={met} of {len(found["goals"])}`
"""
    (docs / "benchmarks.md").write_text(text)
    (docs / "benchmarks.svg").write_text(plot(found))
