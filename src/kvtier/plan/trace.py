"""Traffic measured in a trace: arrivals, lengths, and the curve of reuse.

An id names a whole prefix, so a prompt's leading blocks that were seen before are those of a prefix that was.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.plan.reuse import ReuseCurve
from kvtier.trace.arrays import TraceArrays, read_arrays
from kvtier.trace.formats.session_lines import SessionLines
from kvtier.trace.open import ReadOptions, open_trace

BURST_S = 10.0
"""Windows in which the peak of arrivals is looked for."""
_BUCKETS = 8
"""Pauses are counted in so many buckets for each doubling."""
_PAUSE_LEAST_S = 2.0**-6
_BUCKET_COUNT = _BUCKETS * 36
"""Up to 34 years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a plan needs to know of a trace."""

    path: str
    requests: int
    duration_s: float
    input_tokens: float
    """Of a request, on average; as are all tokens below."""
    output_tokens: float
    first_share: float
    """Share of requests that reuse nothing, or only their very first block."""
    reusable_tokens: float
    """Seen before, whenever."""
    burst: float
    """Busiest window of `BURST_S` over the average one."""
    curve: ReuseCurve | None
    """None where the trace does not tell what is reused."""
    notes: tuple[str, ...]


def read_trace(path: Path, window_s: float) -> TraceSummary:
    """Measure a trace, of any form that `kvtier replay` reads.

    Args:
        path: the file.
        window_s: over how long the sessions of a trace without absolute times start.

    Raises:
        ConfigError: it cannot be read or is no trace; the message names file and line.
    """
    trace = open_trace(path, ReadOptions(window_h=window_s / 3600))
    has_starts = not isinstance(trace, SessionLines)
    if isinstance(trace, SessionLines):
        # What a session shares with itself is seen best in its own blocks.
        trace = open_trace(path, ReadOptions(window_h=window_s / 3600, block_tokens=trace.own_block_tokens))
    packed = read_arrays(trace)
    duration_s = float(packed.time_s[-1]) - float(packed.time_s[0])
    if len(packed) < 2 or duration_s <= 0:
        raise ConfigError(f"trace {path}: {len(packed)} requests; allowed: at least 2, at different times")
    meter = _Meter(packed)
    for request in range(len(packed)):
        meter.add(request)
    # Were new sessions to start on and on, so many requests would come in that time; the last session's tail would not.
    return meter.summary(str(path), duration_s if has_starts else window_s)


class _Meter:
    """Adds up what requests do."""

    def __init__(self, packed: TraceArrays) -> None:
        self._packed = packed
        self._began_s = float(packed.time_s[0])
        self._first_requests = 0
        self._input_tokens = float(packed.input_tokens.sum(dtype=np.int64))
        self._reused_tokens = 0.0
        self._tokens = np.zeros(_BUCKET_COUNT)
        """Reused tokens by the bucket of their pause."""
        self._token_s = np.zeros(_BUCKET_COUNT)
        self._arrivals = Counter[int]()
        self._used_s = np.full(packed.block_count, -np.inf)

    def add(self, request: int) -> None:
        """One request."""
        packed = self._packed
        time_s = float(packed.time_s[request])
        self._arrivals[int((time_s - self._began_s) / BURST_S)] += 1
        ids = packed.ids[int(packed.starts[request]) : int(packed.starts[request + 1])]
        if not len(ids):
            self._first_requests += 1
            return
        block = packed.block_tokens
        pauses = time_s - self._used_s[ids]
        tokens = np.full(len(ids), float(block))
        tokens[-1] = min(max(int(packed.input_tokens[request]) - (len(ids) - 1) * block, 1), block)
        seen = np.isfinite(pauses)
        if seen.any():
            place = np.log2(np.maximum(pauses[seen], _PAUSE_LEAST_S) / _PAUSE_LEAST_S) * _BUCKETS
            bucket = np.minimum(np.ceil(place).astype(np.int64), _BUCKET_COUNT - 1)
            self._tokens += np.bincount(bucket, tokens[seen], _BUCKET_COUNT)
            self._token_s += np.bincount(bucket, tokens[seen] * pauses[seen], _BUCKET_COUNT)
            self._reused_tokens += float(tokens[seen].sum())
        self._first_requests += int(not seen[1:].any())
        self._used_s[ids] = time_s

    def summary(self, path: str, duration_s: float) -> TraceSummary:
        """What was added up; `duration_s` is what the requests are spread over."""
        packed, requests = self._packed, len(self._packed)
        windows = max(duration_s / BURST_S, 1.0)
        return TraceSummary(
            path=path,
            requests=requests,
            duration_s=duration_s,
            input_tokens=self._input_tokens / requests,
            output_tokens=float(packed.output_tokens.sum(dtype=np.int64)) / requests,
            first_share=self._first_requests / requests,
            reusable_tokens=self._reused_tokens / requests,
            burst=max(self._arrivals.values()) / (requests / windows),
            curve=self._curve(requests) if packed.has_blocks else None,
            notes=(*packed.notes, *packed.warnings),
        )

    def _curve(self, requests: int) -> ReuseCurve:
        times = _PAUSE_LEAST_S * 2.0 ** (np.arange(_BUCKET_COUNT) / _BUCKETS)
        reused, reused_s = np.cumsum(self._tokens), np.cumsum(self._token_s)
        # What is reused within T stays until then; all else stays for T, also what nothing ever reuses.
        held = (reused_s + times * (self._input_tokens - reused)) / requests
        found = reused / max(self._reused_tokens, 1e-9)
        return ReuseCurve(
            residence_s=(0.0, *times.tolist()), found=(0.0, *found.tolist()), held_token_s=(0.0, *held.tolist())
        )
