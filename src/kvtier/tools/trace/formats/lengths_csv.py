"""Reads CSV files with arrivals and lengths, but without blocks: the traces of Azure and BurstGPT.

Azure's traces have TIMESTAMP, ContextTokens and GeneratedTokens. BurstGPT's (README.md of HPMLL/BurstGPT) have
Timestamp in seconds, Request tokens, Response tokens (0 for a failed request), and from release 1.2 on a Session ID
for chats.
"""

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.trace.formats.base import TraceReader, TraceRequest
from kvtier.tools.trace.trace_files import LineErrors, number, short, text_lines, whole

HEADERS = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Timestamp", "Request tokens", "Response tokens"))
"""Columns of time, prompt and answer in Azure's and in BurstGPT's files."""
_SESSION = "Session ID"
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


class LengthsCsv(TraceReader):
    """Reads a CSV file with arrivals and lengths.

    Args:
        path: the file.
    """

    has_blocks = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.notes = ("the trace has arrivals and lengths only, not which blocks are reused",)

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of the file. Times count from the first request."""
        lines = text_lines(self.path)
        first_line, first = next(lines, (1, ""))
        with LineErrors(self.path, first_line):
            columns = [it.strip() for it in _cells(first)]
            header = max(HEADERS, key=lambda it: len({*it} & {*columns}))
            if not {*header} & {*columns}:
                allowed = ", or ".join(", ".join(it) for it in HEADERS)
                raise ConfigError(f"unknown CSV; allowed: columns {allowed}; or another format than CSV")
            if missing := [it for it in header if it not in columns]:
                raise ConfigError(f"column {missing[0]} is missing")
        time_name, input_name, output_name = header
        began_s: float | None = None
        for line_number, text in lines:
            with LineErrors(self.path, line_number):
                fields = dict(zip(columns, _cells(text), strict=False))
                time_s = (_date_s if header == HEADERS[0] else _seconds)(fields, time_name)
                began_s = time_s if began_s is None else began_s
                lengths = _count(fields, input_name), _count(fields, output_name)
                session = fields.get(_SESSION, "").strip() or None
                request = TraceRequest(time_s - began_s, *lengths, np.zeros(0, np.int64), session, line_number)
            yield request


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader([text]), list[str]())
    except csv.Error as error:
        raise ConfigError(f"not CSV: {error}; allowed: fields of at most {csv.field_size_limit()} characters") from None


def _date_s(fields: dict[str, str], name: str) -> float:
    text = fields.get(name, "")
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{name} is {short(text)}; allowed: a time such as 2023-11-16 18:15:46.680590") from None
    zoned = time if time.tzinfo else time.replace(tzinfo=UTC)  # only Azure's later traces have the zone
    return (zoned - _EPOCH).total_seconds()


def _seconds(fields: dict[str, str], name: str) -> float:
    try:
        return number({name: float(fields[name])}, name)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {short(fields.get(name))}; allowed: a number of seconds") from None


def _count(fields: dict[str, str], name: str) -> int:
    try:
        return whole({name: int(fields[name])}, name)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {short(fields.get(name))}; allowed: a whole number of at least 0") from None
