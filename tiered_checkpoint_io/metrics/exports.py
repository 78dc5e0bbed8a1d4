"""Where metrics go: named by one text for trainers, the drain and the command line, and kept going in the background.

The text is a list separated by commas:

``prometheus=9464``           serve them to Prometheus on this port of the loopback interface; ``0.0.0.0:9464`` on all
``textfile=/dir/name.prom``   write that file for node_exporter's textfile collector, every 15 s
``cloudwatch=/dir/name.log``  append lines of CloudWatch's embedded metric format, every 60 s; ``-`` for stdout
``otel``                      by OpenTelemetry's SDK, to the process' own meter provider, or by OTLP as ``OTEL_*`` says
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.metrics import cloudwatch
from tiered_checkpoint_io.metrics.catalog import Sample
from tiered_checkpoint_io.metrics.collect import Source

#: The environment variable that has a trainer export its node's metrics.
ENVIRONMENT = "TIERED_CHECKPOINT_METRICS"
_LOOPBACK = "127.0.0.1"
_ALLOWED = "allowed: prometheus=[HOST:]PORT, textfile=PATH, cloudwatch=PATH or cloudwatch=-, otel; several with commas"
#: As Prometheus scrapes by habit; and CloudWatch charges for finer resolutions.
_EVERY_S = {"textfile": 15.0, "cloudwatch": 60.0}
#: How long the end of an exporter is waited for; it may be in the middle of a request.
_CLOSE_S = 2.0


class Export(Protocol):
    """An exporter that works by itself until it is closed."""

    def close(self) -> None:
        """Ends it, within a few seconds."""


@dataclass(frozen=True, slots=True)
class Target:
    """One place that metrics go to.

    Attributes:
        kind: ``prometheus``, ``textfile``, ``cloudwatch`` or ``otel``.
        path: The file of a textfile or cloudwatch; "-" for stdout.
        host: The interface of prometheus.
        port: Its port; 0 for any that is free.
    """

    kind: str
    path: str = ""
    host: str = _LOOPBACK
    port: int = 0


def parse_targets(text: str) -> list[Target]:
    """The targets that a text names; see the head of this module.

    Raises:
        ConfigError: It can't be understood, or names a library that is not installed.
    """
    targets = [_target(part.strip()) for part in text.split(",") if part.strip()]
    for target in targets:
        _library(target.kind)
    return targets


def _target(text: str) -> Target:
    kind, _, value = text.partition("=")
    if kind in ("textfile", "cloudwatch") and value:
        return Target(kind, path=value)
    if kind == "otel" and not value:
        return Target(kind)
    if kind == "prometheus":
        host, _, port = value.rpartition(":")
        if port.isascii() and port.isdigit() and int(port) < 1 << 16:
            return Target(kind, host=host.strip("[]") or _LOOPBACK, port=int(port))
    raise ConfigError(f"metrics can't go to {text!r}", hint=_ALLOWED)


def _library(kind: str) -> None:
    """Imports what a kind needs.

    Raises:
        ConfigError: It is not installed; names the extra.
    """
    try:
        if kind in ("prometheus", "textfile"):
            import tiered_checkpoint_io.metrics.prometheus
        elif kind == "otel":
            import tiered_checkpoint_io.metrics.otel  # noqa: F401
    except ModuleNotFoundError as missing:
        extra = "otel" if kind == "otel" else "metrics"
        raise ConfigError(
            f"metrics can't go to {kind}: the package {missing.name} is not installed",
            hint=f"pip install 'tiered-checkpoint-io[{extra}]'",
        ) from missing


def start(target: Target, source: Source, log: Logger, *, clock: Clock = SYSTEM) -> Export:
    """Starts to export to one target, in the background.

    Raises:
        ConfigError: It can't be used: the port is taken, for one.
    """
    if target.kind == "prometheus":
        from tiered_checkpoint_io.metrics.prometheus import Server

        try:
            server = Server(source, target.host, target.port)
        except OSError as error:
            raise ConfigError(
                f"metrics can't be served on {target.host}:{target.port}: {error.strerror or error}",
                hint="name a free port of this machine",
            ) from error
        log.info("metrics: http://%s:%d/metrics", target.host, server.port)
        return server
    if target.kind == "otel":
        from tiered_checkpoint_io.metrics.otel import Instruments

        return Instruments(source)
    return _Repeated(lambda: write(target, source()), _EVERY_S[target.kind], f"metrics to {target.path}", log, clock)


def write(target: Target, samples: Iterable[Sample]) -> None:
    """Writes metrics once to a file.

    Raises:
        OSError: It can't be written.
    """
    if target.kind == "textfile":
        from tiered_checkpoint_io.metrics.prometheus import write_textfile

        write_textfile(Path(target.path), samples)
    else:
        cloudwatch.append(target.path, samples)


class Exports:
    """All exporters of a process."""

    def __init__(self) -> None:
        self._running: list[Export] = []

    def start(self, targets: Iterable[Target], source: Source, log: Logger) -> None:
        """Starts all of them.

        Raises:
            ConfigError: As :func:`start`; those that were started are ended.
        """
        try:
            for target in targets:
                self._running.append(start(target, source, log))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends them; files get their last values."""
        running, self._running = self._running, []
        for each in running:
            each.close()


class _Repeated:
    """Does something every so often, in a thread; what fails is logged once until it succeeds again."""

    def __init__(self, work: Callable[[], None], every_s: float, what: str, log: Logger, clock: Clock) -> None:
        self._work, self._what, self._log = work, what, log
        self._clock, self._every_s = clock, every_s
        self._ended, self._failed = threading.Event(), False
        self._thread = clock.start(self._run, "tiered-metrics")

    def _run(self) -> None:
        while True:
            ends = self._ended.is_set()
            try:
                self._work()
                self._failed = False
            except OSError as error:
                if not self._failed:
                    self._log.error("%s failed, trying again: %s", self._what, error)
                self._failed = True
            if ends:
                return
            self._clock.wait(self._ended, self._every_s)

    def close(self) -> None:
        self._ended.set()
        self._clock.join(self._thread, _CLOSE_S)


def targets_of_environment() -> list[Target]:
    """Where the environment wants the metrics of a trainer's node to go; raises as :func:`parse_targets`."""
    return parse_targets(os.environ.get(ENVIRONMENT, ""))
