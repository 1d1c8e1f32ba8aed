"""Traffic measured in a trace: arrivals, lengths, and the curve of reuse. One pass, and no request is kept.

Read are the formats that public traces have, plain or gzip:

- a JSON object for each request, with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, or
  their short form `hash_runs` (Mooncake, FAST'25);
- a JSON object for each session, with `requests` and `block_size` (kv-cache-tester); sessions have no absolute times;
- CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure 2023): arrivals and lengths, no reuse.

An id names a whole prefix, so a prompt's leading blocks that were seen before are those of a prefix that was.
"""

import csv
import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.plan.reuse import ReuseCurve

LINE_CHARS_MAX = 1 << 27
BLOCK_IDS_MAX = 1 << 25
"""Distinct ids; for each, a time is kept: 8 bytes."""
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
    """Measure a trace.

    Args:
        path: the file, also ``.gz``.
        window_s: over how long the sessions of a trace without absolute times start, evenly spread.

    Raises:
        ConfigError: it cannot be read or is no trace; the message names file and line.
    """
    try:
        with _open(path) as stream:
            first = stream.readline(LINE_CHARS_MAX)
        if first.startswith("TIMESTAMP"):
            return _from_csv(path)
        head = json.loads(first)
        if not isinstance(head, dict):
            raise ConfigError(f"trace {path}, line 1: not a JSON object")
        keys = cast("dict[str, Any]", head).keys()
        if "requests" in keys:
            return _from_sessions(path, window_s)
        if "timestamp" in keys and keys & {"hash_ids", "hash_runs"}:
            return _from_requests(path)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}; allowed: a readable file") from error
    except (EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"trace {path}: not a trace: {error}") from error
    raise ConfigError(f"trace {path}: unknown format; allowed: request lines, session lines or Azure's CSV")


class _Meter:
    """Adds up what requests do; ids count within one `scope`, where times never fall."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.requests = self.first_requests = 0
        self.input_tokens = self.output_tokens = self.reused_tokens = 0.0
        self.tokens = np.zeros(_BUCKET_COUNT)
        """Reused tokens by the bucket of their pause."""
        self.token_s = np.zeros(_BUCKET_COUNT)
        self.arrivals = Counter[int]()
        self.least_s, self.most_s = math.inf, -math.inf
        self.scope()

    def scope(self) -> None:
        """Forget all ids: the next belong to another session."""
        self.used_s = np.full(1024, -np.inf)

    def add(self, time_s: float, input_tokens: int, output_tokens: int, runs: list[tuple[int, int]]) -> None:
        """One request, whose blocks are runs of ids: first id and count."""
        self.arrive(time_s, input_tokens, output_tokens)
        ids = np.concatenate([np.arange(first, first + count) for first, count in runs] or [np.zeros(0, np.int64)])
        if not len(ids):
            self.first_requests += 1
            return
        self._make_room(int(ids.max()))
        pauses = time_s - self.used_s[ids]
        tokens = np.full(len(ids), float(self.block_tokens))
        tokens[-1] = min(max(input_tokens - (len(ids) - 1) * self.block_tokens, 1), self.block_tokens)
        seen = np.isfinite(pauses)
        if seen.any():
            place = np.log2(np.maximum(pauses[seen], _PAUSE_LEAST_S) / _PAUSE_LEAST_S) * _BUCKETS
            bucket = np.minimum(np.ceil(place).astype(np.int64), _BUCKET_COUNT - 1)
            self.tokens += np.bincount(bucket, tokens[seen], _BUCKET_COUNT)
            self.token_s += np.bincount(bucket, tokens[seen] * pauses[seen], _BUCKET_COUNT)
            self.reused_tokens += float(tokens[seen].sum())
        self.first_requests += int(not seen[1:].any())
        self.used_s[ids] = time_s

    def arrive(self, time_s: float, input_tokens: int, output_tokens: int) -> None:
        """One request, without its blocks."""
        self.requests += 1
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.arrivals[int(time_s / BURST_S)] += 1
        self.least_s, self.most_s = min(self.least_s, time_s), max(self.most_s, time_s)

    def _make_room(self, highest: int) -> None:
        if highest >= BLOCK_IDS_MAX:
            raise ConfigError(f"block id {highest}: too large; allowed: ids below {BLOCK_IDS_MAX}")
        if highest >= len(self.used_s):
            grown = np.full(max(highest + 1, 2 * len(self.used_s)), -np.inf)
            grown[: len(self.used_s)] = self.used_s
            self.used_s = grown

    def summary(
        self, path: Path, *, knows_reuse: bool, notes: tuple[str, ...], duration_s: float | None = None
    ) -> TraceSummary:
        """What was added up; `duration_s` where it is not the time from the first to the last request."""
        if self.requests < 2 or self.most_s <= self.least_s:
            raise ConfigError(f"trace {path}: {self.requests} requests; allowed: at least 2, at different times")
        duration_s = duration_s or self.most_s - self.least_s
        windows = max(duration_s / BURST_S, 1.0)
        return TraceSummary(
            path=str(path),
            requests=self.requests,
            duration_s=duration_s,
            input_tokens=self.input_tokens / self.requests,
            output_tokens=self.output_tokens / self.requests,
            first_share=self.first_requests / self.requests,
            reusable_tokens=self.reused_tokens / self.requests,
            burst=max(self.arrivals.values()) / (self.requests / windows),
            curve=self._curve() if knows_reuse else None,
            notes=notes,
        )

    def _curve(self) -> ReuseCurve:
        times = _PAUSE_LEAST_S * 2.0 ** (np.arange(_BUCKET_COUNT) / _BUCKETS)
        reused, reused_s = np.cumsum(self.tokens), np.cumsum(self.token_s)
        # What is reused within T stays until then; all else stays for T, also what nothing ever reuses.
        held = (reused_s + times * (self.input_tokens - reused)) / self.requests
        found = reused / max(self.reused_tokens, 1e-9)
        return ReuseCurve(
            residence_s=(0.0, *times.tolist()), found=(0.0, *found.tolist()), held_token_s=(0.0, *held.tolist())
        )


def _from_requests(path: Path) -> TraceSummary:
    block_tokens, notes = _block_tokens(path)
    meter = _Meter(block_tokens)
    latest_s = -math.inf
    for number, line in _lines(path):
        with _Place(path, number):
            time_s = float(line["timestamp"]) / 1000
            if time_s < latest_s:
                raise ConfigError("time goes backwards; allowed: requests in the order of `timestamp`")
            latest_s = time_s
            meter.add(time_s, int(line["input_length"]), int(line["output_length"]), _runs(line))
    return meter.summary(path, knows_reuse=True, notes=notes)


def _from_sessions(path: Path, window_s: float) -> TraceSummary:
    sessions = sum(1 for _ in _lines(path))
    meter: _Meter | None = None
    for number, session in _lines(path):
        with _Place(path, number):
            meter = meter or _Meter(int(session["block_size"]))
            meter.scope()
            start_s = (number - 1) * window_s / sessions
            for time_s, request in sorted(_flattened(session["requests"], 0.0), key=lambda it: it[0]):
                meter.add(start_s + time_s, int(request["in"]), int(request["out"]), _runs(request))
    assert meter is not None, "read_trace has seen a line"
    spread = f"{sessions} sessions without absolute times; they start evenly spread over {window_s:g} s"
    # Were new sessions to start on and on, so many requests would come in that time; the last session's tail would not.
    return meter.summary(path, knows_reuse=True, notes=(spread,), duration_s=window_s)


def _from_csv(path: Path) -> TraceSummary:
    meter = _Meter(1)
    with _open(path) as stream:
        for number, row in enumerate(csv.DictReader(stream), 2):
            with _Place(path, number):
                time = datetime.fromisoformat(row["TIMESTAMP"][:26])
                seconds = (time - datetime(2020, 1, 1, tzinfo=time.tzinfo)).total_seconds()
                meter.arrive(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    notes = ("the trace does not tell what is reused: turns, intervals and reuse are those of the inputs",)
    return meter.summary(path, knows_reuse=False, notes=notes)


def _flattened(requests: list[dict[str, Any]], start_s: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """Requests with their times; a sub-agent's times begin at its own start."""
    for request in requests:
        if "requests" in request:
            yield from _flattened(request["requests"], start_s + float(request["t"]))
        else:
            yield start_s + float(request["t"]), request


