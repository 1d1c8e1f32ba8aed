"""Read the hardware catalogue, `hardware.toml`, in which each entry has a source and a date.

Also read link speeds from a record of `kvtier probe`. They replace those of the catalogue.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.schema import unknown
from kvtier.errors import ConfigError
from kvtier.report.format import NONE, bytes_text, digits, time_text
from kvtier.report.table import Table

COUNT_MAX = 10**6
_COUNTED = re.compile(r"(?:([0-9]{1,9}) ?x ?)?(.+?)(?: ?x ?([0-9]{1,9}))?", re.ASCII)
KINDS = {
    "gpu": "gpu.name",
    "exchange": "gpu.exchange",
    "drive": "disk.name",
    "memory": "host.memory",
    "network": "shared.network",
}
"""The input that names an item of each kind of hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareItem:
    """One piece of hardware with the figures of its source."""

    kind: str
    name: str
    values: dict[str, Any]
    """Bytes, bytes per second, FLOP/s by format of the weights, and watts."""
    source: str
    date: str
    """Date on which the source was read."""


@cache
def catalogue() -> dict[str, dict[str, HardwareItem]]:
    """Return the items of the catalogue, by kind and then by name."""
    tables = tomllib.loads((files("kvtier.tools.plan") / "hardware.toml").read_text(encoding="utf-8"))
    sources = tables["source"]
    return {
        kind: {
            name: HardwareItem(
                kind=kind,
                name=name,
                values={key: value for key, value in entry.items() if key != "source"},
                source=sources[entry["source"]]["text"],
                date=str(sources[entry["source"]]["date"]),
            )
            for name, entry in tables[kind].items()
        }
        for kind in KINDS
    }


def find(kind: str, name: str, origin: str) -> HardwareItem:
    """Find the item `name` of a kind. Case is ignored; blanks and underscores count as hyphens.

    Raises:
        ConfigError: there is no such item; the message names the nearest.
    """
    known, plain = catalogue()[kind], _plain(name)
    if plain not in known:
        raise unknown(
            f"the catalogue has no such {'GPU' if kind == 'gpu' else kind}",
            plain,
            sorted(known),
            setting=KINDS[kind],
            value=repr(name),
            origin=origin,
        )
    return known[plain]


def split_count(text: str, origin: str) -> tuple[int | None, str]:
    """Split ``8xh100-sxm`` or ``h100-sxmx8`` into number and name; in ``h100-sxm`` the number is None.

    All commands use this grammar.

    Raises:
        ConfigError: the number is zero or too large.
    """
    if any(_plain(text) in items for items in catalogue().values()):  # the name mi300x ends in x
        return None, text.strip()
    found = _COUNTED.fullmatch(text.strip())
    if found is None or not (found[1] or found[3]) or (found[1] and found[3]):
        return None, text.strip()
    count = int(found[1] or found[3])
    if not 1 <= count <= COUNT_MAX:
        raise ConfigError(f"{origin}: the number in {text!r} is not allowed; allowed: 1 to {COUNT_MAX:,}")
    return count, found[2].strip()


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def hardware_tables() -> Iterator[Table]:
    """Yield the catalogue as a table for each kind."""
    columns = {
        "gpu": ("bf16 TFLOP/s", "fp8 TFLOP/s", "memory", "its rate", "host link", "exchange", "watts"),
        "exchange": ("latency of 2, 4, 8 GPUs", "rate", "dispatch"),
        "drive": ("capacity", "read", "write", "drive writes a day", "watts"),
        "memory": ("a channel",),
        "network": ("an adapter",),
    }
    for kind, items in catalogue().items():
        rows = [(item.name, *_cells(item)) for item in items.values()]
        yield Table(("name", *columns[kind]), rows, numeric=len(columns[kind]), title=kind)


def _cells(item: HardwareItem) -> Iterator[str]:
    for key, value in item.values.items():
        if key == "flops":
            yield from (digits(value[form] / 1e12) if form in value else NONE for form in ("bf16", "fp8"))
        elif isinstance(value, dict):
            figures = cast("dict[str, float]", value)
            yield ", ".join(_cell(key, figures[count]) for count in sorted(figures))
        else:
            yield _cell(key, value)


def _cell(key: str, value: Any) -> str:  # noqa: ANN401 - any TOML value
    if key.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if key.endswith("_s"):
        return time_text(value)
    return bytes_text(value) if key.endswith("bytes") else f"{value:g}" if isinstance(value, int | float) else value


FILE_BYTES_MAX = 8 << 20
_ALLOWED = "a file that `kvtier probe --record` or `kvtier probe --json` wrote"

ROUND_TRIP = "contains"
"""Name of the operation of a `Speed` that measures a round trip and moves no bytes."""


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
"""The measurements of each link, by its name."""


def read_links(path: Path, origin: str) -> Links:
    """Read the links in a probe record.

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
    """Return the highest bandwidth of `op` on the link `name`, in bytes per second; None without a measurement."""
    return max((it.bytes_per_s for it in links.get(name, ()) if it.op == op), default=None)


def round_trip(links: Links, name: str) -> float | None:
    """Return the seconds that the tier `name` takes for one `ROUND_TRIP`; None without a measurement."""
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
