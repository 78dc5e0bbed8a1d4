"""The command ``metrics``: the figures of this node's memory tiers, shown once or exported until it is ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from tiered_checkpoint_io.cli.documents import Metric, Metrics
from tiered_checkpoint_io.cli.options import NODES, Json, Nodes, wrong_use
from tiered_checkpoint_io.cli.output import INTERRUPTED, say, show, write_json
from tiered_checkpoint_io.engine.drain.ending import ended_by_signal
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import get_logger
from tiered_checkpoint_io.metrics.catalog import Sample
from tiered_checkpoint_io.metrics.collect import Source
from tiered_checkpoint_io.metrics.exports import Exports, parse_targets, write
from tiered_checkpoint_io.model.metrics_export import MetricsTarget

Export = Annotated[
    str | None,
    typer.Option(help="Where metrics go: prometheus=[HOST:]PORT, textfile=PATH; several with commas."),
]


def metrics(
    nodes: Nodes = NODES,
    export: Export = None,
    once: Annotated[bool, typer.Option(help="Write the textfile of --export once, as a timer does.")] = False,
    json_output: Json = False,
) -> None:
    """Shows the metrics of this node's memory tiers, or exports them until it is ended. Asks no server.

    Works with the trainer dead: it reads what lies in node memory.
    """
    roots = nodes.paths()
    source = Source(lambda: roots if nodes.is_named else nodes.paths())
    targets = targets_of(export)
    if once and (not targets or any(each.kind != "textfile" for each in targets)):
        raise typer.BadParameter("--once needs --export with textfile only")
    if json_output and targets:
        raise typer.BadParameter("--json shows metrics, --export sends them: give one")
    if once:
        for each in targets:
            _write_once(each, source())
    elif targets:
        export_until_ended(targets, source)
    elif json_output:
        found = [(each.metric, each) for each in source()]
        write_json(
            "metrics", Metrics([Metric(kind.name, kind.kind, kind.unit, it.labels, it.value) for kind, it in found])
        )
    else:
        _show(source(), nodes.memory_dir)


def targets_of(export: str | None) -> list[MetricsTarget]:
    """The targets that the option names; what can't be understood ends the command with status 2."""
    with wrong_use():
        return parse_targets(export or "")


def export_until_ended(targets: Iterable[MetricsTarget], source: Source) -> None:
    """Exports until SIGTERM, or Ctrl-C, after which the status is 130."""
    log, exports = get_logger("metrics"), Exports()
    with ended_by_signal(log, late=0) as stop, contextlib.closing(exports):
        for each in targets:
            exports.start(each, source, log)
        stop.wait()
    if stop.is_interrupt:
        raise typer.Exit(INTERRUPTED)


def _write_once(target: MetricsTarget, samples: list[Sample]) -> None:
    try:
        write(target, samples)
    except OSError as error:
        raise ConfigError(f"metrics can't be written to {target.path}: {error.strerror}") from error


def _show(samples: list[Sample], memory_dir: str) -> None:
    if not samples:
        say(f"no namespace of this user has a memory tier in {memory_dir}", err=True)
        return
    rows = [(each.metric.name, _labels(each), _text(each.value), each.metric.unit) for each in samples]
    show("", rows, "metric", "labels", "value", "unit")


def _text(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.3f}"


def _labels(sample: Sample) -> str:
    return ",".join(f"{name}={value}" for name, value in sample.labels.items())


def source_of(root: Path) -> Source:
    """The metrics of one memory tier."""
    return Source(lambda: [root])
