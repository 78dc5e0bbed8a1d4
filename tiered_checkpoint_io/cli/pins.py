"""Commands about single checkpoints that are not to go: pin, unpin; and metrics that an evaluation adds."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from tiered_checkpoint_io.cli import documents
from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.documents import MetricsAdded, Pinned, Unpinned
from tiered_checkpoint_io.cli.options import SERVER, Dirpath, Json, Server, name_of, wrong_use
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.engine.durable import metrics, pins
from tiered_checkpoint_io.engine.durable.manifests import meant_by
from tiered_checkpoint_io.inventory.durable import latest_manifest
from tiered_checkpoint_io.inventory.record import iso
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.retention import Pin
from tiered_checkpoint_io.stores import Store

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")

Name = Annotated[str, typer.Argument(help="The checkpoint: a name, a path or URL below DIRPATH, or tiered:latest.")]


def seconds_of(text: str) -> float:
    """The seconds of ``90s``, ``30m``, ``2h`` or ``7d``; other text ends the command with status 2."""
    match = _DURATION.fullmatch(text)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no time; allowed: a number above 0 and s, m, h or d, such as 2h")
    return float(match[1]) * _UNITS[match[2]]


def pin(
    dirpath: Dirpath,
    name: Name,
    duration: Annotated[
        str | None, typer.Option("--for", help="How long it holds, such as 90s, 30m, 2h or 7d; for ever by default.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, for people.")] = "",
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Keeps a checkpoint of the durable tier from being deleted: by retention, prune, save_top_k or a callback.

    An overwrite of its name is no delete, and is not held up.
    """
    expires_s = None if duration is None else seconds_of(duration)
    config = server.config(dirpath)
    wanted = name_of(config, name)

    def work(store: Store) -> Pin:
        meant = _meant(store, wanted, "pin")
        with wrong_use():
            return pins.pin(store, meant, reason=reason, expires_s=expires_s)

    made = ask(config, work)
    if json:
        write_json("pin", Pinned(config.dirpath, documents.Pin.of(made)))
    else:
        end = "" if made.expires is None else f" until {iso(made.expires)}"
        say(f"pinned {printable(made.name)}{end}")


def unpin(
    dirpath: Dirpath,
    name: Name,
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Removes all pins of a checkpoint, or of what an alias stands for now; deletes nothing.

    What has to go goes at the next retention, or by prune.
    """
    config = server.config(dirpath)
    wanted = name_of(config, name)

    def work(store: Store) -> list[Pin]:
        meant = _meant(store, wanted, "unpin")
        gone = pins.unpin(store, meant)
        if not gone:
            # One that is not there has no pin either, and is mistyped.
            meant_by(store, meant, operation="unpin", undone="there is no pin of it")
        return gone

    gone = ask(config, work)
    if json:
        write_json("unpin", Unpinned(config.dirpath, list(map(documents.Pin.of, gone))))
    elif gone:
        say(f"removed {len(gone)} pin{'' if len(gone) == 1 else 's'} of {printable(gone[0].name)}")
    else:
        say(f"{printable(wanted)} has no pin")


def metric(
    dirpath: Dirpath,
    name: Name,
    values: Annotated[list[str], typer.Argument(help="Metrics and values, such as val_loss=0.31.")],
    server: Server = SERVER,
    json: Json = False,
) -> None:
    """Adds metrics to a checkpoint of the durable tier, as an evaluation elsewhere finds them.

    Policies of the best, and tiered://best?..., go by them. A value of the same metric replaces the earlier.
    """
    config = server.config(dirpath)
    wanted, given = name_of(config, name), dict(map(_value_of, values))

    def work(store: Store) -> tuple[str, str]:
        meant = _meant(store, wanted, "metric")
        with wrong_use():
            return meant, metrics.add_metrics(store, meant, given)

    meant, save_id = ask(config, work)
    if json:
        write_json("metric", MetricsAdded(config.dirpath, meant, save_id, given))
    else:
        say(f"{printable(meant)}: {', '.join(f'{printable(key)}={value:g}' for key, value in given.items())}")


def _value_of(text: str) -> tuple[str, float]:
    key, equals, value = text.rpartition("=")
    try:
        number = float(value)
    except ValueError:
        number = None
    if not equals or not key or number is None:
        raise typer.BadParameter(f"{text!r} is no metric with a value, such as val_loss=0.31")
    return key, number


def _meant(store: Store, wanted: str, operation: str) -> str:
    """The name that is meant: of tiered:latest, what a restart would take from the durable tier."""
    return latest_manifest(store, operation).name if wanted == ids.LATEST else wanted
