"""Metrics as Prometheus' text, which node_exporter and other collectors read too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tiered_checkpoint_io.metrics.catalog import Metric, Sample


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Returns samples in Prometheus' text format; pure."""
    metrics: dict[Metric, list[Sample]] = {}
    for each in samples:
        metrics.setdefault(each.metric, []).append(each)
    lines: list[str] = []
    for metric, found in metrics.items():
        lines += [f"# HELP {metric.name} {_escaped(metric.meaning)}", f"# TYPE {metric.name} {metric.kind}"]
        for each in found:
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in each.labels.items())
            lines.append(f"{metric.name}{{{labels}}} {each.value!r}")
    return "".join(f"{line}\n" for line in lines)


def write_textfile(path: Path, samples: Iterable[Sample]) -> None:
    """Replaces a file for node_exporter, so that a reader sees the old content or the new.

    Raises:
        OSError: The file can't be written.
    """
    # The collector takes only *.prom.
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        made.write_text(prometheus_text(samples))
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
