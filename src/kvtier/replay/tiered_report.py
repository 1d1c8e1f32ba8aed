"""Tiered replays as one HTML file that needs nothing else."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvtier.plan.drawing import svgs
from kvtier.plan.files import write_whole
from kvtier.plan.page import page, table_html
from kvtier.replay.outcome import Tiered
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
    """Write the report; missing parent directories are made.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_tiered_report(replayed, datetime.now(UTC)).encode())


def render_tiered_report(replayed: Sequence[TieredReplay], made: datetime) -> str:
    """The whole page."""
    names = ", ".join(Path(it.description.name).name for it in replayed)
    head = (
        f"<header><h1>{escape(names)} through tiers</h1>"
        f'<p class="soft">Made by <code>kvtier replay --tier</code>, {made:%Y-%m-%d %H:%M} UTC.</p>'
        "<p>The product's own core and planner on each node, in virtual time. The engine's own prefix cache is not "
        "modelled: every hit is a load.</p></header>"
    )
    return page(f"kvtier replay: {names}", "\n".join([head, *(_trace(it, n) for n, it in enumerate(replayed))]))


def _trace(replayed: TieredReplay, number: int) -> str:
    told = replayed.description
    figures = "".join(
        f"<figure><h3>{escape(PICTURES[name][0])}</h3>{svg}<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>"
        for name, svg in svgs(PICTURES, replayed, f"t{number}-").items()
    )
    tables = (
        ttft_table(replayed.outcome),
        tiers_table(replayed.outcome),
        planning_table(replayed.outcome),
        stated_table(replayed.setup),
        description_table(told),
    )
    notes = "".join(f"<li>{escape(it)}</li>" for it in (*told.warnings, *told.notes))
    return (
        f"<section><h2>{escape(told.name)}</h2><p>{escape(_circumstances(replayed))}</p>{_tiles(replayed.outcome)}"
        f'<div class="pictures">{figures}</div></section>{"".join(map(table_html, tables))}<ul>{notes}</ul>'
    )


def _circumstances(replayed: TieredReplay) -> str:
    setup, told = replayed.setup, replayed.outcome
    nodes = f"{told.nodes:,} nodes, router {setup.router}" if told.nodes > 1 else "One node"
    cut = "" if told.is_complete else " Broken off: only the requests until then."
    return (
        f"{nodes}, {told.servers} prompts at a time on each; {replayed.model}, {setup.token_bytes:,.0f} bytes a token; "
        f"eviction {setup.evictor}, admission {setup.admitter}, write policy {setup.write_policy.value}.{cut}"
    )


def _tiles(told: Tiered) -> str:
    without_s = told.ttft_without.mean_s
    gain = without_s / max(told.ttft.mean_s, 1e-9)
    lowest = told.tiers[-1]
    rated = "" if lowest.rated_writes_per_day is None else f"; rated for {lowest.rated_writes_per_day:g}"
    shown = [
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
    drawn = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in shown)
    return f'<div class="tiles">{drawn}</div>'
