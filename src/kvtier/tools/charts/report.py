"""Describes a command's result once, for a terminal and for an HTML page.

The page is a self-contained file without scripts or links. All text is plain, and this module escapes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import chain
from pathlib import Path

import click

from kvtier.errors import install_hint
from kvtier.report.output import has_matplotlib, print_json, write_file
from kvtier.report.table import Table, print_table, print_text
from kvtier.tools.charts.chart import STYLE, Chart, Charts, svg, write_charts

SHORT_CHARACTERS = 16
"""Longest cell, in characters, that is not wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A part of a result, shown in the order of its fields."""

    title: str = ""
    texts: Sequence[str] = ()
    problems: Sequence[str] = ()
    """Sentences that a reader must not overlook."""
    charts: Callable[[], Charts] = dict[str, Chart]
    """Makes the section's charts. They are not shown on a terminal."""
    notes: Sequence[str] = ()
    """Sentences about the limits of the figures, or about their consequences."""
    tables: Sequence[Table] = ()
    code: str = ""
    """Text for the user to copy unchanged, such as settings."""
    is_page_only: bool = False

    def print(self) -> None:
        """Print the section to stdout after an empty line, unless it is only for a page."""
        if self.is_page_only:
            return
        if self.title or self.texts or self.problems or self.notes:
            click.echo()
        print_text(self.title, bold=True)
        for text in self.texts:
            print_text(text)
        for text in self.problems:
            click.secho(f"warning: {text}", fg="yellow")
        for text in self.notes:
            print_text(f"- {text}", 2)
        for table in self.tables:
            click.echo()
            print_table(table)
        if self.code:
            click.echo(f"\n{self.code}", nl=False)

    def html(self, prefix: str) -> str:
        """Return the section as a part of a page. `prefix` makes the ids of its charts unique in the page."""
        charts = self.charts()
        missing = f"Charts need matplotlib: {install_hint('plots')}" if charts and not has_matplotlib() else ""
        figures = [
            _tag("figure", _text("h3", it.heading) + svg(it, f"{prefix}{name}") + _text("figcaption", it.caption))
            for name, it in charts.items()
            if not missing
        ]
        parts = (
            _text("h2", self.title),
            *(_text("p", it) for it in (*self.texts, missing)),
            *(_text("p", it, "bad") for it in self.problems),
            _tag("div", "".join(figures), "pictures"),
            _tag("ul", "".join(_text("li", it) for it in self.notes)),
            *map(table_html, self.tables),
            _text("pre", self.code),
        )
        return _tag("section", "".join(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a command."""

    command: str
    answer: str
    """The answer in one sentence."""
    sections: Sequence[PageSection]
    remark: str = ""
    """A sentence on the source of the figures. On a page it follows the date."""

    def show(self, result: object, *, as_json: bool, page: Path | None = None, picture: Path | None = None) -> None:
        """Print the report, or `result` as JSON. Write the page and a picture of all charts to the given paths.

        Raises:
            ConfigError: a file cannot be written.
        """
        for path in self.write(page, picture):
            click.echo(f"Written: {path.absolute()}", err=True)
        if as_json:
            print_json(result)
        else:
            self.print()

    def print(self) -> None:
        """Print the result to stdout, the answer first."""
        print_text(self.answer, bold=True)
        for section in self.sections:
            section.print()

    def html(self, made: datetime | None = None) -> str:
        """Return the page as HTML. `made` is the date on it, by default the current time."""
        made = made or datetime.now(UTC)
        body = "\n".join(section.html(f"s{number}-") for number, section in enumerate(self.sections))
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"{_text('title', f'{self.command}: {self.answer}')}\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<header>{_text('h1', self.answer)}"
            f'<p class="soft">Made by {_text("code", self.command)}, {made:%Y-%m-%d %H:%M} UTC. {escape(self.remark)}'
            f"</p></header>\n{body}\n</main>\n</body>\n</html>\n"
        )

    def write(self, page: Path | None, picture: Path | None = None) -> list[Path]:
        """Write the page and a picture of all charts to the given paths. Return the paths of written files.

        Raises:
            ConfigError: a file cannot be written.
        """
        if page is not None:
            write_file("--report", page, self.html())
        charts = dict(chain.from_iterable(it.charts().items() for it in self.sections if picture is not None))
        if picture is not None and charts:
            write_charts("--picture", picture, charts)
        return [it for it in (page, picture if charts else None) if it is not None]


def table_html(table: Table) -> str:
    """Return a table with its title and note as HTML."""
    head = "".join(_text("th", it, _class(table, place, "")) or "<th></th>" for place, it in enumerate(table.columns))
    rows = (
        "".join(f'<td class="{_class(table, place, cell)}">{escape(cell)}</td>' for place, cell in enumerate(row))
        for row in table.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    headings = f"<thead><tr>{head}</tr></thead>" if any(table.columns) else ""
    return (
        f'{_text("h2", table.title, "table")}<div class="wide"><table>{headings}<tbody>{body}</tbody></table></div>'
        f"{_text('p', table.note, 'soft')}"
    )


def _class(table: Table, place: int, cell: str) -> str:
    if place in table.right:
        return "number"
    return "name" if place == 0 or len(cell) <= SHORT_CHARACTERS else ""


def _text(tag: str, text: str, kind: str = "") -> str:
    """Return an element with the escaped `text`, or an empty string if `text` is empty."""
    return _tag(tag, escape(text), kind)


def _tag(tag: str, html: str, kind: str = "") -> str:
    """Return an element around `html`, or an empty string if it is empty. `kind` is a class of the style sheet."""
    start = f'<{tag} class="{kind}">' if kind else f"<{tag}>"
    return f"{start}{html}</{tag}>" if html else ""
