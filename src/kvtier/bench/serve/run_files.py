"""The files of a run, read: what is missing is None, what is torn is left out and counted."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError

LINE_BYTES_MAX = 1 << 20
LINES_MAX = 2_000_000
RUN_BYTES_MAX = 16 << 20
UNCOVERED_S = 2.0
"""Of an interval: so much may lie before the first sample and after the last one."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What one directory holds."""

    name: str
    run: Row
    requests: list[Row]
    engine: dict[str, Row] | None
    """By request; None without the file."""
    kvtier: dict[str, Row] | None
    objects: list[Row]
    samples: list[Row]
    skipped: Mapping[str, int]
    """By file: lines that were left out."""

    @property
    def arm(self) -> str:
        """The arm's name."""
        return str(self.run.get("arm", self.name))


def read_run(directory: Path) -> RunFiles:
    """The files of a run.

    Raises:
        ConfigError: `run.json` is missing or no record of a run.
    """
    path = directory / "run.json"
    try:
        with path.open("rb") as file:
            run = as_row(json.loads(file.read(RUN_BYTES_MAX)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; allowed: a complete run of kvtier bench serve") from error
    if not run:
        raise ConfigError(f"{path}: holds no JSON object; allowed: a complete run of kvtier bench serve")
    skipped: dict[str, int] = {}
    found = {
        name: _read_lines(directory / f"{name}.jsonl", skipped) for name in ("requests", "engine", "kvtier", "samples")
    }
    own = found["kvtier"]
    return RunFiles(
        name=directory.name,
        run=run,
        requests=[row for row in found["requests"] or () if number(row, "sent_s") is not None],
        engine=None if found["engine"] is None else _by_id(found["engine"]),
        kvtier=None if own is None else _by_id(row for row in own if row.get("kind") == "request"),
        objects=[row for row in own or () if row.get("kind") == "object"],
        samples=sorted(
            (row for row in found["samples"] or () if number(row, "time_s") is not None), key=lambda it: it["time_s"]
        ),
        skipped=skipped,
    )


def grown(samples: Sequence[Row], name: str, since_s: float, until_s: float) -> float | None:
    """By how much a counter of the samples grew, interpolated at both ends.

    None if it fell, or if more than `UNCOVERED_S` of the interval is outside of the samples.

    Args:
        samples: in the order of time.
        name: dotted, such as ``device.read_bytes``; of a metric ``metrics.`` and its sample name.
        since_s: start, Unix seconds.
        until_s: end.
    """
    times, values = column_of(samples, name)
    if not is_covered(times, since_s, until_s) or any(after < before for before, after in pairwise(values)):
        return None
    first, last = np.interp([since_s, until_s], times, values)
    return float(last - first)


def is_covered(times: Sequence[float], since_s: float, until_s: float) -> bool:
    """Whether the samples at `times` begin and end with the interval, but for `UNCOVERED_S`."""
    return len(times) > 1 and max(0.0, times[0] - since_s) + max(0.0, until_s - times[-1]) <= UNCOVERED_S


def most(samples: Sequence[Row], name: str, since_s: float, until_s: float) -> float | None:
    """The largest value of a gauge of the samples."""
    times, values = column_of(samples, name)
    return max((value for at_s, value in zip(times, values, strict=True) if since_s <= at_s <= until_s), default=None)


def _read_lines(path: Path, skipped: dict[str, int]) -> list[Row] | None:
    """JSON objects of a file; None without the file."""
    try:
        opened = path.open("rb")
    except OSError:
        return None
    with opened as file:
        lines = iter(partial(file.readline, LINE_BYTES_MAX), b"")
        rows = [_row_of(line) for line in islice(lines, LINES_MAX)]
        left_out = rows.count({}) + bool(file.readline(1))
    if left_out:
        skipped[path.name] = left_out
    return [row for row in rows if row]


def _row_of(line: bytes) -> Row:
    """The JSON object of a whole line; empty for anything else."""
    with suppress(ValueError, RecursionError):
        return as_row(json.loads(line)) if line.endswith(b"\n") else {}
    return {}


def _by_id(rows: Iterable[Row]) -> dict[str, Row]:
    """Rows by request; of several the last."""
    return {str(row["id"]): row for row in rows if "id" in row}


def as_row(value: object) -> Row:
    """`value` if it is a JSON object, else an empty one."""
    return cast("Row", value) if isinstance(value, dict) else {}


def number(row: Mapping[str, Any], name: str) -> float | None:
    """The finite number under `name`; None for anything else."""
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    with suppress(OverflowError):
        return float(value) if math.isfinite(value) else None
    return None


def count(row: Mapping[str, Any], name: str) -> int | None:
    """The number under `name`, rounded; None for anything else."""
    value = number(row, name)
    return None if value is None else round(value)


def counts(value: object) -> dict[str, int] | None:
    """A JSON object of numbers, without what is none; None for anything else."""
    if not isinstance(value, dict):
        return None
    row = as_row(cast("object", value))
    return {name: known for name in row if (known := count(row, name)) is not None}


def column_of(samples: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
    """Times and values of the samples that have the number `name`, dotted if it is in an inner object."""
    times: list[float] = []
    values: list[float] = []
    outer, _, inner = name.partition(".")
    for row in samples:
        value = number(as_row(row.get(outer)) if inner else row, inner or outer)
        if value is not None:
            times.append(float(row["time_s"]))
            values.append(value)
    return times, values
