"""How results reach people and programs: JSON alone, or a table; progress on stderr."""

import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import click


def emit_json(result: object) -> None:
    """Print `result` (a dataclass or plain values) as JSON to stdout."""
    plain: Any = asdict(result) if is_dataclass(result) and not isinstance(result, type) else result
    click.echo(json.dumps(plain, indent=2, default=_plain))


def emit_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", numeric: int = 0) -> None:
    """Print a table: drawn on a terminal, aligned and never cut short in a pipe.

    Args:
        columns: the headings.
        rows: a text for each column.
        title: a line above the table, on a terminal only.
        numeric: how many columns, counted from the last, are numbers and so aligned right.
    """
    cells = [tuple(row) for row in rows]
    right = {*range(len(columns) - numeric, len(columns))} if numeric else set[int]()
    if sys.stdout.isatty():
        _draw(columns, cells, title, right)
        return
    widths = [max(len(row[place]) for row in (tuple(columns), *cells)) for place in range(len(columns))]
    for row in (tuple(columns), *cells):
        padded = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(padded).rstrip())


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, right: set[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="right" if place in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a path with [brackets] is no markup
    Console().print(table)


@contextmanager
def progress(label: str, total: float | None) -> Generator[Callable[[float], None]]:
    """Show progress on stderr, when that is a terminal; yields a function that advances it."""
    if not sys.stderr.isatty():
        yield lambda _advance: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda advance: bar.advance(task, advance)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")
