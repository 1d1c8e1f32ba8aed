"""A probe as one HTML file that needs nothing else."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvtier.plan.files import write_whole
from kvtier.plan.page import page, table_html, tiles_html
from kvtier.probe.pictures import pictures
from kvtier.probe.result import ProbeResult
from kvtier.probe.tables import place_text, table


def write_report(path: Path, result: ProbeResult) -> None:
    """Write the report, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_report(result, datetime.now(UTC)).encode())


def render_report(result: ProbeResult, made: datetime) -> str:
    """The whole page."""
    places = "".join(f"<dt>{escape(it.tier)}</dt><dd>{escape(place_text(it))}</dd>" for it in result.places)
    warnings = "".join(f"<li>{escape(text)}</li>" for text in result.warnings) or "<li>none found</li>"
    skipped = "".join(f"<li>{escape(text)}</li>" for text in result.skipped)
    drawn = "".join(f"<figure><h3>{escape(title)}</h3>{svg}</figure>" for title, svg in pictures(result).items())
    body = (
        f"<header><h1>Links of this machine</h1>"
        f'<p class="soft">Made by <code>kvtier probe</code>, {made:%Y-%m-%d %H:%M} UTC; {escape(str(result.bounds))}.'
        f"</p><dl>{places}</dl></header>"
        f"{tiles_html(_tiles(result))}"
        f"<section><h2>Misconfigured</h2><ul>{warnings}</ul></section>"
        f'<div class="pictures">{drawn}</div>{table_html(table(result))}'
    )
    if skipped:
        body += f"<section><h2>Not measured</h2><ul>{skipped}</ul></section>"
    return page("kvtier probe", body)


def _tiles(result: ProbeResult) -> list[tuple[str, str]]:
    return [
        (f"{best.gb_per_s:.2f} GB/s", f"{link.name} {op.replace('_', ' ')}, at its best")
        for link in result.links
        for op in ("copy", "to_gpu", "read", "write", "hash")
        if (best := link.best(op)) is not None
    ]
