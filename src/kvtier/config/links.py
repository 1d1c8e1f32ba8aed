"""How fast links are, as `kvtier probe` measured them: read from its record, checked, as plain numbers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.errors import ConfigError

FILE_BYTES_MAX = 8 << 20
_ALLOWED = "a file that `kvtier probe --record` or `kvtier probe --json` wrote"


class Speed(NamedTuple):
    """One measure of a link."""

    op: str
    size_bytes: int
    """Of one operation."""
    depth: int
    """Operations under way at once."""
    bytes_per_s: float
    first_s: float
    """Median time of one operation at that depth."""


Links = Mapping[str, tuple[Speed, ...]]
"""By name of the link."""


def read_links(path: Path, origin: str) -> Links:
    """The links of a probe's record.

    Args:
        path: the file.
        origin: what named it, for messages.

    Raises:
        ConfigError: it cannot be read, or is no such record.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{origin} = {path}: {error.strerror or error}; allowed: {_ALLOWED}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{origin} = {path}: longer than {FILE_BYTES_MAX} bytes; allowed: {_ALLOWED}")
    try:
        told: Any = json.loads(content)
        told = told.get("results", told)
        return {str(link["name"]): tuple(_speed(it) for it in link["measures"]) for link in told["links"]}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{origin} = {path}: not the record of a probe ({error!r}); allowed: {_ALLOWED}") from error


def fastest(links: Links, name: str, op: str) -> float | None:
    """Bytes a second of the fastest measure of `op` on the link `name`; None where there is none."""
    return max((it.bytes_per_s for it in links.get(name, ()) if it.op == op), default=None)


def _speed(told: object) -> Speed:
    values = cast("dict[str, Any]", told)
    speed = Speed(
        op=str(values["op"]),
        size_bytes=int(values["bytes"]),
        depth=int(values["depth"]),
        bytes_per_s=float(values["gb_per_s"]) * 1e9,
        first_s=float(values["latency_us_p50"]) / 1e6,
    )
    numbers = speed[1:]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"a measure with {numbers}")
    return speed
