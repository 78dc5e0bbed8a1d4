"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MemoryDir = Annotated[str, typer.Option(help="The folder that holds the memory tier.")]
Namespace = Annotated[str, typer.Option(help="The job's namespace.")]
Root = Annotated[Path | None, typer.Option(help="The memory tier's root itself, in place of the two.")]
Endpoint = Annotated[str | None, typer.Option(help="Of an S3 server other than AWS.")]

#: Where the memory tier lies by default.
SHM = "/dev/shm"  # noqa: S108
