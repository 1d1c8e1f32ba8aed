"""What a trace is like: lengths, reuse, the intervals of reuse, the working set, and demand over time. One pass."""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.trace.arrays import Packed

WINDOWS_S = (60.0, 300.0, 600.0, 3600.0)
"""For how long something is kept after its last use, where the working set is told."""
BINS = 120
"""Points of what is told over time."""
_PER_DOUBLING = 256
_LEAST_S = 2.0**-10
_BUCKETS = _PER_DOUBLING * 40

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How long after its last use a block is used again, by accesses to blocks."""

    seconds: Floats
    """Upper edges of buckets."""
    counts: Floats
    seconds_sums: Floats
    """Sum of the intervals in each bucket."""

    def quantile(self, share: float) -> float | None:
        """The interval that so large a share does not exceed; None where nothing is reused."""
        total = self.counts.sum()
        if not total:
            return None
        return float(self.seconds[bisect_left(np.cumsum(self.counts).tolist(), share * total)])


@dataclass(frozen=True, slots=True, kw_only=True)
class OverTime:
    """Series over the trace's duration, a value for each of `BINS` equal parts of it."""

    bin_s: float
    input_tokens: Floats
    new_tokens: Floats
    """Of the input, what was never seen before: a cache without end would compute and write it."""
    used_tokens: Floats
    """Distinct blocks that were used in the part."""
    unique_tokens: Floats
    """Distinct blocks so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Statistics of a trace; what needs blocks is None where it has none."""

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
    """Of the second half of the requests, after the first."""
    used_once: float | None
    """Share of blocks that are used once."""
    top_reuse: float | None
    """Share of all reuse that the most used hundredth of blocks has."""
    interval_p50_s: float | None
    interval_p90_s: float | None
    interval_p99_s: float | None
    first_turns: float | None
    """Share of requests that reuse nothing, or only their first block."""
    written_per_read: float | None
    """Tokens that a cache without end writes, for each that it reads."""
    sessions: int | None
    """None where the trace names none."""
    working_set_tokens: dict[float, float]
    """Seconds that a block is kept after its last use, to tokens held on average."""
    prefix_violations: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    intervals: Intervals
    over_time: OverTime


