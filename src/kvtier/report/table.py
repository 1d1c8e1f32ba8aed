"""Tables of text for the terminal and for HTML pages, and functions that print them."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import click

TEXT_WIDTH = 100
"""Maximum width of text on a terminal, and its width in a pipe."""
_TEXT_LEAST = 12
"""Smallest number of characters to which a column of text may be narrowed."""
_WORD_MOST = 24
"""A longer word, such as a path, may be folded. A number is never folded."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under headings."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: int = 0
    """Number of right-aligned columns, counted from the last."""
    title: str = ""
    note: str = ""
    """Text printed below the table."""

    @property
    def right(self) -> range:
        """Positions of the right-aligned columns."""
        return range(len(self.columns) - self.numeric, len(self.columns))


def print_text(text: str, indent: int = 0, *, bold: bool = False) -> None:
    """Print a paragraph to stdout; print nothing if it is empty. `indent` applies to all lines but the first."""
    if not text:
        return
    width = min(TEXT_WIDTH, shutil.get_terminal_size((TEXT_WIDTH, 24)).columns)
    # In a pipe a long word, such as a path, stays whole.
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent, break_on_hyphens=False)
    wrapper.break_long_words = sys.stdout.isatty()
    click.secho(wrapper.fill(text), bold=bold or None)


def print_table(table: Table) -> None:
    """Print a table to stdout, fitted to the width of a terminal; in a pipe, aligned and never cut.

    A table of two columns without headings is a list of names and descriptions, and is wrapped like text.
    """
    print_text(table.title, bold=True)
    if not any(table.columns) and len(table.columns) == 2:
        indent = max((len(name) for name, _ in table.rows), default=0) + 2
        for name, text in table.rows:
            print_text(f"{name:<{indent}}{text}", indent)
    elif sys.stdout.isatty():
        _draw(table)
    else:
        lines = [table.columns, *table.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for line in lines:
            padded = (
                cell.rjust(width) if place in table.right else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            click.echo("  ".join(padded).rstrip())
    print_text(table.note)


def _draw(table: Table) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for place, heading in enumerate(table.columns):
        drawn.add_column(heading, justify="right" if place in table.right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))  # Text: a path with [brackets] is not markup
    natural = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    wide = console.options.update(max_width=sum(natural) + 10 * len(table.columns))
    frame = Measurement.get(console, wide, drawn).maximum - sum(natural)
    widths = _least_widths(table, natural)
    spare = console.width - frame - sum(widths)
    if spare < 0 and len(table.columns) > 2:
        # Even single words do not fit, so print each row as lines with a heading and a value.
        for row in table.rows:
            print_table(Table(("", ""), [pair for pair in zip(table.columns, row, strict=True) if pair[1]]))
            click.echo()
        return
    for _ in range(min(spare, sum(natural) - sum(widths))):
        widths[max(range(len(widths)), key=lambda place: natural[place] - widths[place])] += 1
    for column, width in zip(drawn.columns, widths, strict=True):
        column.width = width
    console.print(drawn)


def _least_widths(table: Table, natural: Sequence[int]) -> list[int]:
    """Return each column's least width: a number stays on one line with its unit, and text wraps between words."""
    out: list[int] = []
    for place, heading in enumerate(table.columns):
        cells = [row[place] for row in table.rows]
        words = (min(len(word), _WORD_MOST) for cell in cells for word in cell.split())
        kept = map(len, cells) if place in table.right else (min(natural[place], _TEXT_LEAST), *words)
        out.append(max(0, *map(len, heading.split()), *kept))
    return out
