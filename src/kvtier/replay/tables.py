"""What the command and the report show of replays and traces."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.replay.hits import Outcome
from kvtier.report.format import share_text, short_count
from kvtier.report.table import Table
from kvtier.trace.stats import TraceStats

CONVENTION = (
    "One cache, the whole trace, no warm-up. Hit rate: tokens of the longest leading run of blocks that are here, over "
    "input tokens; prompts only. A prompt's deepest block is touched first. Capacity and what is written count whole "
    "blocks."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A trace, what it is like, and what policies did with it."""

    description: TraceStats
    bound: float
    """Hit rate of a cache without end."""
    outcomes: Sequence[Outcome]


def outcomes_table(bound: float, outcomes: Sequence[Outcome]) -> Table:
    """A row for each outcome."""
    rows = tuple(
        (
            it.policy,
            short_count(it.capacity_tokens),
            f"{it.hit_rate:.4f}",
            f"{it.hit_rate / bound:.1%}" if bound else "-",
            short_count(it.hit_tokens),
            short_count(it.written_tokens),
            f"{it.evictions:,}",
        )
        for it in outcomes
    )
    columns = ("policy", "capacity", "hit rate", "of possible", "hit tokens", "written tokens", "evictions")
    return Table(title="Hit rates", columns=columns, rows=rows, numeric=6, note=CONVENTION)


def description_table(told: TraceStats) -> Table:
    """The statistics of a trace."""
    late = told.infinite_hit_rate_second_half
    rows = [
        ("requests", f"{told.requests:,}"),
        ("duration", f"{told.duration_s:,.1f} s"),
        ("sessions", "-" if told.sessions is None else f"{told.sessions:,}"),
        ("tokens of a block", f"{told.block_tokens:,}"),
        ("input tokens", f"{told.input_tokens:,}"),
        ("input tokens of a request, mean", f"{told.input_mean:,.0f}"),
        ("input tokens of a request, median", f"{told.input_p50:,.0f}"),
        ("input tokens of a request, 99 %", f"{told.input_p99:,.0f}"),
        ("output tokens of a request, mean", f"{told.output_mean:,.0f}"),
        ("unique tokens", "-" if told.unique_tokens is None else f"{told.unique_tokens:,}"),
        ("hit rate without end", "-" if told.infinite_hit_rate is None else f"{told.infinite_hit_rate:.4f}"),
        ("the same, second half of the requests", "-" if late is None else f"{late:.4f}"),
        ("blocks used once", share_text(told.used_once)),
        ("reuse that the top 1 % of blocks have", share_text(told.top_reuse)),
        ("reuse interval, median", _seconds(told.interval_p50_s)),
        ("reuse interval, 90 %", _seconds(told.interval_p90_s)),
        ("reuse interval, 99 %", _seconds(told.interval_p99_s)),
        ("first turns", share_text(told.first_turns)),
        ("written for each token read, without end", _ratio(told.written_per_read)),
    ]
    rows += [
        (f"working set, {window_s:,.0f} s after the last use", f"{tokens:,.0f} tokens")
        for window_s, tokens in told.working_set_tokens.items()
    ]
    rows += [("blocks that follow another than before", f"{told.prefix_violations:,}")] * bool(told.prefix_violations)
    return Table(title="The trace", columns=("", "value"), rows=tuple(rows), numeric=1)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
