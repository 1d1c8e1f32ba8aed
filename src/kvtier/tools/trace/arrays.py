"""A whole trace as numpy columns. Small columns are in memory, large ones in temporary files.

Blocks are numbered 0, 1, 2, ... An *access* is the use of a block by a request. Reading takes memory only for distinct
blocks. Accesses take four bytes each, in a temporary file if there are many.

A trace is written in the form of request lines, which most tools read.
"""

import gzip
import json
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.report.output import replaced
from kvtier.tools.trace.formats.base import REQUEST_BLOCKS_MAX, TraceReader, TraceRequest, TraceWarning, UnitDoubt
from kvtier.tools.trace.trace_files import WHOLE_MAX
from kvtier.types import NextTurn

Column = npt.NDArray[Any]

NEXT_TURNS = tuple(NextTurn)
MEMORY_BYTES_MAX = 64 << 20
"""Largest column that stays in memory. Larger ones go to a file."""
BLOCKS_MAX = 1 << 30
ACCESSES_MAX = 1 << 32
"""Maximum number of accesses in a trace. They then take 16 GiB in a temporary file."""
_DENSE_MIN = 1 << 22
"""Size that a table of all ids may always have, however few accesses there are."""
_SPARSE = 2
"""Largest ratio of the range of ids to the number of accesses at which a table of all ids is used. A table with a
larger ratio would be sparse, so ids are sorted instead."""
_STEP = 1 << 16
"""Number of values in one vectorized step."""
_NAMES = ("ids", "starts", "time_s", "input_tokens", "output_tokens", "session", "turn", "next_turn", "parents")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceArrays:
    """A whole trace. Request i has the blocks ``ids[starts[i]:starts[i + 1]]``."""

    name: str
    block_tokens: int
    has_blocks: bool
    ids: Column
    """int32: the blocks of all requests."""
    starts: Column
    """int64: index in `ids` at which each request's blocks start, and at last the length of `ids`."""
    time_s: Column
    """float64: time of each request in seconds, never decreasing."""
    input_tokens: Column
    """int32: tokens of each prompt. `output_tokens` has the same type."""
    output_tokens: Column
    session: Column
    """int32: number of the session, or -1 for none."""
    turn: Column
    """int32: index of the request in its session, or -1 without a session."""
    next_turn: Column
    """int8: index in `NEXT_TURNS`, or -1 if unknown."""
    parents: Column
    """int32: for each block, the block before it in its prefix, or -1 if it is the first."""
    notes: tuple[str, ...]
    """Sentences on how the trace was read."""
    warnings: tuple[str, ...]
    """Sentences on what is wrong with the trace."""
    prefix_violations: int
    """Accesses to a block whose parent differs from its first parent."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def block_count(self) -> int:
        """Number of distinct blocks."""
        return len(self.parents)

    @property
    def unique_tokens(self) -> int:
        """Tokens of all distinct blocks. Each block counts as a whole one."""
        return self.block_count * self.block_tokens

    def blocks(self, request: int) -> Column:
        """Return the blocks of one request."""
        return self.ids[int(self.starts[request]) : int(self.starts[request + 1])]

    def save(self, folder: Path) -> None:
        """Write all columns into `folder`, so that another process can `load` them."""
        for name in _NAMES:
            np.save(folder / f"{name}.npy", getattr(self, name))
        rest = {name: getattr(self, name) for name in self.__slots__ if name not in _NAMES}
        (folder / "rest.json").write_text(json.dumps(rest), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "TraceArrays":
        """Read the output of `save`. Columns are memory-mapped, so processes share one copy."""
        rest: dict[str, Any] = json.loads((folder / "rest.json").read_text(encoding="utf-8"))
        rest["notes"], rest["warnings"] = tuple(rest["notes"]), tuple(rest["warnings"])
        columns: dict[str, Any] = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES}
        return cls(**rest, **columns)


class _GrowingColumn:
    """An append-only column. It stays in memory until it is large."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._kind = np.dtype(kind)
        self._file = tempfile.SpooledTemporaryFile[bytes](MEMORY_BYTES_MAX, prefix="kvtier-trace-")

    def add(self, values: Column) -> None:
        self._file.write(values.astype(self._kind).tobytes())

    def finished(self) -> Column:
        """Return the column, which stays valid after `close`."""
        if self._file.tell() > MEMORY_BYTES_MAX:
            self._file.flush()
            return np.memmap(self._file, self._kind, "r+")
        self._file.seek(0)
        return np.frombuffer(bytearray(self._file.read()), self._kind)

    def close(self) -> None:
        self._file.close()


