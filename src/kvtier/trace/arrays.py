"""A trace as plain columns: what replays read, from memory or, when it is large, from a file.

Blocks are numbered from 0 without gaps. Reading needs memory for the distinct blocks only; the accesses, four bytes
each, go to a temporary file as soon as they are many.
"""

import json
import tempfile
from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Request, Trace, Wrong
from kvtier.trace.formats.block_ids import REQUEST_BLOCKS_MAX
from kvtier.trace.io import WHOLE_MAX
from kvtier.types import NextTurn

Column = npt.NDArray[Any]

NEXT_TURNS = tuple(NextTurn)
MEMORY_BYTES_MAX = 64 << 20
"""A column beyond is kept in a file."""
BLOCKS_MAX = 1 << 30
ACCESSES_MAX = 1 << 32
"""Blocks of all requests: 16 GiB in a temporary file."""
_DENSE_MIN = 1 << 22
"""Fewer accesses count as this many: a table of that size is small."""
_SPARSE = 2
"""From so many ids for each access on, they are sorted: a table of all of them would be large and empty."""
_STEP = 1 << 16
"""Values that are gathered before they are written."""
_NAMES = ("ids", "starts", "time_s", "input_tokens", "output_tokens", "session", "turn", "next_turn", "parents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A whole trace. Request i has the blocks ``ids[starts[i]:starts[i + 1]]``."""

    name: str
    block_tokens: int
    has_blocks: bool
    ids: Column
    """int32: the blocks of all requests, one after the other, each request's from its start."""
    starts: Column
    """int64, one more than requests."""
    time_s: Column
    """float64; never goes back."""
    input_tokens: Column
    """int32, as is `output_tokens`."""
    output_tokens: Column
    session: Column
    """int32: number of the session; -1 where the trace names none."""
    turn: Column
    """int32: number of the request in its session, from 0; -1 without a session."""
    next_turn: Column
    """int8: who goes on after the answer, its place in `NEXT_TURNS`; -1 where the trace does not tell."""
    parents: Column
    """int32, for each block: the one before it in its prefix; -1 at the start."""
    notes: tuple[str, ...]
    """What a reader of figures should know of how the trace was read."""
    warnings: tuple[str, ...]
    """What is wrong with the trace."""
    prefix_violations: int
    """Accesses to a block whose parent is not the one that it had before."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def block_count(self) -> int:
        """Distinct blocks."""
        return len(self.parents)

    def save(self, folder: Path) -> None:
        """Write everything into `folder`, for `load` in another process."""
        for name in _NAMES:
            np.save(folder / f"{name}.npy", getattr(self, name))
        rest: dict[str, object] = {
            "name": self.name,
            "block_tokens": self.block_tokens,
            "has_blocks": self.has_blocks,
            "notes": self.notes,
            "warnings": self.warnings,
            "prefix_violations": self.prefix_violations,
        }
        (folder / "rest.json").write_text(json.dumps(rest), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Packed":
        """What `save` wrote; columns are mapped, so that several processes share one copy."""
        rest: dict[str, Any] = json.loads((folder / "rest.json").read_text(encoding="utf-8"))
        rest["notes"], rest["warnings"] = tuple(rest["notes"]), tuple(rest["warnings"])
        columns: dict[str, Any] = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _NAMES}
        return cls(**rest, **columns)


class _Growing:
    """A column that is written from its start to its end, in memory until it is large."""

    def __init__(self, kind: npt.DTypeLike) -> None:
        self._kind = np.dtype(kind)
        self._parts: list[Column] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None

    def add(self, values: Column) -> None:
        self._parts.append(values.astype(self._kind))
        self._bytes += self._parts[-1].nbytes
        if self._bytes > MEMORY_BYTES_MAX:
            self._file = self._file or tempfile.TemporaryFile(prefix="kvtier-trace-")  # noqa: SIM115  as long as we
            for part in self._parts:
                self._file.write(part.data.cast("B"))
            self._parts = []

    def finished(self) -> Column:
        if self._file is None:
            return np.concatenate(self._parts) if self._parts else np.zeros(0, self._kind)
        for part in self._parts:
            self._file.write(part.data.cast("B"))
        self._file.flush()
        mapped = np.memmap(self._file, self._kind, "r+")
        self.close()  # the map lives on without it
        return mapped

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def pack(trace: Trace, *, is_strict: bool = False) -> Packed:
    """Read a whole trace.

    Args:
        trace: from `open_trace`.
        is_strict: whether what is wrong with the trace is an error, not a warning.

    Raises:
        ConfigError: a line is malformed, there is no request, or `is_strict` and something is wrong.
    """
    packer = _Packer(trace)
    try:
        packed = packer.packed()
    finally:
        packer.close()
    if is_strict and packed.warnings:
        raise ConfigError(f"trace {trace.name}: {packed.warnings[0]}; allowed with --strict: a trace without warnings")
    return packed


class _Packer:
    """Collects requests; small things in lists, which become arrays from time to time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ids, self._starts, self._time_s = _Growing(np.int32), _Growing(np.int64), _Growing(np.float64)
        self._input, self._output = _Growing(np.int32), _Growing(np.int32)
        self._session, self._turn, self._next_turn = _Growing(np.int32), _Growing(np.int32), _Growing(np.int8)
        self._blocks: list[Column] = []
        self._rows: list[tuple[int, float, int, int, int, int, int]] = []
        self._waiting = self._total = 0
        self._sessions: dict[str, int] = {}
        self._turns: list[int] = []
        self._highest, self._lowest = -1, 0

    def packed(self) -> Packed:
        latest_s, times_back, first_back = 0.0, 0, 0
        has_begun = False
        for request in self._trace.requests():
            if not has_begun:
                has_begun, latest_s = True, request.time_s
            if request.time_s < latest_s:
                times_back += 1
                first_back = first_back or request.line
            latest_s = max(latest_s, request.time_s)
            self._add(latest_s, request)
        if not has_begun:
            raise ConfigError(f"trace {self._trace.name} has no request; allowed: at least one")
        self._flush()
        self._starts.add(np.asarray([self._total]))
        notes = self._trace.notes
        warnings = [str(it) for it in notes if isinstance(it, Wrong)]
        if times_back:
            warnings.append(
                f"{times_back} timestamps go back, first in line {first_back}; the latest before it counts instead"
            )
        return self._checked(tuple(it for it in notes if not isinstance(it, Wrong)), warnings)

    def close(self) -> None:
        for column in (self._ids, self._starts, *self._columns):
            column.close()

    @property
    def _columns(self) -> tuple[_Growing, ...]:
        return self._time_s, self._input, self._output, self._session, self._turn, self._next_turn

    def _add(self, time_s: float, request: Request) -> None:
        _check(self._trace.name, request)
        number = turn = -1
        if request.session is not None:
            number = self._sessions.setdefault(request.session, len(self._sessions))
            if number == len(self._turns):
                self._turns.append(0)
            turn = self._turns[number]
            self._turns[number] += 1
        next_turn = -1 if request.next_turn is None else NEXT_TURNS.index(request.next_turn)
        self._rows.append((self._total, time_s, request.input_tokens, request.output_tokens, number, turn, next_turn))
        self._blocks.append(request.blocks)
        self._total += len(request.blocks)
        if self._total > ACCESSES_MAX:
            raise ConfigError(
                f"trace {self._trace.name}: {self._total} blocks of all requests; allowed: {ACCESSES_MAX}"
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
                raise ConfigError(f"trace {self._trace.name}: block ids up to {self._highest}; allowed: {BLOCKS_MAX}")
        self._ids.add(ids)
        columns = (self._starts, *self._columns)
        for column, values in zip(columns, zip(*self._rows, strict=True), strict=True):
            column.add(np.asarray(values))
        self._blocks, self._rows, self._waiting = [], [], 0

    def _checked(self, notes: tuple[str, ...], warnings: list[str]) -> Packed:
        ids, starts = self._ids.finished(), self._starts.finished()
        count = _renumber(ids, self._lowest, self._highest)
        parents, violations, first_bad = _parents(ids, starts, count)
        if violations:
            warnings.append(
                f"{violations} blocks follow another block than before, first in request {first_bad + 1}: "
                "ids that do not name a whole prefix, so that hits are overstated; least so those of policies that "
                "go by prefixes ('default'), which may look worse here than with the engine's own names"
            )
        return Packed(
            name=self._trace.name,
            block_tokens=self._trace.block_tokens,
            has_blocks=self._trace.has_blocks,
            ids=ids,
            starts=starts,
            time_s=self._time_s.finished(),
            input_tokens=self._input.finished(),
            output_tokens=self._output.finished(),
            session=self._session.finished(),
            turn=self._turn.finished(),
            next_turn=self._next_turn.finished(),
            parents=parents,
            notes=notes,
            warnings=tuple(warnings),
            prefix_violations=violations,
        )


def _check(trace: str, request: Request) -> None:
    """What holds for the requests of every reader.

    Raises:
        ConfigError: one has too many tokens or blocks.
    """
    for name, tokens in (("prompt", request.input_tokens), ("answer", request.output_tokens)):
        if not 0 <= tokens <= WHOLE_MAX:
            raise ConfigError(
                f"trace {trace}, line {request.line}: {name} of {tokens} tokens; allowed: at most {WHOLE_MAX}"
            )
    blocks = len(request.blocks)
    if blocks > REQUEST_BLOCKS_MAX:
        raise ConfigError(f"trace {trace}, line {request.line}: {blocks} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")


def _renumber(ids: Column, lowest: int, highest: int) -> int:
    """Number the blocks in place, without gaps, in the order of their ids; returns how many there are."""
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
    """The block before each block, how often it is another one than before, and the first request where it is."""
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
            # Written backwards, so that of several accesses to a new block the first counts.
            parents[part[is_new][::-1]] = before[is_new][::-1]
            bad = np.flatnonzero(parents[part] != before)
            if len(bad):
                violations += len(bad)
                if first_bad < 0:
                    first_bad = bisect_right(starts, base + int(bad[0])) - 1
        first = last
    return parents, violations, first_bad


def without_sessions(packed: Packed) -> Packed:
    """The same trace as if nobody knew which requests belong together."""
    nobody = np.full(len(packed), -1, np.int32)
    return replace(packed, session=nobody, turn=nobody, next_turn=nobody.astype(np.int8))
