"""A replay's pictures, drawn by matplotlib: capacity curves, intervals of reuse, the working set, and demand.

Imported only where something is drawn, after `kvtier.plan.files.check_library`.
"""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false

import numpy as np
from matplotlib.axes import Axes

from kvtier.plan.drawing import Colours, Pictures
from kvtier.replay.tables import Replayed, tokens_text
from kvtier.trace.stats import Description

_HUES = ("gpu", "disk", "shared", "host", "ink")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_INTERVAL_LEAST_S = 0.1
_OWN = {"default": "tiered", "lru": "alone"}


def _draw_capacity(axes: Axes, replayed: Replayed, colours: Colours) -> None:
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for it in replayed.outcomes:
        if it.capacity_tokens is not None:
            by_policy.setdefault(it.policy, []).append((it.capacity_tokens, it.hit_rate))
    others = 0
    for policy, points in by_policy.items():
        x, y = zip(*sorted(points), strict=True)
        if policy == "min":
            axes.plot(x, y, color=colours["soft"], linestyle=(0, (5, 3)), marker="o", markersize=3, label="min (bound)")
            continue
        if policy in _OWN:
            colour, dash = colours[_OWN[policy]], "-"
        else:
            colour, dash = colours[_HUES[others % len(_HUES)]], _DASHES[others // len(_HUES) % len(_DASHES)]
            others += 1
        axes.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=4, label=policy)
    axes.axhline(replayed.bound, color=colours["soft"], linewidth=1.2, linestyle=":", label="without end")
    axes.set(xscale="log", xlabel="tokens of capacity", ylabel="hit rate of tokens", ylim=(0, None))
    axes.xaxis.set_major_formatter(lambda value, _: tokens_text(value))
    axes.legend(loc="best")


def _draw_intervals(axes: Axes, replayed: Replayed, colours: Colours) -> None:
    draw_intervals(axes, replayed.description, colours)


def draw_intervals(axes: Axes, description: Description, colours: Colours) -> None:
    """How soon a block is used again."""
    it = description.intervals
    total = it.counts.sum()
    if not total:
        axes.text(0.5, 0.5, "nothing is reused", transform=axes.transAxes, ha="center", color=colours["soft"])
        return
    share = np.cumsum(it.counts) / total
    shown = (it.seconds >= _INTERVAL_LEAST_S) & (share > 0.001) & (share < 0.9999)
    if not shown.any():
        shown = it.counts > 0
    axes.plot(it.seconds[shown], share[shown], color=colours["tiered"])
    axes.set(xscale="log", xlabel="seconds since the last use", ylabel="share of reuse within", ylim=(0, 1))


def _draw_working_set(axes: Axes, replayed: Replayed, colours: Colours) -> None:
    it = replayed.description.over_time
    minutes = (np.arange(len(it.unique_tokens)) + 1) * it.bin_s / 60
    axes.plot(minutes, it.unique_tokens, color=colours["disk"], label="distinct so far")
    axes.plot(minutes, it.used_tokens, color=colours["tiered"], label=f"used within {it.bin_s:,.0f} s")
    axes.set(xlabel="minutes", ylabel="tokens", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: tokens_text(value))
    axes.legend(loc="upper left")


def _draw_demand(axes: Axes, replayed: Replayed, colours: Colours) -> None:
    it = replayed.description.over_time
    minutes = (np.arange(len(it.input_tokens)) + 0.5) * it.bin_s / 60
    per_s = max(it.bin_s, 1e-9)
    axes.plot(minutes, it.input_tokens / per_s, color=colours["gpu"], label="asked for")
    axes.plot(minutes, it.new_tokens / per_s, color=colours["tiered"], label="never seen before")
    # Above the curves is room for their names.
    axes.set(xlabel="minutes", ylabel="input tokens a second", ylim=(0, 1.25 * float(it.input_tokens.max()) / per_s))
    axes.yaxis.set_major_formatter(lambda value, _: tokens_text(value))
    axes.legend(loc="upper right")


PICTURES: Pictures[Replayed] = {
    "capacity": ("Hit rate against capacity", _draw_capacity),
    "intervals": ("How soon a block is used again", _draw_intervals),
    "working-set": ("Working set over time", _draw_working_set),
    "demand": ("Demand over time", _draw_demand),
}
