"""Tiered replays as one HTML file that needs nothing else."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from kvtier.plan.files import write_whole
from kvtier.plan.page import table_html
from kvtier.replay.comparing import comparison_table
from kvtier.replay.outcome import Tiered
from kvtier.replay.sheet import figures_html, notes_html, section, sheet
from kvtier.replay.stating import TieredReplay, planning_table, stated_table, tiers_table, ttft_table
from kvtier.replay.tables import description_table
from kvtier.replay.tiered_pictures import PICTURES
from kvtier.size.units import decimal

CAPTIONS = {
    "stack": "By the arrival of the requests. What is stored and computed all the same was expected to be sooner so.",
    "total": "Tokens of prompts by the place where their KV lay; light is what had to be computed.",
    "ttft": "The same requests on the same nodes, with tiers and with everything computed.",
    "demand": "All nodes together. A link that is always busy shows its own speed: to see what would be asked of it, "
    "give it more.",
    "depth": "Transfers on all links of a tier together, mean of each part of the time.",
    "working-set": "Dotted: all blocks that were used so far.",
    "intervals": "Accesses to blocks that were used before, by the time since.",
}


def write_tiered_report(path: Path, replayed: Sequence[TieredReplay]) -> None:
    """Write the report, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_tiered_report(replayed, datetime.now(UTC)).encode())


def render_tiered_report(replayed: Sequence[TieredReplay], made: datetime) -> str:
    """The whole page."""
    by_trace = [list(those) for _, those in groupby(replayed, key=lambda it: id(it.description))]
    return sheet(
        [those[0].description for those in by_trace],
        [_trace(those, f"t{number}") for number, those in enumerate(by_trace)],
        heading="{} through tiers",
        command="kvtier replay --tier",
        intro="The product's own core and planner on each node, in virtual time. The engine's own prefix cache is not "
        "modelled: every hit is a load.",
        made=made,
    )


def _trace(replayed: Sequence[TieredReplay], prefix: str) -> str:
    told = replayed[0].description
    beside = table_html(comparison_table({it.setup: it.outcome for it in replayed})) if len(replayed) > 1 else ""
    sections = [
        section(
            told.name,
            circumstances=_circumstances(it),
            tiles=_tiles(it.outcome),
            figures=figures_html(PICTURES, CAPTIONS, it, f"{prefix}s{number}-"),
            tables=(
                ttft_table(it.outcome),
                tiers_table(it.outcome),
                planning_table(it.outcome),
                stated_table(it.setup),
            ),
        )
        for number, it in enumerate(replayed)
    ]
    return "\n".join([beside, *sections, table_html(description_table(told)), notes_html(told)])


def _circumstances(replayed: TieredReplay) -> str:
    setup, told = replayed.setup, replayed.outcome
    nodes = f"{told.nodes:,} nodes, router {setup.router}" if told.nodes > 1 else "One node"
    cut = "" if told.is_complete else " Broken off: only the requests until then."
    return (
        f"{nodes}, {told.servers} prompts at a time on each; {replayed.model}, {setup.token_bytes:,.0f} bytes a token; "
        f"eviction {setup.evictor}, write policy {setup.write_policy.value}.{cut}"
    )


def _tiles(told: Tiered) -> list[tuple[str, str]]:
    without_s = told.ttft_without.mean_s
    gain = without_s / max(told.ttft.mean_s, 1e-9)
    lowest = told.tiers[-1]
    rated = "" if lowest.rated_writes_per_day is None else f"; rated for {lowest.rated_writes_per_day:g}"
    return [
        (f"{told.hit_rate:.1%}", f"of {told.requests:,} requests' input tokens loaded"),
        (
            f"{told.ttft.mean_s:.3g} s",
            f"mean time to first token; {told.ttft_without.mean_s:.3g} s without ({gain:.2g}x)",
        ),
        (f"{told.busy_share:.0%}", f"of the time prefill is busy; {told.busy_share_without:.0%} without"),
        (
            f"{lowest.drive_writes_per_day:,.2f}",
            f"drive writes a day of {lowest.name}, {decimal(lowest.writes.total_bytes)} in the trace{rated}",
        ),
        (f"{told.planning.regret_s:,.1f} s", "regret of all plans together, against each request's best split"),
    ]
