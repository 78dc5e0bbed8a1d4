"""Metrics by OpenTelemetry's own SDK: an observable instrument for each metric of the catalogue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from tiered_checkpoint_io.metrics.catalog import CATALOG, Metric
from tiered_checkpoint_io.metrics.collect import Source
from tiered_checkpoint_io.version import __version__

#: As UCUM has them.
_UNITS = {"seconds": "s", "bytes": "By", "bytes_per_second": "By/s", "steps": "{step}", "": "1"}
#: How long the last export may take.
_FLUSH_MS = 2_000


#: What the instruments of each provider ask: a provider keeps an instrument, and its first callback, for its life.
_sources: weakref.WeakKeyDictionary[MeterProvider, list[Source]] = weakref.WeakKeyDictionary()


class Instruments:
    """The instruments of a meter provider, until they are closed; another source may follow on the same provider."""

    def __init__(self, source: Source, provider: MeterProvider | None = None) -> None:
        """Takes a provider; by default the one that this program has set, or one that exports by OTLP."""
        self._own: MeterProvider | None = None
        if provider is None:
            known = metrics.get_meter_provider()
            provider = known if isinstance(known, MeterProvider) else self._by_otlp()
        self._source = source
        if provider not in _sources:
            _make(provider)
        self._sources = _sources[provider]
        self._sources.append(source)

    def _by_otlp(self) -> MeterProvider:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        self._own = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
        return self._own

    def close(self) -> None:
        """Sends the last values, where the provider is ours; the instruments of another one become silent."""
        if self._own is not None:
            self._own.shutdown(_FLUSH_MS)
        self._sources.remove(self._source)


def _make(provider: MeterProvider) -> None:
    sources = _sources[provider] = []
    meter = provider.get_meter("tiered_checkpoint_io", __version__)
    for metric in CATALOG:
        make = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        make(metric.name, [_observed(metric, sources)], _UNITS[metric.unit], metric.meaning)


def _observed(metric: Metric, sources: list[Source]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        samples = [sample for source in sources for sample in source()]
        return [Observation(each.value, dict(each.labels)) for each in samples if each.metric is metric]

    return observe
