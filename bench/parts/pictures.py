"""Charts of the benchmarks that run an engine. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.parts.turns import ARMS, DISK, HOST, RECOMPUTE, ArmSummary, MultiturnResult
from matplotlib.axes import Axes

from kvtier.report.chart import Chart, Colours, write_charts

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
    chart = Chart(f"{summary['shape']}, {summary['device']}", _draw_contexts)
    write_charts("--picture", path, {"ttft": chart}, summary["ttft_ms"])


def draw_multiturn(result: MultiturnResult, path: Path) -> None:
    """All curves of a multi-turn run in one file.

    Raises:
        ConfigError: the file cannot be written.
    """
    charts = {
        "ttft": Chart("Time to first token by users", _draw_ttft),
        "rate": Chart("Output tokens per second by users", _draw_rate),
        "sources": Chart("Source of the KV of prompts", _draw_sources),
    }
    found = result.summaries()
    if any(it.joules_per_output_token is not None for it in found):
        charts["energy"] = Chart("Energy per output token", _draw_energy)
    write_charts("--picture", path, charts, found)


def _draw_contexts(axes: Axes, ttft_ms: Mapping[str, Mapping[str, float]], colours: Colours) -> None:
    for arm, (label, colour) in TTFT_ARMS.items():
        points = sorted((int(context), ms) for context, ms in ttft_ms.get(arm, {}).items())
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=label, color=colours[colour])
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens of the prompt", ylabel="time to first token, ms (median)")
    axes.legend()


def _draw_ttft(axes: Axes, found: Sequence[ArmSummary], colours: Colours) -> None:
    for arm, points in _by_arm(found):
        colour, users = colours[COLOURS[arm]], [it.users for it in points]
        axes.plot(users, [it.ttft_ms["p50"] for it in points], "o-", color=colour, label=NAMES[arm], markersize=5)
        axes.plot(users, [it.ttft_ms["p95"] for it in points], ":", color=colour, linewidth=1.4)
    axes.set(yscale="log", xlabel="users", ylabel="ms, later turns; median, dotted: p95")
    _finish(axes, found)


def _draw_rate(axes: Axes, found: Sequence[ArmSummary], colours: Colours) -> None:
    for arm, points in _by_arm(found):
        rates = [it.output_tokens_per_s for it in points]
        axes.plot([it.users for it in points], rates, "o-", color=colours[COLOURS[arm]], label=NAMES[arm], markersize=5)
    axes.set(xlabel="users", ylabel="output tokens/s", ylim=(0, None))
    _finish(axes, found)


def _draw_energy(axes: Axes, found: Sequence[ArmSummary], colours: Colours) -> None:
    for arm, points in _by_arm(found):
        known = [it for it in points if it.joules_per_output_token is not None]
        users, joules = [it.users for it in known], [it.joules_per_output_token for it in known]
        axes.plot(users, joules, "o-", color=colours[COLOURS[arm]], label=NAMES[arm], markersize=5)
    axes.set(xlabel="users", ylabel="J for an output token", ylim=(0, None))
    _finish(axes, found)


def _draw_sources(axes: Axes, found: Sequence[ArmSummary], colours: Colours) -> None:
    places = range(len(found))
    begins = [0.0] * len(found)
    for source, colour in SOURCES:
        shares = [_tokens(it, source) / it.prompt_tokens for it in found]
        axes.barh(places, shares, left=begins, color=colours[colour], label=source, height=0.7)
        begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
    axes.set_yticks(places, [f"{it.users} users, {it.arm}" for it in found], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="of all prompt tokens", xlim=(0, 1))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1.2)


def _tokens(it: ArmSummary, source: str) -> int:
    if source in {"resident", "computed"}:
        return it.resident_tokens if source == "resident" else it.computed_tokens
    return sum(tokens for place, tokens in it.restored_tokens.items() if (place == "host") == (source == "host"))


def _by_arm(found: Sequence[ArmSummary]) -> list[tuple[str, list[ArmSummary]]]:
    return [(arm, points) for arm in ARMS if (points := [it for it in found if it.arm == arm])]


def _finish(axes: Axes, found: Sequence[ArmSummary]) -> None:
    axes.set_xticks(sorted({it.users for it in found}))
    axes.legend(loc="best")
