"""Tiers as they are named on a command line, and what the outcome looks like as a table."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.replay.links import TierSpec
from kvtier.replay.outcome import Latency, Tiered
from kvtier.replay.speeds import DEFAULTS, OTHERS, UNKNOWN, Part, Probed, Speeds, find_part
from kvtier.replay.tiered import HOST, Setup
from kvtier.report.format import binary, decimal, short_count
from kvtier.report.table import Table
from kvtier.size.check import parse_figure
from kvtier.trace.stats import TraceStats

_TIME = re.compile(r"([0-9.]{1,12}) ?(us|ms|s)", re.ASCII)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SPEEDS = ("read_bytes_per_s", "write_bytes_per_s", "latency_s")


PLANNER_MAY_COST = 1.01
"""A planner that makes the mean time to first token longer than this many times loses to loading whatever is there."""
_EXAMPLE = "disk=4TiB,read=12GB/s,write=6GB/s,latency=100us,shared or disk=4xpm1753"


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredReplay:
    """A trace, what it is like, and what tiers did with it."""

    description: TraceStats
    model: str
    setup: Setup
    outcome: Tiered


class Stated(NamedTuple):
    """One figure that a replay was told or assumed."""

    what: str
    value: str
    source: str


def parse_tier(text: str, *, probe: Probed | None = None, gpu: Part | None = None) -> TierSpec:
    """A tier of ``disk=4TiB``, ``disk=4TiB,read=12GB/s,write=6GB/s,latency=100us,shared`` or ``disk=4xpm1753``.

    A speed is what the text says, or its ``part=``, or the probe, or for host memory the GPUs' links, or a default.

    Args:
        text: the tier.
        probe: measured speeds.
        gpu: the GPUs of a node.

    Raises:
        ConfigError: it is written in another way, or names a part that the catalogue lacks.
    """
    head, *rest = [it.strip() for it in text.split(",")]
    name, _, capacity = head.partition("=")
    if not name or not capacity:
        raise ConfigError(f"--tier {text!r}; allowed: such as {_EXAMPLE}")
    said = _said(text, rest)
    part = said.part
    capacity_bytes, capacity_source = _capacity(text, capacity), "--tier"
    if capacity_bytes is None:
        part = find_part(capacity, f"--tier {text!r}: no size", "drive")
        capacity_bytes, capacity_source = part.capacity_bytes or 0, part.source
    known = [
        said.speeds,
        part.speeds if part else UNKNOWN,
        probe.speeds(name) if probe else UNKNOWN,
        gpu.speeds if gpu and name == HOST else UNKNOWN,
        DEFAULTS.get(name, OTHERS),
    ]
    chosen: dict[str, float] = {}
    sources = {"capacity_bytes": capacity_source}
    for field in _SPEEDS:
        best = next(it for it in known if getattr(it, field) is not None)
        chosen[field], sources[field] = getattr(best, field), best.source
    return TierSpec(
        name=name,
        capacity_bytes=capacity_bytes,
        read_bytes_per_s=chosen["read_bytes_per_s"],
        write_bytes_per_s=chosen["write_bytes_per_s"],
        latency_s=chosen["latency_s"],
        is_shared=said.is_shared,
        drive_bytes=said.drive_bytes or (part.capacity_bytes if part else None),
        rated_writes_per_day=part.rated_writes_per_day if part else None,
        sources=sources,
    )


class _Said(NamedTuple):
    """What stands behind a tier's size."""

    speeds: Speeds
    part: Part | None
    drive_bytes: int | None
    is_shared: bool


def _said(text: str, words: Sequence[str]) -> _Said:
    speeds: dict[str, float] = {}
    part, drive_bytes, is_shared = None, None, False
    for word in words:
        key, _, value = word.partition("=")
        if key in ("read", "write"):
            speeds[f"{key}_bytes_per_s"] = _bytes(text, value.removesuffix("/s"))
        elif key == "latency":
            speeds["latency_s"] = _seconds(text, value)
        elif key == "part":
            part = find_part(value, f"--tier {text!r}")
        elif key == "drives":
            drive_bytes = round(_bytes(text, value))
        elif word == "shared":
            is_shared = True
        else:
            allowed = "read=, write=, latency=, part=, drives=, shared"
            raise ConfigError(f"--tier {text!r}: {word!r} is unknown; allowed: {allowed}")
    return _Said(Speeds(*(speeds.get(it) for it in _SPEEDS), source="--tier"), part, drive_bytes, is_shared)


def _capacity(text: str, capacity: str) -> int | None:
    """The size; None where it is something else."""
    if re.fullmatch(r"[0-9.,_]+ ?[a-z]*", capacity, re.IGNORECASE | re.ASCII) and not re.match(r"[0-9]+ ?x", capacity):
        return round(_bytes(text, capacity))
    return None


def stated(setup: Setup) -> list[Stated]:
    """The figures that a replay rests on, and where each comes from."""
    prefill = setup.prefill
    told = [Stated("prefill of one prompt", f"{prefill.tokens_per_s:,.0f} tokens/s", prefill.source)]
    for tier in setup.tiers:
        values = {
            "capacity_bytes": ("capacity", binary(tier.capacity_bytes)),
            "read_bytes_per_s": ("to the engine" if tier.name == HOST else "reads", _rate(tier.read_bytes_per_s)),
            "write_bytes_per_s": ("from the engine" if tier.name == HOST else "writes", _rate(tier.write_bytes_per_s)),
            "latency_s": ("latency", f"{tier.latency_s * 1e6:,.0f} us"),
        }
        told += [
            Stated(f"{tier.name}, {what}", value, tier.sources.get(field, "given"))
            for field, (what, value) in values.items()
        ]
    return told


