"""Sends metrics where ``metrics_export`` says, in the background: of trainers."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.drain.locks import is_lost, release, try_lock
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.metrics.catalog import Sample
from tiered_checkpoint_io.metrics.collect import Source
from tiered_checkpoint_io.model.metrics_export import MetricsTarget, targets_in

#: The environment variable that says where the metrics of a trainer's node go, in place of its configuration.
ENVIRONMENT = "TIERED_CHECKPOINT_METRICS"
#: Interval between two writes of a textfile: Prometheus scrapes as often by default.
_EVERY_S = 15.0
#: How long the end of an exporter is waited for; it may be in the middle of a request.
_CLOSE_S = 2.0
#: How long a trainer tries to get what others hold: after a quick restart, those are processes of the one before it.
_PATIENCE_S = 60.0
_AGAIN_S = 1.0


class NotYetError(ConfigError):
    """A target can't be used just now: another process has the port, or exports to the file."""


class Export(Protocol):
    """An exporter that works by itself until it is closed."""

    def close(self) -> None:
        """Ends it, within a few seconds."""


def parse_targets(text: str) -> list[MetricsTarget]:
    """The targets that a text names.

    Raises:
        ConfigError: It can't be understood, or names a library that is not installed.
    """
    targets = targets_in(text)
    if targets:
        try:
            importlib.import_module("tiered_checkpoint_io.metrics.prometheus")
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"metrics can't go to {targets[0].kind}: the package {missing.name} is not installed",
                hint="pip install 'tiered-checkpoint-io[metrics]'",
            ) from missing
    return targets


def start(target: MetricsTarget, source: Source, log: Logger) -> Export:
    """Starts to export to one target, in the background.

    Raises:
        NotYetError: The target can't be used now; for example, another process has the port.
    """
    if target.kind == "prometheus":
        from tiered_checkpoint_io.metrics.prometheus import Server

        try:
            server = Server(source, target.host, target.port)
        except OSError as error:
            raise NotYetError(
                f"metrics can't be served on {target.host}:{target.port}: {error.strerror or error}",
                hint="name a free port of this machine",
            ) from error
        log.info("metrics: http://%s:%d/metrics", target.host, server.port)
        return server

    def begin() -> _Repeated:
        return _Repeated(lambda: write(target, source()), f"metrics to {target.path}", log)

    return _Textfile(begin, Path(target.path))


def write(target: MetricsTarget, samples: Iterable[Sample]) -> None:
    """Writes metrics once to a textfile.

    Raises:
        OSError: It can't be written.
    """
    from tiered_checkpoint_io.metrics.text import write_textfile

    write_textfile(Path(target.path), samples)


class Exports:
    """All exporters of a process."""

    def __init__(self) -> None:
        self._running: list[Export] = []

    def start(self, target: MetricsTarget, source: Source, log: Logger) -> None:
        """Starts one more of them.

        Raises:
            NotYetError: As :func:`start`; those that were started before go on.
        """
        self._running.append(start(target, source, log))

    def start_patiently(self, target: MetricsTarget, source: Source, log: Logger) -> None:
        """As :meth:`start`, for a trainer: tried for a while, and what fails is logged once and left out."""
        try:
            self.start(target, source, log)
        except NotYetError as error:
            # Its end must not be waited for here: training begins.
            self._running.append(_Awaited(lambda: start(target, source, log), error, log))

    def close(self) -> None:
        """Ends them. A textfile is removed, because it would keep its last values for ever."""
        running, self._running = self._running, []
        for each in running:
            each.close()


class _Repeated:
    """Does something every so often, in a thread; what fails is logged once until it succeeds again."""

    def __init__(self, work: Callable[[], None], what: str, log: Logger) -> None:
        self._work, self._what, self._log = work, what, log
        self._ended, self._failed = threading.Event(), False
        self._thread = SYSTEM.start(self._run, "tiered-metrics")

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
            SYSTEM.wait(self._ended, _EVERY_S)

    def close(self) -> None:
        self._ended.set()
        SYSTEM.join(self._thread, _CLOSE_S)


class _Awaited:
    """An exporter that begins once it can, or not at all, in a thread of its own."""

    def __init__(self, begin: Callable[[], Export], error: ConfigError, log: Logger) -> None:
        self._begin, self._error, self._log = begin, error, log
        self._ended = threading.Event()
        self._thread = SYSTEM.start(self._run, "tiered-metrics")

    def _run(self) -> None:
        deadline = SYSTEM.monotonic() + _PATIENCE_S
        while not SYSTEM.wait(self._ended, _AGAIN_S) and SYSTEM.monotonic() < deadline:
            try:
                export = self._begin()
            except NotYetError as error:
                self._error = error
            else:
                self._ended.wait()
                export.close()
                return
        if self._ended.is_set():
            self._log.error("%s; nothing was exported", self._error)
        else:
            self._log.error("%s; training continues without", self._error)

    def close(self) -> None:
        self._ended.set()
        SYSTEM.join(self._thread, 2 * _CLOSE_S)


class _Textfile:
    """A file of metrics that is there while it is written, by one process at a time."""

    def __init__(self, begin: Callable[[], _Repeated], path: Path) -> None:
        """Begins to write it; raises NotYetError where another process does."""
        try:
            # Beside it, because each write puts a new file in its place.
            lock = try_lock(path.with_name(f".{path.name}.lock"))
        except OSError as error:
            why = error.__cause__ or error
            text = f"metrics can't be written to {path}: {getattr(why, 'strerror', None) or why}"
            hint = f"name a file in a folder that this user may write to; a .{path.name}.lock that was left may go"
            raise NotYetError(text, hint=hint) from error
        if lock is not None and is_lost(lock):
            # Who had it has just ended.
            release(lock)
            lock = None
        if lock is None:
            text = f"metrics can't be written to {path}: another process exports to it"
            raise NotYetError(text, hint="name a file for each job of a node")
        self._lock, self._path = lock, path
        try:
            self._writer = begin()
        except BaseException:
            release(lock)
            raise

    def close(self) -> None:
        self._writer.close()
        # The lock's file as well: another user could not open it.
        for path in (self._path, self._path.with_name(f".{self._path.name}.lock")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        release(self._lock)


def targets_of_trainer(configured: str | None) -> list[MetricsTarget]:
    """Where the metrics of a trainer's node are to go: the environment says so, or else its configuration.

    Raises:
        ConfigError: As :func:`parse_targets`.
    """
    return parse_targets(os.environ.get(ENVIRONMENT, configured or ""))
