"""Where metrics go, as one text for the configuration, the environment and the command line. Pure.

The text is a list separated by commas:

``prometheus=9464``           serve them to Prometheus on this port of the loopback interface; ``0.0.0.0:9464`` on all
``textfile=/dir/name.prom``   write that file for node_exporter's textfile collector, every 15 s
"""

from __future__ import annotations

from dataclasses import dataclass

from tiered_checkpoint_io.errors import ConfigError

_LOOPBACK = "127.0.0.1"
ALLOWED = "prometheus=[HOST:]PORT, textfile=PATH; several with commas"


@dataclass(frozen=True, slots=True)
class MetricsTarget:
    """One place that metrics go to.

    Attributes:
        kind: ``prometheus`` or ``textfile``.
        path: The file of a textfile.
        host: The interface of prometheus.
        port: Its port; 0 for any that is free.
    """

    kind: str
    path: str = ""
    host: str = _LOOPBACK
    port: int = 0


def targets_in(text: str) -> list[MetricsTarget]:
    """The targets that a text names; see the head of this module.

    Raises:
        ConfigError: It can't be understood.
    """
    return [_target(part.strip()) for part in text.split(",") if part.strip()]


def _target(text: str) -> MetricsTarget:
    kind, _, value = text.partition("=")
    if kind == "textfile" and value:
        return MetricsTarget(kind, path=value)
    if kind == "prometheus":
        host, _, port = value.rpartition(":")
        if port.isascii() and port.isdigit() and int(port) < 1 << 16:
            return MetricsTarget(kind, host=host.strip("[]") or _LOOPBACK, port=int(port))
    raise ConfigError(f"metrics can't go to {text!r}", hint=f"allowed: {ALLOWED}")
