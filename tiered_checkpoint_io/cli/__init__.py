"""The command line: run a drain, look at both tiers, verify, export, clean."""

from __future__ import annotations

import typer

from tiered_checkpoint_io.cli import durable, memory
from tiered_checkpoint_io.errors import TieredCheckpointError

app = typer.Typer(
    help="Checkpoints in node memory and on the durable tier.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.command()(memory.drain)
app.command()(memory.status)
app.command("ls")(durable.list_durable)
app.command("verify")(durable.verify_durable)
app.command("export")(durable.export_durable)
app.command()(memory.clean)


def main() -> None:
    """Runs a command; an error of ours is one line on stderr and exit status 1."""
    try:
        app()
    except TieredCheckpointError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error
