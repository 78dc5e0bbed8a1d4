"""The command line ``tiered-ckpt``: run a drain, look at both tiers, verify, export, clean.

Exit statuses: 0 if all is good; 1 for an error, or something damaged; 2 for wrong use; 130 after Ctrl-C; 141 if
the reader of the output has ended, as for other commands in a pipe.
"""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tiered_checkpoint_io.cli import doctor, listing, memory, prune, reading, watch
from tiered_checkpoint_io.cli.options import command
from tiered_checkpoint_io.cli.output import INTERRUPTED, TERMINATED, say
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.stores.retry import asking
from tiered_checkpoint_io.version import __version__

#: Commands in the order and the groups of --help.
_GROUPS: dict[str, dict[str, type[Any]]] = {
    "Look": {
        "ls": listing.Ls,
        "status": listing.Status,
        "verify": reading.Verify,
        "watch": watch.Watch,
        "doctor": doctor.Doctor,
    },
    "Move": {"get": reading.Get, "flush": memory.Flush},
    "Delete, only with --yes": {"clean": memory.Clean, "prune": prune.Prune},
}


class _Grouped(TyperGroup):
    """Lists commands in groups, with their whole summaries."""

    def format_commands(self, _: Any, formatter: Any) -> None:
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                texts = {name: (inspect.getdoc(kind) or "").partition("\n\n")[0] for name, kind in commands.items()}
                formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tiered-ckpt {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Grouped,
    help="Checkpoints in node memory and on the durable tier.",
    epilog="Exit status: 0 good; 1 an error, or something is damaged; 2 wrong use; 130 after Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Names of checkpoints may look like markup.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for _commands in _GROUPS.values():
    for _name, _kind in _commands.items():
        app.command(_name)(command(_kind))


def main() -> None:
    """Runs a command and ends the process; an error is one line on stderr. For the statuses see above."""
    _open_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A SystemExit, for which typer prints no message; a drain installs another handler.
        signal.signal(signal.SIGINT, lambda *_: sys.exit(INTERRUPTED))
    # Schedulers end a job by SIGTERM; it then must leave no remains.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    status: object = 0
    try:
        app()
    except SystemExit as end:
        status = end.code or 0
        if status == INTERRUPTED:
            say("interrupted", err=True)
    except (TieredCheckpointError, OSError) as error:
        say(f"error: {error}", err=True)
        status = 1
    if asking():
        # For a server that may never answer: the interpreter would wait for it, too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)
    raise SystemExit(status)


def _open_streams() -> None:
    """Opens streams that the caller has closed: else the next file would take their place, and get their output.

    Letters that a locale other than UTF-8 lacks are written as escapes: names of checkpoints may hold any.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
