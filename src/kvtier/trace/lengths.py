"""CSV with TIMESTAMP, ContextTokens and GeneratedTokens (Azure 2023): arrivals and lengths, no blocks."""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.files import Place, text_lines, whole
from kvtier.trace.request import Request

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class LengthRows:
    """Reads the rows of such a file.

    Args:
        path: the file.
    """

    has_blocks = False
    block_tokens = 1

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self.notes = ("the trace tells arrivals and lengths only, not what is reused",)

    def requests(self) -> Iterator[Request]:
        """The requests, in the order of the file; times count from the first."""
        rows = csv.reader(text for _, text in text_lines(self._path))
        columns = [it.strip() for it in next(rows, list[str]())]
        with Place(self._path, 1):
            if missing := [it for it in HEADER if it not in columns]:
                raise ConfigError(f"column {missing[0]} is missing")
        began: datetime | None = None
        nothing = np.zeros(0, np.int64)
        for line_number, row in enumerate(rows, 2):
            with Place(self._path, line_number):
                fields = dict(zip(columns, row, strict=False))
                time = _time(fields.get("TIMESTAMP", ""))
                began = began or time
                inputs, outputs = _count(fields, HEADER[1]), _count(fields, HEADER[2])
                request = Request((time - began).total_seconds(), inputs, outputs, nothing, None, line_number)
            yield request


def _time(text: str) -> datetime:
    try:
        # Fractions have seven digits there, of which Python reads six.
        return datetime.fromisoformat(text.strip()[:26])
    except ValueError:
        raise ConfigError(f"TIMESTAMP is {text!r}; allowed: such as 2023-11-16 18:15:46.680590") from None


def _count(fields: dict[str, str], name: str) -> int:
    try:
        return whole({name: int(fields[name])}, name)
    except (KeyError, ValueError):
        raise ConfigError(f"{name} is {fields.get(name)!r}; allowed: a whole number from 0 on") from None
