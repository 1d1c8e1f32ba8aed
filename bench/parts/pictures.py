"""Charts of the benchmarks that run an engine. Needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.parts.turns import ARMS, DISK, HOST, RECOMPUTE, ArmSummary, MultiturnResult

from kvtier.tools.charts.chart import Axis, Chart, Curve, stacked, write_charts

COLOURS = {RECOMPUTE: "computed", HOST: "host", DISK: "disk"}
NAMES = {RECOMPUTE: "recompute", HOST: "kvtier, host memory", DISK: "kvtier, host memory and disk"}
SOURCES = (("resident", "gpu"), ("host", "host"), ("disk", "disk"), ("computed", "computed"))
TTFT_ARMS = {
    "recompute": ("computed", "computed"),
    "host": ("from host memory", "host"),
    "disk": ("from disk", "disk"),
    "store": ("computed and stored", "tiered"),
}
"""Label and colour of each arm."""


def draw_ttft(summary: Mapping[str, Any], path: Path) -> None:
    """Time to first token by context length, from the results of a record.

    Raises:
        ConfigError: the file cannot be written.
    """
    marks: list[Curve] = []
    for arm, (label, colour) in TTFT_ARMS.items():
        points = sorted((int(context), ms) for context, ms in summary["ttft_ms"].get(arm, {}).items())
        if points:
            x, y = [context for context, _ in points], [ms for _, ms in points]
            marks.append(Curve(x=x, y=y, colour=colour, label=label, marker="o"))
    chart = Chart(
        heading=f"{summary['shape']}, {summary['device']}",
        marks=marks,
        x=Axis(label="tokens of the prompt", is_log=True),
        y=Axis(label="time to first token, ms (median)", is_log=True),
    )
    write_charts("--picture", path, {"ttft": chart})


def draw_multiturn(result: MultiturnResult, path: Path) -> None:
    """All curves of a multi-turn run in one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    found = result.summaries()
    by_arm = {arm: points for arm in ARMS if (points := [it for it in found if it.arm == arm])}
    users = Axis(label="users", ticks=sorted({it.users for it in found}))
    medians = [_line(arm, points, lambda it: it.ttft_ms["p50"]) for arm, points in by_arm.items()]
    tails = [
        replace(_line(arm, points, lambda it: it.ttft_ms["p95"]), dash=":", width=1.4, marker="", label="")
        for arm, points in by_arm.items()
    ]
    names = [f"{it.users} users, {it.arm}" for it in found]
    shares = [(source, colour, [_tokens(it, source) for it in found]) for source, colour in SOURCES]
    charts = {
        "ttft": Chart(
            heading="Time to first token by users",
            marks=[*medians, *tails],
            x=users,
            y=Axis(label="ms, later turns; median, dotted: p95", is_log=True),
        ),
        "rate": Chart(
            heading="Output tokens per second by users",
            marks=[_line(arm, points, lambda it: it.output_tokens_per_s) for arm, points in by_arm.items()],
            x=users,
            y=Axis(label="output tokens/s", least=0),
        ),
        "sources": Chart(
            heading="Source of the KV of prompts",
            marks=stacked(names, shares),
            x=Axis(label="of all prompt tokens", least=0, most=1),
        ),
    }
    if any(it.joules_per_output_token is not None for it in found):
        charts["energy"] = Chart(
            heading="Energy per output token",
            marks=[_line(arm, points, lambda it: it.joules_per_output_token) for arm, points in by_arm.items()],
            x=users,
            y=Axis(label="J for an output token", least=0),
        )
    write_charts("--picture", path, charts)


def _line(arm: str, points: Sequence[ArmSummary], of: Callable[[ArmSummary], float | None]) -> Curve:
    known = [(it.users, value) for it in points if (value := of(it)) is not None]
    x, y = [users for users, _ in known], [value for _, value in known]
    return Curve(x=x, y=y, colour=COLOURS[arm], label=NAMES[arm], marker="o")


def _tokens(it: ArmSummary, source: str) -> int:
    if source in {"resident", "computed"}:
        return it.resident_tokens if source == "resident" else it.computed_tokens
    return sum(tokens for place, tokens in it.restored_tokens.items() if (place == "host") == (source == "host"))
