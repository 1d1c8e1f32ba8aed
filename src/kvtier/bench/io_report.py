"""`kvtier bench io` as one HTML file that needs nothing else."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from datetime import UTC, datetime
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtier.bench.io import IoResult
from kvtier.bench.io_row import Row
from kvtier.bench.io_tables import notes, table
from kvtier.bench.record import machine
from kvtier.config.kinds import size_text
from kvtier.plan.drawing import MARKED, RC, dress, figure_bytes, for_page
from kvtier.plan.files import write_whole
from kvtier.plan.page import page, table_html

OPS = {"store": "Store", "load": "Cold load, verified", "mix": "Reads and writes mixed"}
CAPTION = "Share of the ceiling; dots are single repeats, lines their medians."
COLOURS = {"host": "host", "directory": "shared", "disk": "disk"}


def write_report(path: Path, result: IoResult) -> None:
    """Write the report, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_report(result, datetime.now(UTC)).encode())


def render_report(result: IoResult, made: datetime) -> str:
    """The whole page."""
    facts = machine()
    drawn = "".join(
        f"<figure><h3>{title}</h3>{_picture(result, op)}<figcaption>{CAPTION}</figcaption></figure>"
        for op, title in OPS.items()
        if any(row.op == op for row in result.results)
    )
    said = "".join(f"<li>{escape(text)}</li>" for text in notes(result))
    body = (
        f"<header><h1>Store and cold load, next to what the hardware allows</h1>"
        f'<p class="soft">Made by <code>kvtier bench io</code>, {made:%Y-%m-%d %H:%M} UTC; '
        f"{escape(str(facts['processor']))}, {facts['cores']} cores; samples of {size_text(result.bytes_per_sample)}, "
        f"medians of {result.repeats}.</p></header>"
        f'<div class="pictures">{drawn}</div>{f"<ul>{said}</ul>" if said else ""}{table_html(table(result))}'
    )
    return page("kvtier bench io", body)


def _picture(result: IoResult, op: str) -> str:
    with mpl.rc_context(RC):
        figure = Figure(figsize=(6.6, 4.0), layout="constrained")
        axes = figure.subplots()
        rows = [row for row in result.results if row.op == op]
        for tier, mix, threads in dict.fromkeys((row.tier, row.mix, _fixed(rows, row)) for row in rows):
            chosen = [row for row in rows if (row.tier, row.mix, _fixed(rows, row)) == (tier, mix, threads)]
            _draw(axes, sorted(chosen, key=lambda row: row.chunk_bytes), tier, f"{tier}{_suffix(op, mix, threads)}")
        sizes = sorted({row.chunk_bytes for row in rows})
        axes.axhline(1.0, color=MARKED["soft"], linewidth=1.2, linestyle=(0, (5, 3)))
        axes.set(xscale="log", ylim=(0, None), xlabel="chunk", ylabel="of the ceiling")
        axes.set_xticks(sizes, [size_text(size) for size in sizes])
        axes.minorticks_off()
        axes.legend(loc="best")
        dress(axes, MARKED)
        return for_page(figure_bytes(figure, "svg").decode(), op)


def _fixed(rows: list[Row], row: Row) -> int:
    """Its threads, where rows differ in nothing else; otherwise 0: each has its own best."""
    alike = [it for it in rows if (it.tier, it.mix, it.chunk_bytes) == (row.tier, row.mix, row.chunk_bytes)]
    return row.threads if len(alike) > 1 else 0


def _suffix(op: str, mix: str, threads: int) -> str:
    parts = [mix] if op == "mix" else []
    return " ".join(["", *parts, *([f"{threads} threads"] if threads else [])])


def _draw(axes: Axes, rows: list[Row], tier: str, name: str) -> None:
    colour = MARKED[COLOURS[tier]]
    axes.plot([row.chunk_bytes for row in rows], [row.ratio for row in rows], color=colour, label=name)
    for row in rows:
        shares = [ours / ceiling for ours, ceiling, _ in row.samples]
        axes.plot([row.chunk_bytes] * len(shares), shares, "o", color=colour, markersize=3, alpha=0.5)
