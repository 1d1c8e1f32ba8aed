"""What the reports of replays through one cache and through tiers share."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TypeVar

from kvtier.plan.drawing import Pictures, svgs
from kvtier.plan.page import page, table_html, tiles_html
from kvtier.plan.tables import Table
from kvtier.trace.stats import Description

Subject = TypeVar("Subject")


def sheet(
    descriptions: Iterable[Description],
    sections: Iterable[str],
    *,
    heading: str,
    command: str,
    intro: str,
    made: datetime,
) -> str:
    """The whole page; ``{}`` in `heading` stands for the names of the traces."""
    names = ", ".join(dict.fromkeys(Path(it.name).name for it in descriptions))
    head = (
        f"<header><h1>{escape(heading.format(names))}</h1>"
        f'<p class="soft">Made by <code>{escape(command)}</code>, {made:%Y-%m-%d %H:%M} UTC.</p>'
        f"<p>{escape(intro)}</p></header>"
    )
    return page(f"kvtier replay: {names}", "\n".join([head, *sections]))


def section(
    title: str,
    *,
    circumstances: str = "",
    tiles: Sequence[tuple[str, str]],
    figures: str,
    tables: Iterable[Table],
) -> str:
    """One replay: its greatest figures, pictures and tables."""
    said = f"<p>{escape(circumstances)}</p>" if circumstances else ""
    return (
        f"<section><h2>{escape(title)}</h2>{said}{tiles_html(tiles)}"
        f'<div class="pictures">{figures}</div></section>{"".join(map(table_html, tables))}'
    )


def figures_html(pictures: Pictures[Subject], captions: Mapping[str, str], subject: Subject, prefix: str) -> str:
    """Every picture with its heading and caption; `prefix` makes their names unique in the page."""
    return "".join(
        f"<figure><h3>{escape(pictures[name][0])}</h3>{svg}<figcaption>{escape(captions[name])}</figcaption></figure>"
        for name, svg in svgs(pictures, subject, prefix).items()
    )


def notes_html(told: Description) -> str:
    """What is to be known of a trace."""
    return f"<ul>{''.join(f'<li>{escape(it)}</li>' for it in (*told.warnings, *told.notes))}</ul>"
