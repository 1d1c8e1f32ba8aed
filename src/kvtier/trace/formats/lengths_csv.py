"""CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure 2023): arrivals and lengths, no blocks."""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import TraceReader, TraceRequest
from kvtier.trace.trace_files import LineErrors, short, text_lines, whole

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class LengthsCsv(TraceReader):
    """Reads such a file.

    Args:
        path: the file.
    """

    has_blocks = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.notes = ("the trace has arrivals and lengths only, not which blocks are reused",)

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, in the order of the file; times count from the first."""
        lines = text_lines(self.path)
        first_line, first = next(lines, (1, ""))
        with LineErrors(self.path, first_line):
            columns = [it.strip() for it in _cells(first)]
            if missing := [it for it in HEADER if it not in columns]:
                raise ConfigError(f"column {missing[0]} is missing")
        began: datetime | None = None
        for line_number, text in lines:
            with LineErrors(self.path, line_number):
                fields = dict(zip(columns, _cells(text), strict=False))
                time = _time(fields.get("TIMESTAMP", ""))
                began = began or time
                inputs, outputs = _count(fields, HEADER[1]), _count(fields, HEADER[2])
                after_s = (time - began).total_seconds()
                request = TraceRequest(after_s, inputs, outputs, np.zeros(0, np.int64), None, line_number)
            yield request


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), list[str]())
    except csv.Error as error:
        raise ConfigError(f"not CSV: {error}; allowed: fields of at most {csv.field_size_limit()} characters") from None


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"TIMESTAMP is {short(text)}; allowed: such as 2023-11-16 18:15:46.680590") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)  # Azure's later traces have the zone


def _count(fields: dict[str, str], name: str) -> int:
    try:
        return whole({name: int(fields[name])}, name)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {short(fields.get(name))}; allowed: a whole number from 0 on") from None
