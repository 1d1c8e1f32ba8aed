"""Measure the workload of a trace: arrivals, lengths, and the reuse curve.

A block id names a whole prefix, so leading blocks whose ids have occurred before come from an earlier prompt.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.plan.workload import BURST_S, ReuseCurve, TraceSummary
from kvtier.tools.trace.arrays import read_arrays
from kvtier.tools.trace.formats.base import ReadOptions, TraceWarning, open_trace
from kvtier.tools.trace.formats.kv_cache_tester import SessionLines
from kvtier.tools.trace.stats import LogBuckets, reuse_pauses

_BUCKETS = LogBuckets(2.0**-6, 8, 8 * 36)
"""Buckets of pauses, up to 34 years."""


def read_trace(path: Path, window_s: float, time_unit: str = "") -> TraceSummary:
    """Measure a trace in any format of `kvtier replay`.

    Args:
        path: the file.
        window_s: seconds over which conversations start, in a trace without absolute times.
        time_unit: unit of its timestamps, "s", "ms" or "us"; empty means the format's.

    Raises:
        ConfigError: the file cannot be read or is not a trace; the message names file and line.
    """
    options = ReadOptions(window_h=window_s / 3600, time_unit=time_unit)
    reader = open_trace(path, options)
    has_starts = not isinstance(reader, SessionLines)
    if isinstance(reader, SessionLines):
        # The file's own block size shows most precisely what requests of a conversation share.
        reader = open_trace(path, replace(options, block_tokens=reader.own_block_tokens))
    trace = read_arrays(reader)
    unused = ["--time-unit has no effect on this format"] if time_unit and "time_unit" not in reader.options else []
    requests, began_s = len(trace), float(trace.time_s[0])
    duration_s = float(trace.time_s[-1]) - began_s
    if requests < 2 or duration_s <= 0:
        raise ConfigError(f"trace {path}: {requests} requests; allowed: at least 2 requests, at different times")
    if not has_starts:  # the tail of the last conversation would lower the rate
        duration_s = window_s
    arrivals = np.bincount(((trace.time_s - began_s) / BURST_S).astype(np.int64))
    input_tokens = float(trace.input_tokens.sum(dtype=np.int64))
    firsts = 0
    # For each bucket of pauses: the reused tokens, and the sum of tokens times pause.
    reused, reused_s = np.zeros((2, _BUCKETS.buckets))
    used_s = np.full(trace.block_count, -np.inf)
    is_reused = np.zeros(trace.block_count, np.bool_)
    for request, (_, ids, pauses_s) in enumerate(reuse_pauses(trace, used_s)):
        seen = np.isfinite(pauses_s)
        is_reused[ids[seen]] = True
        firsts += not seen[1:].any()
        if seen.any():
            tokens = np.full(len(ids), float(trace.block_tokens))
            last = int(trace.input_tokens[request]) - (len(ids) - 1) * trace.block_tokens
            tokens[-1] = min(max(last, 1), trace.block_tokens)
            bucket = _BUCKETS.of(pauses_s[seen])
            reused += np.bincount(bucket, tokens[seen], _BUCKETS.buckets)
            reused_s += np.bincount(bucket, tokens[seen] * pauses_s[seen], _BUCKETS.buckets)
    times = _BUCKETS.edges_s
    within, within_s = np.cumsum(reused), np.cumsum(reused_s)
    # Tokens reused within T stay until their reuse. All others stay for T, even if nothing ever reuses them.
    held = (within_s + times * (input_tokens - within)) / requests
    total = float(within[-1])
    curve = ReuseCurve(
        residence_s=(0.0, *times.tolist()),
        found=(0.0, *(within / max(total, 1e-9)).tolist()),
        held_token_s=(0.0, *held.tolist()),
    )
    return TraceSummary(
        path=str(path),
        requests=requests,
        duration_s=duration_s,
        input_tokens=input_tokens / requests,
        output_tokens=float(trace.output_tokens.sum(dtype=np.int64)) / requests,
        first_share=firsts / requests,
        reusable_tokens=total / requests,
        longest_tokens=float((trace.input_tokens.astype(np.int64) + trace.output_tokens).max()),
        kept_share=float(is_reused.sum() / max(np.isfinite(used_s).sum(), 1)),
        burst=float(arrivals.max()) / (requests / max(duration_s / BURST_S, 1.0)),
        curve=curve if trace.has_blocks else None,
        notes=(*trace.notes, *map(TraceWarning, (*unused, *trace.warnings))),
    )
