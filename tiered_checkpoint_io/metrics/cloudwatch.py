"""Metrics for CloudWatch by its embedded metric format: lines of JSON that the CloudWatch agent, or a log, takes up."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from tiered_checkpoint_io.metrics.catalog import Sample

#: CloudWatch's own namespace for them.
NAMESPACE = "tiered_checkpoint"
STDOUT = "-"
_UNITS = {"seconds": "Seconds", "bytes": "Bytes", "bytes_per_second": "Bytes/Second", "steps": "Count", "": "Count"}


def lines(samples: Iterable[Sample], now: float) -> Iterator[str]:
    """One line for each set of labels, which become dimensions; ``now`` is seconds since the epoch."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, Sample]] = {}
    for sample in samples:
        groups.setdefault(tuple(sorted(sample.labels.items())), {})[sample.metric.name] = sample
    for labels, group in groups.items():
        about: Mapping[str, object] = {
            "Timestamp": round(now * 1000),
            "CloudWatchMetrics": [
                {
                    "Namespace": NAMESPACE,
                    "Dimensions": [[name for name, _ in labels]],
                    "Metrics": [{"Name": name, "Unit": _UNITS[each.metric.unit]} for name, each in group.items()],
                }
            ],
        }
        yield json.dumps({"_aws": about, **dict(labels), **{name: each.value for name, each in group.items()}})


def append(path: str, samples: Iterable[Sample]) -> None:
    """Appends lines to a file, opened anew so that it may be rotated; raises OSError where that can't be done."""
    text = "".join(f"{line}\n" for line in lines(samples, time.time()))
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    with open(path, "a") as file:
        file.write(text)
