"""Packed traces as request lines, the form that most tools read."""

import gzip
import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.arrays import NEXT_TURNS, Column, Packed

COARSE_MAX_S = 86_400.0


def write_requests(path: Path, packed: Packed, *, as_runs: bool, coarse_s: float = 0.0) -> None:
    """Write a trace as request lines, gzip where the name ends in ``.gz``; whole or not at all.

    The first line also tells the size of a block. Texts, names of sessions and ids of the trace it came from are not in
    it: blocks are numbered as they appear, sessions too. Times count from the first request.

    Args:
        path: the file.
        packed: the trace.
        as_runs: write `hash_runs`, not `hash_ids`.
        coarse_s: times are cut to multiples of so many seconds; 0 leaves them.

    Raises:
        ConfigError: the trace has no blocks, `coarse_s` is not possible, or the file cannot be written.
    """
    if not 0 <= coarse_s <= COARSE_MAX_S:
        raise ConfigError(f"--coarse-s {coarse_s:g}; allowed: 0 to {COARSE_MAX_S:g} seconds")
    if not packed.has_blocks:
        raise ConfigError(f"trace {packed.name} tells no blocks; allowed: one that does")
    lines = request_lines(packed, as_runs=as_runs, coarse_s=coarse_s)
    write_lines(path, (f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines, gzip where the name ends in ``.gz``; whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    there = path.resolve()  # a link stays, and what it names is replaced
    draft = there.with_name(f".{there.name}.{secrets.token_hex(8)}")
    try:
        with _created(draft, is_packed=path.suffix == ".gz") as stream:
            stream.writelines(lines)
        draft.replace(there)
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink()


def _created(path: Path, *, is_packed: bool) -> IO[str]:
    return gzip.open(path, "xt", 6, encoding="utf-8") if is_packed else path.open("x", encoding="utf-8")


def request_lines(packed: Packed, *, as_runs: bool, coarse_s: float = 0.0) -> Iterator[dict[str, object]]:
    """The lines, one for each request."""
    numbers = np.full(packed.block_count, -1, np.int64)
    count = 0
    first_s = float(packed.time_s[0])
    for request in range(len(packed)):
        ids = packed.ids[int(packed.starts[request]) : int(packed.starts[request + 1])]
        for block in ids[numbers[ids] < 0].tolist():
            if numbers[block] < 0:
                numbers[block] = count
                count += 1
        line: dict[str, object] = {
            "timestamp": _milliseconds(float(packed.time_s[request]) - first_s, coarse_s),
            "input_length": int(packed.input_tokens[request]),
            "output_length": int(packed.output_tokens[request]),
        }
        if request == 0:
            line["block_size"] = packed.block_tokens
        session = int(packed.session[request])
        if session >= 0:
            line["session_id"] = session
        if (next_turn := int(packed.next_turn[request])) >= 0:
            line["next_turn"] = NEXT_TURNS[next_turn].value
        named = numbers[ids]
        if as_runs:
            line["hash_runs"] = _runs(named)
        else:
            line["hash_ids"] = named.tolist()
        yield line


def _milliseconds(seconds: float, coarse_s: float) -> int | float:
    if coarse_s:
        seconds = seconds // coarse_s * coarse_s
    time_ms = round(seconds * 1000, 3)
    return int(time_ms) if time_ms == int(time_ms) else time_ms


def _runs(ids: Column) -> list[list[int]]:
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(ids)]
    return [[int(ids[first]), end - first] for first, end in zip(firsts, ends, strict=True)]
