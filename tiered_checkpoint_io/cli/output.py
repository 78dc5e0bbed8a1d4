"""What commands print."""

from __future__ import annotations

from collections.abc import Iterable


def show(title: str, rows: Iterable[tuple[str, ...]], *columns: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
