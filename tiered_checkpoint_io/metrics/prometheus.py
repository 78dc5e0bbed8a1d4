"""Metrics for Prometheus, by prometheus-client: served over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tiered_checkpoint_io.memory import forks
from tiered_checkpoint_io.metrics.catalog import Sample
from tiered_checkpoint_io.metrics.collect import Source


class _Families(Collector):
    """Gives metrics to a registry whenever it is asked."""

    def __init__(self, source: Source | Iterable[Sample]) -> None:
        self._source = source

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        samples = self._source() if isinstance(self._source, Source) else self._source
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in samples:
            metric = sample.metric
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            names = ("namespace", *metric.labels)
            family = families.setdefault(metric.name, kind(metric.name, metric.meaning, labels=names))
            family.add_metric([sample.labels[name] for name in names], sample.value)
        yield from families.values()


class Server:
    """Answers Prometheus; collects when it is asked, and not otherwise."""

    def __init__(self, source: Source, host: str, port: int) -> None:
        """Begins to listen; raises OSError where the port is taken, or the host is not this machine's."""
        self._server, self._thread = start_http_server(port, addr=host, registry=_registry(source))
        forks.register(self)

    def forked(self) -> None:
        """See :class:`forks.Owner`: a worker of a loader that outlives its trainer would keep the port."""
        self._server.socket.close()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _registry(source: Source | Iterable[Sample]) -> CollectorRegistry:
    # One of its own: the global one belongs to the user's program.
    registry = CollectorRegistry()
    registry.register(_Families(source))
    return registry
