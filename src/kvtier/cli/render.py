"""How results reach people and programs: JSON alone, or a table; progress on stderr."""

import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

_TEXT_LEAST = 12
"""Characters to which a column of text may be narrowed."""
_WORD_MOST = 24
"""Characters of a word that is folded only when it is longer: a path, never a figure."""


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
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    table = _table(columns, rows, title, right)
    natural = [max(len(it[place]) for it in (columns, *rows)) for place in range(len(columns))]
    wide = console.options.update(max_width=sum(natural) + 10 * len(columns))
    frame = Measurement.get(console, wide, _table(columns, rows, "", right)).maximum - sum(natural)
    room = console.width - frame - sum(least := _least_widths(columns, rows, natural, right))
    if room < 0 and len(columns) > 2:
        # Not even words fit: each row becomes lines of heading and value.
        for number, row in enumerate(rows):
            named = [(heading, cell) for heading, cell in zip(columns, row, strict=True) if cell]
            _draw(("", ""), named, title if number == 0 else "", set())
        return
    widths = least
    for _ in range(min(room, sum(natural) - sum(least))):
        widths[max(range(len(widths)), key=lambda place: natural[place] - widths[place])] += 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    console.print(table)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, right: set[int]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    has_headings = any(columns)
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=has_headings)
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="right" if place in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a path with [brackets] is no markup
    return table


def _least_widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], natural: Sequence[int], right: set[int]
) -> list[int]:
    """How narrow each column may be: numbers stay in one line with their units, text is wrapped between words."""
    out: list[int] = []
    for place, heading in enumerate(columns):
        cells = [row[place] for row in rows]
        words = (min(len(word), _WORD_MOST) for cell in cells for word in cell.split())
        kept = map(len, cells) if place in right else (min(natural[place], _TEXT_LEAST), *words)
        out.append(max(0, *map(len, heading.split()), *kept))
    return out


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
