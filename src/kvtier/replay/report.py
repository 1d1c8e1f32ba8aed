"""Replays as one HTML file that needs nothing else."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvtier.plan.drawing import svgs
from kvtier.plan.files import write_whole
from kvtier.plan.page import page, table_html
from kvtier.replay.pictures import PICTURES
from kvtier.replay.tables import CONVENTION, Replayed, description_table, outcomes_table, tokens_text

CAPTIONS = {
    "capacity": "Dashed is Belady's bound for whole prefixes, dotted a cache without end.",
    "intervals": "Accesses to blocks that were used before, by the time since.",
    "working-set": "Distinct blocks since the start, and those that are used within one part of the time.",
    "demand": "What no cache could have had is what must be computed at least.",
}


def write_report(path: Path, replayed: Sequence[Replayed]) -> None:
    """Write the report; missing parent directories are made.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_report(replayed, datetime.now(UTC)).encode())


def render_report(replayed: Sequence[Replayed], made: datetime) -> str:
    """The whole page."""
    names = ", ".join(Path(it.description.name).name for it in replayed)
    head = (
        f"<header><h1>Replay of {escape(names)}</h1>"
        f'<p class="soft">Made by <code>kvtier replay</code>, {made:%Y-%m-%d %H:%M} UTC.</p>'
        f"<p>{escape(CONVENTION)}</p></header>"
    )
    return page(f"kvtier replay: {names}", "\n".join([head, *(_trace(it, n) for n, it in enumerate(replayed))]))


def _trace(replayed: Replayed, number: int) -> str:
    told = replayed.description
    figures = "".join(
        f"<figure><h3>{escape(PICTURES[name][0])}</h3>{svg}<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
        for name, svg in svgs(PICTURES, replayed, f"t{number}-").items()
    )
    notes = "".join(f"<li>{escape(it)}</li>" for it in (*told.warnings, *told.notes))
    return (
        f"<section><h2>{escape(told.name)}</h2>{_tiles(replayed)}"
        f'<div class="pictures">{figures}</div></section>'
        f"{table_html(outcomes_table(replayed.bound, replayed.outcomes))}"
        f"{table_html(description_table(told))}<ul>{notes}</ul>"
    )


def _tiles(replayed: Replayed) -> str:
    told = replayed.description
    shown = [
        (f"{told.requests:,}", f"requests in {told.duration_s:,.0f} s"),
        (tokens_text(told.input_tokens), "input tokens"),
        (f"{replayed.bound:.1%}", "of them seen before: what a cache without end hits"),
        (tokens_text(told.unique_tokens), "tokens in distinct blocks"),
    ]
    drawn = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in shown)
    return f'<div class="tiles">{drawn}</div>'
