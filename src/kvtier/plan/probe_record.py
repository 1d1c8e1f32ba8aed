"""Link speeds from a record of `kvtier probe`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.errors import ConfigError

FILE_BYTES_MAX = 8 << 20
_ALLOWED = "a file that `kvtier probe --record` or `kvtier probe --json` wrote"

ROUND_TRIP = "contains"
"""The operation of a `Speed` that moves no bytes."""


class Speed(NamedTuple):
    """One measurement of a link."""

    op: str
    size_bytes: int
    """Bytes of one operation."""
    depth: int
    """Concurrent operations."""
    bytes_per_s: float
    first_s: float
    """Median time of one operation at that depth."""


Links = Mapping[str, tuple[Speed, ...]]
"""Measurements by name of the link."""


def read_links(path: Path, origin: str) -> Links:
    """The links in a probe record.

    Args:
        path: the file.
        origin: name of the path's source, for messages.

    Raises:
        ConfigError: the file is unreadable or not a probe record.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{origin} = {path}: {error.strerror or error}; allowed: {_ALLOWED}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{origin} = {path}: longer than {FILE_BYTES_MAX} bytes; allowed: {_ALLOWED}")
    try:
        record: Any = json.loads(content)
        record = record.get("results", record)
        return {str(link["name"]): (*map(_speed, link["measures"]), *_round_trip(link)) for link in record["links"]}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{origin} = {path}: not a probe record ({error!r}); allowed: {_ALLOWED}") from error


def fastest(links: Links, name: str, op: str) -> float | None:
    """Highest bandwidth of `op` on the link `name` in bytes a second; None without a measurement."""
    return max((it.bytes_per_s for it in links.get(name, ()) if it.op == op), default=None)


def round_trip(links: Links, name: str) -> float | None:
    """Seconds that one answer about a name takes in the tier `name`; None without a measurement."""
    return next((it.first_s for it in links.get(name, ()) if it.op == ROUND_TRIP), None)


def _round_trip(link: Mapping[str, Any]) -> list[Speed]:
    found = link.get("round_trip_us")
    if found is None:
        return []
    if not 0 <= float(found) < math.inf:
        raise ValueError(f"round_trip_us = {found}")
    return [Speed(ROUND_TRIP, 0, 1, 0.0, float(found) / 1e6)]


def _speed(measure: object) -> Speed:
    values = cast("dict[str, Any]", measure)
    speed = Speed(
        op=str(values["op"]),
        size_bytes=int(values["bytes"]),
        depth=int(values["depth"]),
        bytes_per_s=float(values["gb_per_s"]) * 1e9,
        first_s=float(values["latency_us_p50"]) / 1e6,
    )
    numbers = speed[1:]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"measurement with {numbers}")
    return speed