def read_arrays(
    reader: TraceReader, *, is_strict: bool = False, each: Callable[[TraceRequest], object] = lambda _: None
) -> TraceArrays:
    """Read a whole trace.

    Args:
        reader: the reader from `open_trace`.
        is_strict: treat warnings as errors, except doubts about a unit that the user gave.
        each: called with each request, in the order of the arrays.

    Raises:
        ConfigError: a line is malformed, there is no request, or `is_strict` and there is a warning.
    """
    with closing(_Builder(reader)) as builder:
        trace = builder.build(each)
    refused = [it for it in trace.warnings if not isinstance(it, UnitDoubt)]
    if is_strict and refused:
        raise ConfigError(f"trace {reader.name}: {refused[0]} (an error, because of --strict)")
    return trace


class _Builder:
    """Collects requests in lists and appends them to the columns in steps."""

    def __init__(self, reader: TraceReader) -> None:
        self._reader = reader
        kinds = (np.int64, np.float64, np.int32, np.int32, np.int32, np.int32, np.int8)
        self._ids = _GrowingColumn(np.int32)
        self._columns = [_GrowingColumn(kind) for kind in kinds]
        """Columns in the order of `_rows`: starts, time, input, output, session, turn, next turn."""
        self._blocks: list[Column] = []
        self._rows: list[tuple[int, float, int, int, int, int, int]] = []
        self._waiting = self._total = 0
        self._sessions: dict[str, int] = {}
        self._turns = Counter[int]()
        self._highest, self._lowest = -1, 0

    def build(self, each: Callable[[TraceRequest], object]) -> TraceArrays:
        latest_s, times_back, first_back = -np.inf, 0, 0
        for request in self._reader.requests():
            if request.time_s < latest_s:
                times_back += 1
                first_back = first_back or request.line
            latest_s = max(latest_s, request.time_s)
            self._add(latest_s, request)
            each(request)
        if latest_s == -np.inf:
            raise ConfigError(f"trace {self._reader.name} has no request; allowed: at least one")
        self._flush()
        self._columns[0].add(np.asarray([self._total]))
        warnings: list[str] = [it for it in self._reader.notes if isinstance(it, TraceWarning)]
        if times_back:
            warnings.append(
                f"{times_back} timestamps go back, first in line {first_back}; they are replaced by the latest earlier "
                "time"
            )
        return self._finished(warnings)

    def close(self) -> None:
        for column in (self._ids, *self._columns):
            column.close()

    def _add(self, time_s: float, request: TraceRequest) -> None:
        _check(self._reader.name, request)
        number = turn = -1
        if request.session is not None:
            number = self._sessions.setdefault(request.session, len(self._sessions))
            turn = self._turns[number]
            self._turns[number] += 1
        next_turn = -1 if request.next_turn is None else NEXT_TURNS.index(request.next_turn)
        self._rows.append((self._total, time_s, request.input_tokens, request.output_tokens, number, turn, next_turn))
        self._blocks.append(request.blocks)
        self._total += len(request.blocks)
        if self._total > ACCESSES_MAX:
            raise ConfigError(
                f"trace {self._reader.name}: {self._total} blocks in all requests together; allowed: at most "
                f"{ACCESSES_MAX}"
            )
        self._waiting += len(request.blocks) + 1
        if self._waiting >= _STEP:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        ids = np.concatenate(self._blocks)
        if len(ids):
            self._highest, self._lowest = max(self._highest, int(ids.max())), min(self._lowest, int(ids.min()))
            if self._highest - self._lowest >= BLOCKS_MAX:
                raise ConfigError(
                    f"trace {self._reader.name}: its block ids go from {self._lowest} to {self._highest}; allowed: a "
                    f"range of at most {BLOCKS_MAX} ids"
                )
        self._ids.add(ids)
        for column, values in zip(self._columns, zip(*self._rows, strict=True), strict=True):
            column.add(np.asarray(values))
        self._blocks, self._rows, self._waiting = [], [], 0

    def _finished(self, warnings: list[str]) -> TraceArrays:
        ids = self._ids.finished()
        starts, time_s, input_tokens, output_tokens, session, turn, next_turn = (it.finished() for it in self._columns)
        count = _renumber(ids, self._lowest, self._highest)
        parents, violations, first_bad = _parents(ids, starts, count)
        if violations:
            warnings.append(
                f"{violations} blocks follow a different parent than before, first in request {first_bad + 1}: "
                "the ids do not name whole prefixes, so hits are overstated, least for policies that use prefixes "
                "('default'), which may look worse here than with the engine's own names"
            )
        return TraceArrays(
            name=self._reader.name,
            block_tokens=self._reader.block_tokens,
            has_blocks=self._reader.has_blocks,
            ids=ids,
            starts=starts,
            time_s=time_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            session=session,
            turn=turn,
            next_turn=next_turn,
            parents=parents,
            notes=tuple(it for it in self._reader.notes if not isinstance(it, TraceWarning)),
            warnings=tuple(warnings),
            prefix_violations=violations,
        )


