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
    """Returns one row of the table of contenders."""
    head = [row["contender"], row["state"]]
    if "error" in row:
        return [*head, f"could not run: {row['error']}"[:160], *[""] * 7]
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
)
#: State with which all contenders are compared; ours is measured with others as well.
COMPARED = "64 tensors"


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
    head, *body = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in (columns, *rows)]
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def stalls(found: dict[str, Any]) -> str:
    """Returns the contenders with one state, those that could not run, and ours with other states."""
    ran = [cells(row) for row in found["rows"] if "error" not in row]
    failed = [f"{row['contender']} could not run: {row['error'][:160]}." for row in found["rows"] if "error" in row]
    compared = [[name, *rest] for name, state, *rest in ran if state == COMPARED]
    # Times only: the rest is in proportion to the state.
    others = [[name, state, *times] for name, state, _, *times, _, _, _ in ran if state != COMPARED]
    tables = [
        markdown((COLUMNS[0], *COLUMNS[2:]), compared),
        *failed,
        "Other states:",
        markdown((*COLUMNS[:2], *COLUMNS[3:7]), others),
    ]
    return "\n\n".join(tables)


def plot(found: dict[str, Any]) -> str:
    """Returns bars of the stall relative to the copy, as SVG; the scale ends at 10 times the copy."""
    rows = [row for row in found["rows"] if "error" not in row and row["state"] == COMPARED]
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
    by_scheme = found["clients"]["clients"]
    for name in dict.fromkeys(name for rows in by_scheme.values() for name in rows):
        line = [name]
        for scheme in ("http", "https"):
            row = by_scheme.get(scheme, {}).get(name, {"error": "not measured"})
            if "error" in row:
                line += [f"could not run: {row['error']}"[:120], ""]
            else:
                line += [f"{row['rate_to_boto3']:.2f}", f"{row['cpu_s_per_GiB']:.2f}"]
        yield line


def restores(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, row in found["restore"]["ways"].items():
        yield [RESTORES[name], *(f"{row[key]:.2f}" for key in ("seconds", "to_copy", "to_raw", "cpu_s_per_GiB"))]


def planning(found: dict[str, Any]) -> Iterator[list[str]]:
    for name, key in PLANS.items():
        yield [name, f"{found['planning'][key]:.2f}"]


def first_saves(found: dict[str, Any]) -> Iterator[list[str]]:
    for way, row in found["first"]["ways"].items():
        yield [way, *(f"{each:.2f}" for each in row["saves"])]


def overlapped(found: dict[str, Any]) -> Iterator[list[str]]:
    both = [found["overlap"], found.get("overlap --sharded", {})]

    def line(name: str, shown: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(shown(figures) if "step_ms" in figures else "-" for figures in both)]

    yield line("a step without a save, ms", lambda figures: f"{figures['step_ms']:.1f}")
    yield line("our share of the call of an overlapped save, ms", lambda figures: f"{figures['share_ms']:.2f}")
    yield line("the optimizer waits for an overlapped save, ms a step", lambda figures: f"{figures['waited_ms']:.3f}")
    for mode, name in DURING.items():
        yield line(
            f"a step {name}",
            lambda figures, mode=mode: f"{figures['inflation'][mode]:+.1%} ± {figures['inflation_error'][mode]:.1%}",
        )


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


#: Name of a step, by the name that ``overlap.py`` has for it.
DURING = {
    "overlapped": "during the capture of an overlapped save",
    "eager": "after an eager save",
    "drained": "after an eager save, during its drain",
    "copied": "after an eager save, while another process copies as many bytes",
    "uploaded": "after an eager save, while a raw client uploads as many bytes",
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
        ("saves", "first", "second", "third"),
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
        "Training steps during a save",
        "overlap",
        "A Lightning fit on one thread, with AdamW. Sharded: TieredModelParallelStrategy, FSDP2 and one rank, with"
        " DCP's exchanges. The slower of the two steps after a save counts; ± is the standard error of its median.",
        ("measure", "full", "sharded"),
        overlapped,
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
        ("client", "http: rate / boto3", "CPU s/GiB", "https: rate / boto3", "CPU s/GiB"),
        uploads,
    ),
    Section(
        "A Python loop during an upload",
        "loop",
        "Time that the loop loses. Each raw client has its own process.",
        ("upload by", "lost, s/GiB", "CPU s/GiB", "server's CPU s/GiB"),
        beside,
    ),
    Section(
        "Replication",
        "replication",
        "Two processes, over the loopback interface, a part of 1 GiB. Only ours hashes and keeps the bytes.",
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

States of {found["mebibytes"]} MiB (the GPT's is smaller), medians of {found["rounds"]} rounds. *memcpy* is a copy into
warm tensors by one thread in the same round. A load fills existing tensors. Peak memory is anonymous memory of the
trainer.

![Stall / memcpy](benchmarks.svg)

{stalls(found)}

{sections}

## Goals

`make bench` also prints where the time of each miss goes.

{markdown(GOALS[:-1], [goal_cells(goal)[:-1] for goal in found["goals"]])}

`goals_met={met} of {len(found["goals"])}`
"""
    (docs / "benchmarks.md").write_text(text)
    (docs / "benchmarks.svg").write_text(plot(found))