def describe(packed: Packed) -> Description:
    """Measure a trace."""
    meter = _Meter(packed)
    for request in range(len(packed)):
        meter.add(request)
    inputs = np.asarray(packed.input_tokens, np.float64)
    requests, total = len(packed), int(inputs.sum())
    outputs = int(packed.output_tokens.sum(dtype=np.int64))
    sessions = int(packed.session.max()) + 1
    has_blocks = packed.has_blocks
    uses = np.sort(meter.uses)[::-1]
    reuses = float((uses - 1).sum())
    top = float((uses[: max(1, len(uses) // 100)] - 1).sum())
    intervals = meter.intervals()
    hit_rate = meter.hit_tokens / total if total else 0.0
    return Description(
        name=packed.name,
        requests=requests,
        duration_s=meter.duration_s,
        block_tokens=packed.block_tokens,
        input_tokens=total,
        output_tokens=outputs,
        input_mean=total / requests,
        input_p50=float(np.quantile(inputs, 0.5)),
        input_p99=float(np.quantile(inputs, 0.99)),
        output_mean=outputs / requests,
        unique_tokens=packed.block_count * packed.block_tokens if has_blocks else None,
        infinite_hit_rate=hit_rate if has_blocks else None,
        infinite_hit_rate_second_half=meter.late_hit_tokens / max(meter.late_tokens, 1) if has_blocks else None,
        used_once=float((uses == 1).mean()) if len(uses) else None,
        top_reuse=top / reuses if reuses else None,
        interval_p50_s=intervals.quantile(0.5),
        interval_p90_s=intervals.quantile(0.9),
        interval_p99_s=intervals.quantile(0.99),
        first_turns=meter.first_turns / requests if has_blocks else None,
        written_per_read=(1 - hit_rate) / hit_rate if has_blocks and hit_rate else None,
        sessions=sessions or None,
        working_set_tokens=meter.working_sets() if has_blocks else {},
        prefix_violations=packed.prefix_violations,
        notes=packed.notes,
        warnings=packed.warnings,
        intervals=intervals,
        over_time=meter.over_time(),
    )


class _Meter:
    """Adds up what requests do."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._used_s = np.full(packed.block_count, -np.inf)
        self._used_in = np.full(packed.block_count, -1, np.int32)
        self.uses = np.zeros(packed.block_count, np.int64)
        self._counts, self._sums = np.zeros(_BUCKETS), np.zeros(_BUCKETS)
        self._input, self._new, self._used = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)
        self._unique = np.zeros(BINS)
        self._began_s = float(packed.time_s[0])
        self.duration_s = float(packed.time_s[-1]) - self._began_s
        self.hit_tokens = self.late_hit_tokens = self.late_tokens = self.first_turns = 0

    def add(self, request: int) -> None:
        """One request."""
        packed = self._packed
        time_s = float(packed.time_s[request])
        tokens = int(packed.input_tokens[request])
        place = min(int((time_s - self._began_s) / max(self.duration_s, 1e-9) * BINS), BINS - 1)
        self._input[place] += tokens
        ids = packed.ids[int(packed.starts[request]) : int(packed.starts[request + 1])]
        pauses = time_s - self._used_s[ids]
        was_seen = np.isfinite(pauses)
        run = len(ids) if was_seen.all() else int(np.argmin(was_seen))
        hit = min(run * packed.block_tokens, tokens)
        self.hit_tokens += hit
        self._new[place] += tokens - hit
        if request >= len(packed) // 2:
            self.late_hit_tokens += hit
            self.late_tokens += tokens
        self.first_turns += run <= 1
        if was_seen.any():
            seen = pauses[was_seen]
            bucket = np.ceil(np.log2(np.maximum(seen, _LEAST_S) / _LEAST_S) * _PER_DOUBLING).astype(np.int64)
            np.minimum(bucket, _BUCKETS - 1, out=bucket)
            # Of the same request nearly all fall into one bucket.
            if bucket[0] == bucket[-1] and (bucket == bucket[0]).all():
                self._counts[bucket[0]] += len(seen)
                self._sums[bucket[0]] += seen.sum()
            else:
                np.add.at(self._counts, bucket, 1.0)
                np.add.at(self._sums, bucket, seen)
        self._unique[place] += len(ids) - int(was_seen.sum())
        self._used[place] += int((self._used_in[ids] != place).sum())
        self._used_in[ids] = place
        self._used_s[ids] = time_s
        self.uses[ids] += 1

    def intervals(self) -> Intervals:
        """By buckets."""
        edges = _LEAST_S * 2.0 ** (np.arange(_BUCKETS) / _PER_DOUBLING)
        return Intervals(seconds=edges, counts=self._counts, seconds_sums=self._sums)

    def working_sets(self) -> dict[float, float]:
        """What is held on average when everything stays for so long after its last use, until the trace ends."""
        if self.duration_s <= 0:
            return {}
        ended_s = self._began_s + self.duration_s
        edges = _LEAST_S * 2.0 ** (np.arange(_BUCKETS) / _PER_DOUBLING)
        out: dict[float, float] = {}
        for window_s in WINDOWS_S:
            short = edges <= window_s
            held = self._sums[short].sum() + window_s * self._counts[~short].sum()
            held += np.minimum(ended_s - self._used_s, window_s).sum()
            out[window_s] = float(held) / self.duration_s * self._packed.block_tokens
        return out

    def over_time(self) -> OverTime:
        """The series."""
        block = self._packed.block_tokens
        return OverTime(
            bin_s=self.duration_s / BINS,
            input_tokens=self._input,
            new_tokens=self._new,
            used_tokens=self._used * block,
            unique_tokens=np.cumsum(self._unique) * block,
        )
