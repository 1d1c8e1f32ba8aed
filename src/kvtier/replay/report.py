"""Replays as one HTML file that needs nothing else."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvtier.plan.files import write_whole
from kvtier.replay.pictures import PICTURES
from kvtier.replay.sheet import figures_html, notes_html, section, sheet
from kvtier.replay.tables import CONVENTION, Replayed, description_table, outcomes_table, tokens_text

CAPTIONS = {
    "capacity": "Dashed is Belady's bound for whole prefixes, dotted a cache without end.",
    "intervals": "Accesses to blocks that were used before, by the time since.",
    "working-set": "Distinct blocks since the start, and those that are used within one part of the time.",
    "demand": "What no cache could have had is what must be computed at least.",
}


def write_report(path: Path, replayed: Sequence[Replayed]) -> None:
    """Write the report, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_report(replayed, datetime.now(UTC)).encode())


def render_report(replayed: Sequence[Replayed], made: datetime) -> str:
    """The whole page."""
    return sheet(
        [it.description for it in replayed],
        [_trace(it, number) for number, it in enumerate(replayed)],
        heading="Replay of {}",
        command="kvtier replay",
        intro=CONVENTION,
        made=made,
    )


def _trace(replayed: Replayed, number: int) -> str:
    told = replayed.description
    told_of = section(
        told.name,
        tiles=_tiles(replayed),
        figures=figures_html(PICTURES, CAPTIONS, replayed, f"t{number}-"),
        tables=(outcomes_table(replayed.bound, replayed.outcomes), description_table(told)),
    )
    return told_of + notes_html(told)


def _tiles(replayed: Replayed) -> list[tuple[str, str]]:
    told = replayed.description
    return [
        (f"{told.requests:,}", f"requests in {told.duration_s:,.0f} s"),
        (tokens_text(told.input_tokens), "input tokens"),
        (f"{replayed.bound:.1%}", "of them seen before: what a cache without end hits"),
        (tokens_text(told.unique_tokens), "tokens in distinct blocks"),
    ]
