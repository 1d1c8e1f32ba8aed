"""A tiered replay's pictures: where prompts came from, what passed over the links, what was held, and what it brought.

Imported only where something is drawn, after `kvtier.plan.files.check_library`.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from kvtier.plan.drawing import Colours, Pictures
from kvtier.replay.outcome import QUANTILES, OverTime
from kvtier.replay.pictures import draw_intervals
from kvtier.replay.stating import TieredReplay
from kvtier.replay.tables import tokens_text
from kvtier.replay.tiered import HOST
from kvtier.size.units import decimal

_OTHERS = ("shared", "gpu", "tiered")
"""Colours of tiers that are neither host memory nor disk."""
_MINUTE_S = 60.0


def _minutes(over_time: OverTime, *, at: float) -> list[float]:
    """Of each part: 0.5 is its middle, 1 its end."""
    count = len(over_time.input_tokens_per_s)
    return [(place + at) * over_time.part_s / _MINUTE_S for place in range(count)]


def _hues(replayed: TieredReplay, colours: Colours) -> dict[str, str]:
    names = [it.name for it in replayed.setup.tiers]
    others = [name for name in names if name not in (HOST, "disk")]
    picked = {name: _OTHERS[place % len(_OTHERS)] for place, name in enumerate(others)}
    return {name: colours[picked.get(name, name)] for name in names}


def _sources(replayed: TieredReplay) -> list[tuple[str, Sequence[float]]]:
    """Name and tokens a second of each place that prompts came from, what is computed last."""
    over_time = replayed.outcome.over_time
    parts: list[tuple[str, Sequence[float]]] = [(name, it.hit_tokens_per_s) for name, it in over_time.tiers.items()]
    loaded = np.sum([it for _, it in parts], axis=0)
    skipped = np.asarray(over_time.skipped_tokens_per_s)
    computed = np.maximum(np.asarray(over_time.input_tokens_per_s) - loaded - skipped, 0.0)
    return [*parts, ("stored, but computed", skipped.tolist()), ("computed", computed.tolist())]


def _source_colours(replayed: TieredReplay, colours: Colours) -> list[str]:
    return [*_hues(replayed, colours).values(), colours["soft"], colours["line"]]


def _draw_stack(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    sources = _sources(replayed)
    minutes = _minutes(replayed.outcome.over_time, at=0.5)
    names = [name for name, _ in sources]
    values = [list(it) for _, it in sources]
    axes.stackplot(minutes, values, labels=names, colors=_source_colours(replayed, colours), linewidth=0)
    most = max(replayed.outcome.over_time.input_tokens_per_s)
    # Above the curves is room for their names.
    axes.set(xlabel="minutes", ylabel="input tokens a second", ylim=(0, 1.35 * most), xlim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: tokens_text(value))
    axes.legend(loc="upper right", ncols=2)


def _draw_total(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    part_s = replayed.outcome.over_time.part_s
    sources = _sources(replayed)
    tokens = [sum(it) * part_s for _, it in sources]
    names = [name for name, _ in sources]
    axes.barh(names, tokens, color=_source_colours(replayed, colours))
    total = max(sum(tokens), 1.0)
    for place, count in enumerate(tokens):
        axes.annotate(
            f"{count / total:.1%}",
            (count, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=colours["ink"],
        )
    axes.invert_yaxis()
    axes.set(xlabel="input tokens", xlim=(0, 1.15 * max(*tokens, 1.0)))
    axes.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def _draw_demand(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    told = replayed.outcome
    minutes = _minutes(told.over_time, at=0.5)
    most = 0.0
    for tier, colour in zip(told.tiers, _hues(replayed, colours).values(), strict=True):
        over_time = told.over_time.tiers[tier.name]
        for what, series, use, dash in (
            ("to the engine" if tier.name == HOST else "reads", over_time.read_bytes_per_s, tier.reads, "-"),
            (
                "from the engine" if tier.name == HOST else "writes",
                over_time.written_bytes_per_s,
                tier.writes,
                (0, (4, 2)),
            ),
        ):
            name = (
                f"{tier.name} {what}: {decimal(use.mean_bytes_per_s)}/s mean, "
                f"{decimal(use.peak_together_bytes_per_s)}/s peak"
            )
            axes.plot(minutes, series, color=colour, linestyle=dash, linewidth=1.5, label=name)
            most = max(most, *series)
    axes.set(xlabel="minutes", ylabel="bytes a second", ylim=(0, (1.2 + 0.16 * len(told.tiers)) * most), xlim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: decimal(value))
    axes.legend(loc="upper right")


def _draw_depth(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    told = replayed.outcome
    minutes = _minutes(told.over_time, at=0.5)
    for tier, colour in zip(told.tiers, _hues(replayed, colours).values(), strict=True):
        over_time = told.over_time.tiers[tier.name]
        reads, writes = ("to the engine", "from the engine") if tier.name == HOST else ("reads", "writes")
        axes.plot(minutes, over_time.read_depth, color=colour, linewidth=1.5, label=f"{tier.name} {reads}")
        axes.plot(
            minutes,
            over_time.write_depth,
            color=colour,
            linewidth=1.5,
            linestyle=(0, (4, 2)),
            label=f"{tier.name} {writes}",
        )
    axes.set(xlabel="minutes", ylabel="transfers under way or waiting", ylim=(0, None), xlim=(0, None))
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.legend(loc="upper right", ncols=2)


def _draw_working_set(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    told, trace = replayed.outcome.over_time, replayed.description.over_time
    token_bytes = replayed.setup.token_bytes
    minutes = (np.arange(len(trace.unique_tokens)) + 1) * trace.bin_s / _MINUTE_S
    axes.plot(minutes, trace.unique_tokens * token_bytes, color=colours["soft"], linestyle=":", label="distinct so far")
    used = f"used within {trace.bin_s:,.0f} s"
    axes.plot(minutes, trace.used_tokens * token_bytes, color=colours["tiered"], linewidth=1.5, label=used)
    for (name, it), colour in zip(told.tiers.items(), _hues(replayed, colours).values(), strict=True):
        axes.plot(_minutes(told, at=1.0), it.held_bytes, color=colour, label=f"held by {name}")
    axes.set(xlabel="minutes", ylabel="KV", ylim=(0, None), xlim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: decimal(value))
    axes.legend(loc="upper left")


def _draw_ttft(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    told = replayed.outcome
    share = np.linspace(0, 1, QUANTILES + 1)
    for name, it, colour in (
        ("everything computed", told.ttft_without, colours["alone"]),
        ("with tiers", told.ttft, colours["tiered"]),
    ):
        label = f"{name}: {it.p50_s:.3g} s median, {it.p99_s:.3g} s p99"
        axes.plot(np.maximum(it.quantiles_s, 1e-4), share, color=colour, label=label)
    axes.set(xscale="log", xlabel="seconds to the first token", ylabel="share of requests within", ylim=(0, 1.2))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="upper left")


def _draw_intervals(axes: Axes, replayed: TieredReplay, colours: Colours) -> None:
    draw_intervals(axes, replayed.description, colours)


PICTURES: Pictures[TieredReplay] = {
    "stack": ("Where prompts came from, over time", _draw_stack),
    "total": ("Where prompts came from, in all", _draw_total),
    "ttft": ("Time to first token", _draw_ttft),
    "demand": ("What passed over each link", _draw_demand),
    "depth": ("Queue depth", _draw_depth),
    "working-set": ("Working set, and what is held", _draw_working_set),
    "intervals": ("How soon a block is used again", _draw_intervals),
}
