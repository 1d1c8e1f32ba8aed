"""Computes a trace's statistics in one pass: lengths, reuse, reuse intervals, working sets, and load over time."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tools.trace.arrays import Column, TraceArrays

WINDOWS_S = (60.0, 300.0, 600.0, 3600.0)
"""Times to live for which working sets are measured."""
BINS = 120
"""Number of points in a time series."""

Floats = npt.NDArray[np.float64]


class LogBuckets(NamedTuple):
    """Logarithmic buckets of times."""

    least_s: float
    per_doubling: int
    buckets: int

    @property
    def edges_s(self) -> Floats:
        """Upper edges of the buckets."""
        return self.least_s * 2.0 ** (np.arange(self.buckets) / self.per_doubling)

    def of(self, times_s: Floats) -> npt.NDArray[np.int64]:
        """Return the bucket of each time. Times beyond the last edge count in the last bucket."""
        place = np.log2(np.maximum(times_s, self.least_s) / self.least_s) * self.per_doubling
        return np.minimum(np.ceil(place).astype(np.int64), self.buckets - 1)


_BUCKETS = LogBuckets(2.0**-10, 256, 256 * 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseIntervals:
    """Distribution of the times between two successive uses of a block. Each reuse counts once."""

    seconds: Floats
    """Upper edges of the buckets."""
    counts: Floats

    def quantile(self, share: float) -> float | None:
        """Return the quantile at `share` in seconds, or None if no block is reused."""
        total = self.counts.sum()
        if not total:
            return None
        return float(self.seconds[bisect_left(np.cumsum(self.counts).tolist(), share * total)])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSeries:
    """Values over time, for each of `BINS` equal parts of the trace's duration."""

    bin_s: float
    input_tokens: Floats
    new_tokens: Floats
    """Input tokens that an infinite cache would miss."""
    used_tokens: Floats
    """Tokens of the distinct blocks used in the part."""
    unique_tokens: Floats
    """Tokens of the distinct blocks so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Statistics of a trace. Those of blocks are None if the trace has no blocks."""

    name: str
    requests: int
    duration_s: float
    block_tokens: int
    input_tokens: int
    output_tokens: int
    input_mean: float
    input_p50: float
    input_p99: float
    output_mean: float
    unique_tokens: int | None
    infinite_hit_rate: float | None
    infinite_hit_rate_second_half: float | None
    """Hit rate of the second half of the requests in an infinite cache that has seen the first half."""
    used_once: float | None
    """Share of blocks that are used once."""
    top_reuse: float | None
    """Share of all reuses that are of the most-used 1 % of blocks."""
    interval_p50_s: float | None
    interval_p90_s: float | None
    interval_p99_s: float | None
    first_turns: float | None
    """Share of requests that reuse nothing, or only their first block."""
    written_per_read: float | None
    """Tokens that an infinite cache writes for each token that it reads."""
    sessions: int | None
    """Number of sessions; None if the trace has none."""
    working_set_tokens: dict[float, float]
    """Mean number of tokens in a cache, by its time to live in seconds."""
    prefix_violations: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    intervals: ReuseIntervals
    over_time: TraceSeries


def reuse_pauses(trace: TraceArrays, used_s: Floats) -> Iterator[tuple[float, Column, Floats]]:
    """Yield time and blocks of each request, and the seconds since each block's last use (inf for a first use).

    Args:
        trace: the trace.
        used_s: -inf for each block. Afterwards it contains the times of the last uses.
    """
    for request in range(len(trace)):
        time_s, ids = float(trace.time_s[request]), trace.blocks(request)
        yield time_s, ids, time_s - used_s[ids]
        used_s[ids] = time_s


