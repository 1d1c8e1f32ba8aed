"""A whole trace as numpy columns, in memory or, when large, in temporary files.

Blocks get the numbers 0, 1, 2, ... Reading takes memory for distinct blocks only; the accesses, four bytes each, go to
a temporary file when there are many.
"""

import json
import tempfile
from bisect import bisect_right
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import TraceReader, TraceRequest, TraceWarning, UnitDoubt
from kvtier.trace.formats.block_ids import REQUEST_BLOCKS_MAX
from kvtier.trace.trace_files import WHOLE_MAX
from kvtier.types import NextTurn

Column = npt.NDArray[Any]

NEXT_TURNS = tuple(NextTurn)
MEMORY_BYTES_MAX = 64 << 20
"""Larger columns go to a file."""
BLOCKS_MAX = 1 << 30
ACCESSES_MAX = 1 << 32
"""Blocks of all requests: 16 GiB in a temporary file."""
_DENSE_MIN = 1 << 22
"""A table of all ids may have this size, however few accesses there are."""
_SPARSE = 2
"""Above this ratio of ids to accesses, ids are sorted: a table of all of them would be mostly empty."""
_STEP = 1 << 16
"""Values of one vectorized step."""
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
    """int64, one more than requests."""
    time_s: Column
    """float64, monotonic."""
    input_tokens: Column
    """int32, as is `output_tokens`."""
    output_tokens: Column
    session: Column
    """int32: number of the session; -1: none."""
    turn: Column
    """int32: index of the request in its session; -1 without a session."""
    next_turn: Column
    """int8: index in `NEXT_TURNS`; -1: unknown."""
    parents: Column
    """int32, for each block: the one before it in its prefix; -1 for a first block."""
    notes: tuple[str, ...]
    """How the trace was read."""
    warnings: tuple[str, ...]
    """What is wrong with the trace."""
    prefix_violations: int
    """Accesses to a block after another parent than its first."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def block_count(self) -> int:
        """Distinct blocks."""
        return len(self.parents)

    @property
    def unique_tokens(self) -> int:
        """Tokens of all distinct blocks, each counted whole."""
        return self.block_count * self.block_tokens

    def blocks(self, request: int) -> Column:
        """The blocks of one request."""
        return self.ids[int(self.starts[request]) : int(self.starts[request + 1])]

    def save(self, folder: Path) -> None:
        """Write all columns into `folder`, for `load` in another process."""
        for name in _NAMES:
            np.save(folder / f"{name}.npy", getattr(self, name))
        rest = {name: getattr(self, name) for name in self.__slots__ if name not in _NAMES}
        (folder / "rest.json").write_text(json.dumps(rest), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "TraceArrays":
        """Read what `save` wrote. Columns are memory-mapped, so processes share one copy."""
        rest: dict[str, Any] = json.loads((folder / "rest.json").read_text(encoding="utf-8"))
        rest["notes"], rest["warnings"] = tuple(rest["notes"]), tuple(rest["warnings"])
        columns: dict[str, Any] = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES}
        return cls(**rest, **columns)


class _GrowingColumn:
    """An append-only column, in memory until it is large."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._kind = np.dtype(kind)
        self._file = tempfile.SpooledTemporaryFile[bytes](MEMORY_BYTES_MAX, prefix="kvtier-trace-")

    def add(self, values: Column) -> None:
        self._file.write(values.astype(self._kind).tobytes())

    def finished(self) -> Column:
        """The column, which stays valid after `close`."""
        if self._file.tell() > MEMORY_BYTES_MAX:
            self._file.flush()
            return np.memmap(self._file, self._kind, "r+")
        self._file.seek(0)
        return np.frombuffer(bytearray(self._file.read()), self._kind)

    def close(self) -> None:
        self._file.close()


def read_arrays(reader: TraceReader, *, is_strict: bool = False) -> TraceArrays:
    """Read a whole trace.

    Args:
        reader: from `open_trace`.
        is_strict: raise warnings as errors, except doubts of a unit that is given.

    Raises:
        ConfigError: a line is malformed, there is no request, or `is_strict` and there is a warning.
    """
    with closing(_Builder(reader)) as builder:
        trace = builder.build()
    refused = [it for it in trace.warnings if not isinstance(it, UnitDoubt)]
    if is_strict and refused:
        raise ConfigError(f"trace {reader.name}: {refused[0]}; allowed with --strict: a trace without warnings")
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

    def build(self) -> TraceArrays:
        latest_s, times_back, first_back = -np.inf, 0, 0
        for request in self._reader.requests():
            if request.time_s < latest_s:
                times_back += 1
                first_back = first_back or request.line
            latest_s = max(latest_s, request.time_s)
            self._add(latest_s, request)
        if latest_s == -np.inf:
            raise ConfigError(f"trace {self._reader.name} has no request; allowed: at least one")
        self._flush()
        self._columns[0].add(np.asarray([self._total]))
        warnings: list[str] = [it for it in self._reader.notes if isinstance(it, TraceWarning)]
        if times_back:
            warnings.append(
                f"{times_back} timestamps go back, first in line {first_back}; replaced by the latest time before"
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
                f"trace {self._reader.name}: {self._total} blocks of all requests; allowed: {ACCESSES_MAX}"
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
                raise ConfigError(f"trace {self._reader.name}: block ids up to {self._highest}; allowed: {BLOCKS_MAX}")
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
    """Number the blocks in place from 0 without gaps, in the order of their ids; returns how many there are."""
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
    """The parent of each block, the number of accesses after another parent, and the first request with one."""
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
            # Of repeated indices the last assignment stays, so reversed order keeps the first parent.
            parents[part[is_new][::-1]] = before[is_new][::-1]
            bad = np.flatnonzero(parents[part] != before)
            violations += len(bad)
            if len(bad) and first_bad < 0:
                first_bad = bisect_right(starts, base + int(bad[0])) - 1
        first = last
    return parents, violations, first_bad


def without_sessions(trace: TraceArrays) -> TraceArrays:
    """The same trace without sessions, turns and next turns."""
    none = np.full(len(trace), -1, np.int32)
    return replace(trace, session=none, turn=none, next_turn=none.astype(np.int8))