def stated_table(setup: Setup) -> Table:
    """The same as a table."""
    rows = tuple((it.what, it.value, it.source) for it in stated(setup))
    return Table(title="What it rests on", columns=("", "value", "source"), rows=rows, numeric=0)


def tiers_table(told: Tiered) -> Table:
    """A row for each tier."""
    rows = tuple(
        (
            it.name,
            binary(it.capacity_bytes),
            f"{it.hit_rate:.4f}",
            short_count(it.hit_tokens),
            decimal(it.reads.total_bytes),
            f"{_rate(it.reads.mean_bytes_per_s)} / {_rate(it.reads.peak_together_bytes_per_s)}",
            f"{it.reads.used_share:.0%}",
            f"{it.reads.mean_depth:.1f} / {it.reads.peak_depth}",
            decimal(it.writes.total_bytes),
            f"{_rate(it.writes.mean_bytes_per_s)} / {_rate(it.writes.peak_together_bytes_per_s)}",
            f"{it.writes.used_share:.0%}",
            f"{it.writes.mean_depth:.1f} / {it.writes.peak_depth}",
            "-" if it.name == HOST else f"{it.drive_writes_per_day:,.2f}{_of_rated(it.rated_writes_per_day)}",
        )
        for it in told.tiers
    )
    columns = (
        *("tier", "capacity", "hit rate", "hit tokens", "read", "mean / peak", "used", "depth"),
        *("written", "mean / peak", "used", "depth", "drive writes a day"),
    )
    note = (
        "Hits by the place where the bytes lay. For host memory, what is read went to the engine and what is written "
        "came from it; below, these are promotions and demotions. A tier that each node has is told for all together, "
        "its capacity, its depth and its drive writes for one. A peak is that of a second; used is the share of what "
        "the link could have moved; depth is what is on the link or waits for it, mean and most."
    )
    return Table(title="Tiers", columns=columns, rows=rows, numeric=12, note=note)


def planning_table(told: Tiered) -> Table:
    """What the planner decided, and how good that was."""
    it = told.planning

    def tokens(count: int) -> str:
        return f"{short_count(count)} ({count / told.input_tokens:.1%} of the input)"

    rows = (
        ("requests that found something", f"{it.requests:,}"),
        ("loads, of these trials of a slow place", f"{it.loads:,}, {it.trials:,}"),
        ("loads that brought less than asked for", f"{it.cut_loads:,}"),
        ("loads that found something on its way for others", f"{told.convoys:,}"),
        ("tokens loaded", tokens(it.loaded_tokens)),
        ("tokens stored, but sooner computed", tokens(it.skipped_tokens)),
        ("tokens asked for and not brought", tokens(it.cut_tokens)),
        ("loads, expected and taken", f"{it.predicted_load_s:,.1f} s, {it.load_s:,.1f} s"),
        ("the requests, if all were computed", f"{it.recompute_s:,.1f} s"),
        ("the requests, as they were served", f"{it.taken_s:,.1f} s"),
        ("the requests, each with its best split", f"{it.best_s:,.1f} s"),
        ("regret against these, sum and most of one", f"{it.regret_s:,.2f} s, {it.regret_most_s:,.3f} s"),
        ("chunks not stored", f"{told.dropped_chunks:,}"),
        ("demotions not made", f"{told.dropped_demotions:,}"),
    )
    note = (
        "Seconds are those of the requests' loads, or of the prompts before them if these take longer, and of "
        "computing the rest, summed. The best split is found by trying every one, with the true speeds and queues of "
        "the links."
    )
    return Table(title="Load or compute", columns=("", "value"), rows=rows, numeric=1, note=note)


def planner_loses(told: Tiered, unplanned: Tiered) -> str:
    """A warning where the planner makes requests later than loading whatever is there; else empty."""
    planned_s, unplanned_s = told.ttft.mean_s, unplanned.ttft.mean_s
    if planned_s <= PLANNER_MAY_COST * unplanned_s:
        return ""
    return (
        f"the planner loses here: a mean time to first token of {planned_s:.3f} s with it, and {unplanned_s:.3f} s "
        "with --no-planner"
    )


def ttft_table(told: Tiered, unplanned: Tiered | None = None) -> Table:
    """With and without tiers; `unplanned` are the same requests where whatever is there is loaded."""

    def row(name: str, it: Latency, busy: float) -> tuple[str, ...]:
        return (name, *(f"{value:.3f}" for value in (it.mean_s, it.p50_s, it.p95_s, it.p99_s)), f"{busy:.0%}")

    rows = (
        row("without tiers", told.ttft_without, told.busy_share_without),
        row("with tiers", told.ttft, told.busy_share),
        *([row("with tiers, no planner", unplanned.ttft, unplanned.busy_share)] if unplanned is not None else []),
    )
    columns = ("time to first token, s", "mean", "p50", "p95", "p99", "prefill busy")
    return Table(title="Time to first token", columns=columns, rows=rows, numeric=5)


def _rate(bytes_per_s: float) -> str:
    return f"{decimal(bytes_per_s)}/s"


def _of_rated(writes_per_day: float | None) -> str:
    return "" if writes_per_day is None else f" of {writes_per_day:g} rated"


def _bytes(whole: str, text: str) -> float:
    try:
        figure = parse_figure(text)
    except ValueError as error:
        raise ConfigError(f"--tier {whole!r}: {text!r} is {error}") from None
    return figure.bytes(1024 if figure.is_binary else 1000)


def _seconds(whole: str, text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    if found is None or found[1].count(".") > 1:
        raise ConfigError(f"--tier {whole!r}: latency {text!r}; allowed: such as 100us, 2ms or 1s")
    return float(found[1]) * _TIME_UNITS[found[2]]