def _runs(request: dict[str, Any]) -> list[tuple[int, int]]:
    if "hash_runs" in request:
        runs = [(int(first), int(count)) for first, count in request["hash_runs"]]
    else:
        runs = [(int(it), 1) for it in request["hash_ids"]]
    if any(first < 0 or count < 1 for first, count in runs):
        raise ValueError("a negative block id, or an empty run")
    return runs


def _block_tokens(path: Path) -> tuple[int, tuple[str, ...]]:
    """Tokens of a block, which request lines do not say: the power of two that explains the numbers of ids."""
    least, most = 1.0, math.inf
    for number, line in islice(_lines(path), 2000):
        with _Place(path, number):
            tokens, blocks = int(line["input_length"]), sum(count for _, count in _runs(line))
            if blocks:
                least = max(least, tokens / blocks)
            if blocks > 1:
                most = min(most, tokens / (blocks - 1))
    block = 2 ** math.ceil(math.log2(least))
    if block < most:
        return block, (f"blocks of {block} tokens, from the numbers of ids",)
    return math.ceil(least), (f"blocks of about {math.ceil(least)} tokens: the numbers of ids do not agree on one",)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with _open(path) as stream:
        for number, text in enumerate(iter(lambda: stream.readline(LINE_CHARS_MAX), ""), 1):
            if text.strip():
                with _Place(path, number):
                    yield number, json.loads(text)


def _open(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


class _Place:
    """Says in which line of which file something was wrong."""

    def __init__(self, path: Path, line: int) -> None:
        self._path, self._line = path, line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            if str(error).startswith("trace "):
                return
            raise ConfigError(f"trace {self._path}, line {self._line}: {error}") from None
        if isinstance(error, KeyError):
            raise ConfigError(f"trace {self._path}, line {self._line}: {error.args[0]!r} is missing") from None
        if isinstance(error, TypeError | ValueError | AttributeError | OverflowError):
            raise ConfigError(f"trace {self._path}, line {self._line}: {error}") from None