def trace_stats(trace: TraceArrays) -> TraceStats:
    """Compute the statistics of a trace."""
    sums = _Sums(trace)
    inputs = np.asarray(trace.input_tokens, np.float64)
    requests, total = len(trace), int(inputs.sum())
    outputs = int(trace.output_tokens.sum(dtype=np.int64))
    has_blocks = trace.has_blocks
    uses = np.sort(sums.uses)[::-1]
    reuses = float((uses - 1).sum())
    top = float((uses[: max(1, len(uses) // 100)] - 1).sum())
    intervals = ReuseIntervals(seconds=_BUCKETS.edges_s, counts=sums.counts)
    hit_rate = sums.hit_tokens / total if total else 0.0
    return TraceStats(
        name=trace.name,
        requests=requests,
        duration_s=sums.duration_s,
        block_tokens=trace.block_tokens,
        input_tokens=total,
        output_tokens=outputs,
        input_mean=total / requests,
        input_p50=float(np.quantile(inputs, 0.5)),
        input_p99=float(np.quantile(inputs, 0.99)),
        output_mean=outputs / requests,
        unique_tokens=trace.unique_tokens if has_blocks else None,
        infinite_hit_rate=hit_rate if has_blocks else None,
        infinite_hit_rate_second_half=sums.late_hit_tokens / max(sums.late_tokens, 1) if has_blocks else None,
        used_once=float((uses == 1).mean()) if len(uses) else None,
        top_reuse=top / reuses if reuses else None,
        interval_p50_s=intervals.quantile(0.5),
        interval_p90_s=intervals.quantile(0.9),
        interval_p99_s=intervals.quantile(0.99),
        first_turns=sums.first_turns / requests if has_blocks else None,
        written_per_read=(1 - hit_rate) / hit_rate if has_blocks and hit_rate else None,
        sessions=int(trace.session.max()) + 1 or None,
        working_set_tokens=sums.working_sets() if has_blocks else {},
        prefix_violations=trace.prefix_violations,
        notes=trace.notes,
        warnings=trace.warnings,
        intervals=intervals,
        over_time=TraceSeries(
            bin_s=sums.duration_s / BINS,
            input_tokens=sums.input,
            new_tokens=sums.new,
            used_tokens=sums.used * trace.block_tokens,
            unique_tokens=np.cumsum(sums.unique) * trace.block_tokens,
        ),
    )


class _Sums:
    """Sums over all requests, and over the requests of each bin."""

    def __init__(self, trace: TraceArrays) -> None:
        self._trace = trace
        self._used_s = np.full(trace.block_count, -np.inf)
        self._used_bin = np.full(trace.block_count, -1, np.int32)
        self.uses = np.zeros(trace.block_count, np.int64)
        self.counts, self.seconds = np.zeros(_BUCKETS.buckets), np.zeros(_BUCKETS.buckets)
        self.input, self.new, self.used, self.unique = np.zeros((4, BINS))
        self.duration_s = float(trace.time_s[-1]) - float(trace.time_s[0])
        self.hit_tokens = self.late_hit_tokens = self.late_tokens = self.first_turns = 0
        for request, (time_s, ids, pauses_s) in enumerate(reuse_pauses(trace, self._used_s)):
            self._add(request, time_s, ids, pauses_s)

    def _add(self, request: int, time_s: float, ids: Column, pauses_s: Floats) -> None:
        trace = self._trace
        tokens = int(trace.input_tokens[request])
        place = int((time_s - float(trace.time_s[0])) / max(self.duration_s, 1e-9) * BINS)
        place = min(place, BINS - 1)
        was_seen = np.isfinite(pauses_s)
        run = len(ids) if was_seen.all() else int(np.argmin(was_seen))
        hit = min(run * trace.block_tokens, tokens)
        self.hit_tokens += hit
        self.input[place] += tokens
        self.new[place] += tokens - hit
        if request >= len(trace) // 2:
            self.late_hit_tokens += hit
            self.late_tokens += tokens
        self.first_turns += run <= 1
        seen = pauses_s[was_seen]
        if len(seen):
            bucket = _BUCKETS.of(seen)
            # This is faster in the usual case, in which one earlier request was the last to use all of these blocks.
            if bucket[0] == bucket[-1] and (bucket == bucket[0]).all():
                self.counts[bucket[0]] += len(seen)
                self.seconds[bucket[0]] += seen.sum()
            else:
                np.add.at(self.counts, bucket, 1.0)
                np.add.at(self.seconds, bucket, seen)
        self.unique[place] += len(ids) - len(seen)
        self.used[place] += int((self._used_bin[ids] != place).sum())
        self._used_bin[ids] = place
        self.uses[ids] += 1

    def working_sets(self) -> dict[float, float]:
        """Map each time to live to the mean number of tokens in a cache that keeps unused blocks for that time."""
        if self.duration_s <= 0:
            return {}
        ended_s = float(self._trace.time_s[0]) + self.duration_s
        out: dict[float, float] = {}
        for window_s in WINDOWS_S:
            short = _BUCKETS.edges_s <= window_s
            held = self.seconds[short].sum() + window_s * self.counts[~short].sum()
            held += np.minimum(ended_s - self._used_s, window_s).sum()
            out[window_s] = float(held) / self.duration_s * self._trace.block_tokens
        return out