def _check(name: str, request: TraceRequest) -> None:
    """Refuse a request with too many tokens or blocks."""
    for what, tokens in (("prompt", request.input_tokens), ("answer", request.output_tokens)):
        if not 0 <= tokens <= WHOLE_MAX:
            raise ConfigError(
                f"trace {name}, line {request.line}: {what} of {tokens} tokens; allowed: at most {WHOLE_MAX}"
            )
    blocks = len(request.blocks)
    if blocks > REQUEST_BLOCKS_MAX:
        raise ConfigError(f"trace {name}, line {request.line}: {blocks} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")


def _renumber(ids: Column, lowest: int, highest: int) -> int:
    """Number the blocks in place from 0 without gaps, in the order of their ids.

    Return the number of distinct blocks.
    """
    if highest - lowest >= _SPARSE * max(len(ids), _DENSE_MIN):
        known = np.unique(ids)
        for start in range(0, len(ids), _STEP):
            ids[start : start + _STEP] = np.searchsorted(known, ids[start : start + _STEP])
        return len(known)
    is_used = np.zeros(highest - lowest + 1, np.bool_)
    for start in range(0, len(ids), _STEP):
        is_used[ids[start : start + _STEP] - lowest] = True
    count = int(is_used.sum())
    if count == len(is_used) and lowest == 0:
        return count
    numbers = np.cumsum(is_used, dtype=np.int32) - 1
    for start in range(0, len(ids), _STEP):
        ids[start : start + _STEP] = numbers[ids[start : start + _STEP] - lowest]
    return count


def _parents(ids: Column, starts: Column, count: int) -> tuple[Column, int, int]:
    """Return each block's parent, which is the block before it at its first access.

    Also return how many accesses follow another block than the parent, and the first request with one, or -1.
    """
    unknown = -2
    parents = np.full(count, unknown, np.int32)
    violations, first_bad = 0, -1
    first = 0
    while first < len(starts) - 1:
        last = bisect_right(starts, int(starts[first]) + _STEP) - 1
        last = min(max(last, first + 1), len(starts) - 1)
        base = int(starts[first])
        part = np.asarray(ids[base : int(starts[last])])
        if len(part):
            before = np.empty(len(part), np.int32)
            before[1:] = part[:-1]
            begins = np.asarray(starts[first:last]) - base
            before[begins[begins < len(part)]] = -1
            is_new = parents[part] == unknown
            # The last assignment to an index wins, so reversed order keeps the first parent.
            parents[part[is_new][::-1]] = before[is_new][::-1]
            bad = np.flatnonzero(parents[part] != before)
            violations += len(bad)
            if len(bad) and first_bad < 0:
                first_bad = bisect_right(starts, base + int(bad[0])) - 1
        first = last
    return parents, violations, first_bad


def without_sessions(trace: TraceArrays) -> TraceArrays:
    """Return the same trace without sessions, turns and next turns."""
    none = np.full(len(trace), -1, np.int32)
    return replace(trace, session=none, turn=none, next_turn=none.astype(np.int8))


COARSE_MAX_S = 86_400.0


def write_requests(path: Path, trace: TraceArrays, *, as_runs: bool, coarse_s: float = 0.0) -> None:
    """Write a trace atomically as request lines, with gzip if the name ends in ``.gz``.

    The first line has the block size. Blocks and sessions are numbered in the order of first use, so texts, ids and
    session names are not written. Times count from the first request.

    Args:
        path: the file.
        trace: the trace.
        as_runs: write `hash_runs`, not `hash_ids`.
        coarse_s: round times down to multiples of this; 0 means no rounding.

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
    """Write lines atomically, with gzip if the name ends in ``.gz``.

    Raises:
        ConfigError: the file cannot be written.
    """
    with replaced("", path) as draft:
        is_gzip = path.suffix == ".gz"
        with gzip.open(draft, "xt", 6, encoding="utf-8") if is_gzip else draft.open("x", encoding="utf-8") as stream:
            stream.writelines(lines)


def request_lines(trace: TraceArrays, *, as_runs: bool, coarse_s: float = 0.0) -> Iterator[dict[str, object]]:
    """Yield the fields of a request line for each request."""
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
    """Return runs of consecutive ids, each as [first id, count]."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return [[int(run[0]), len(run)] for run in np.split(ids, breaks) if len(run)]
