"""Writes traces as request lines, the format that most tools read."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.report.output import replaced
from kvtier.trace.arrays import NEXT_TURNS, Column, TraceArrays

COARSE_MAX_S = 86_400.0


def write_requests(path: Path, trace: TraceArrays, *, as_runs: bool, coarse_s: float = 0.0) -> None:
    """Write a trace as request lines, gzip if the name ends in ``.gz``; atomically.

    The first line has the block size. Blocks and sessions are numbered by first use, so the source's texts, ids and
    session names are not written. Times count from the first request.

    Args:
        path: the file.
        trace: the trace.
        as_runs: write `hash_runs`, not `hash_ids`.
        coarse_s: round times down to multiples of this; 0: do not.

    Raises:
        ConfigError: the trace has no blocks, `coarse_s` is out of range, or the file cannot be written.
    """
    if not 0 <= coarse_s <= COARSE_MAX_S:
        raise ConfigError(f"--coarse-s {coarse_s:g}; allowed: 0 to {COARSE_MAX_S:g} seconds")
    if not trace.has_blocks:
        raise ConfigError(f"trace {trace.name} has no blocks; allowed: a trace with blocks")
    lines = request_lines(trace, as_runs=as_runs, coarse_s=coarse_s)
    write_lines(path, (f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines, gzip if the name ends in ``.gz``; atomically.

    Raises:
        ConfigError: the file cannot be written.
    """
    with replaced("", path) as draft:
        is_gzip = path.suffix == ".gz"
        with gzip.open(draft, "xt", 6, encoding="utf-8") if is_gzip else draft.open("x", encoding="utf-8") as stream:
            stream.writelines(lines)


def request_lines(trace: TraceArrays, *, as_runs: bool, coarse_s: float = 0.0) -> Iterator[dict[str, object]]:
    """A line for each request."""
    numbers = np.full(trace.block_count, -1, np.int64)
    count = 0
    for request in range(len(trace)):
        ids = trace.blocks(request)
        for block in ids[numbers[ids] < 0].tolist():
            if numbers[block] < 0:
                numbers[block] = count
                count += 1
        line: dict[str, object] = {
            "timestamp": _milliseconds(float(trace.time_s[request] - trace.time_s[0]), coarse_s),
            "input_length": int(trace.input_tokens[request]),
            "output_length": int(trace.output_tokens[request]),
        }
        if request == 0:
            line["block_size"] = trace.block_tokens
        if (session := int(trace.session[request])) >= 0:
            line["session_id"] = session
        if (next_turn := int(trace.next_turn[request])) >= 0:
            line["next_turn"] = NEXT_TURNS[next_turn].value
        line["hash_runs" if as_runs else "hash_ids"] = id_runs(numbers[ids]) if as_runs else numbers[ids].tolist()
        yield line


def _milliseconds(seconds: float, coarse_s: float) -> int | float:
    if coarse_s:
        seconds = seconds // coarse_s * coarse_s
    time_ms = round(seconds * 1000, 3)
    return int(time_ms) if time_ms == int(time_ms) else time_ms


def id_runs(ids: Column) -> list[list[int]]:
    """Consecutive ids as [first id, count]."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [[int(run[0]), len(run)] for run in np.split(ids, breaks) if len(run)]
