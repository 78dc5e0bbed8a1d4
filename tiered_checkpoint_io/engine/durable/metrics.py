"""Metrics that are added to a checkpoint after its commit, by an evaluation elsewhere.

One small object for each value, below the id of the save: manifests stay as they were written, evaluations that come at
once do not overwrite each other, and a later save of the same name has none of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.document_cache import DocumentCache
from tiered_checkpoint_io.engine.durable.manifests import meant_by
from tiered_checkpoint_io.errors import ConfigError, ManifestError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import dump, load, located, value_of
from tiered_checkpoint_io.model.manifest import Content, Manifest, Metric
from tiered_checkpoint_io.model.numbers import as_float
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.refusals import Refusals, delete_each

_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Added:
    """One value that was added: to which save, and what."""

    save_id: str
    metric: Metric


def add_metrics(store: Store, name: str, metrics: Mapping[str, float]) -> str:
    """Adds values to a checkpoint, or what an alias or copy is of; gives the id of the save that has them now.

    What it takes and raises is that of :func:`tiered_checkpoint_io.retention.add_metrics`.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise ConfigError("no metric is given", hint="give at least one, such as val_loss=0.31")
    values = {metric: _checked(metric, value) for metric, value in metrics.items()}
    content = meant_by(store, name, operation="metric", undone="no metric was added").settled
    save_id, now = content.origin, SYSTEM.wall()

    def put(metric: str) -> None:
        body = {"save_id": save_id, "monitor": metric, "value": values[metric], "added": now, "name": name}
        store.put(ids.metric_key(save_id, metric), dump(body))

    in_parallel(put, values)
    return save_id


def added_metrics(
    store: Store, cache: DocumentCache[Added] | None = None, *, clock: Clock = SYSTEM
) -> dict[str, dict[str, float]]:
    """All values that were added, by save and metric: one list, and a GET for each that is new."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for value in (cache or metric_cache()).read(store, clock).values():
        # One that is damaged is no value.
        if not isinstance(value, ManifestError):
            found[value.save_id][value.metric.monitor] = value.metric.value
    return dict(found)


def rated(store: Store, manifests: Iterable[Manifest], monitor: str) -> list[Manifest]:
    """Manifests with the values of a metric that were added since."""
    added = added_metrics(store)

    def with_added(content: Content) -> Content:
        value = added.get(content.origin, {}).get(monitor)
        return content if value is None else replace(content, metric=Metric(monitor, value))

    return [
        replace(each, content=with_added(each.content), previous=tuple(map(with_added, each.previous)))
        for each in manifests
    ]


def forget(store: Store, save_ids: Iterable[str]) -> None:
    """Removes the values of saves that are gone; those that the server refuses to delete stay, and are not used."""
    keys = [entry.key for save_id in save_ids for entry in store.list(f"{ids.METRICS_PREFIX}{save_id}/")]
    with Refusals().kept():
        delete_each(store.delete, keys)


def metric_cache() -> DocumentCache[Added]:
    """What reads all added metrics of a durable tier."""
    return DocumentCache(ids.METRICS_PREFIX, _parse)


def _checked(metric: object, value: object) -> float:
    if not isinstance(metric, str) or not metric or len(metric.encode()) > _MAX_NAME:
        raise ConfigError(f"the metric's name is {metric!r}", hint=f"allowed: text of 1 to {_MAX_NAME} bytes")
    number = as_float(value)
    if number is None or not math.isfinite(number):
        raise ConfigError(f"the value of {metric} is {value!r}", hint="allowed: a finite number")
    return number


def _parse(data: bytes, where: str) -> Added:
    raw = load(data, where)
    with located(where):
        save_id = ids.validate_save_id(value_of(raw, "save_id", str))
        return Added(save_id, Metric.from_json(raw))
