"""The hardware catalogue: `hardware.toml`, each entry with its source and date."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, cast

from kvtier.config.schema import near
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
"""Kind of hardware to the input that names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareItem:
    """One piece of hardware with the figures of its source."""

    kind: str
    name: str
    values: dict[str, Any]
    """Bytes, bytes a second, FLOP/s by format of the weights, watts."""
    source: str
    date: str
    """Date on which the source was read."""


@cache
def catalogue() -> dict[str, dict[str, HardwareItem]]:
    """Kind to name to item."""
    tables = tomllib.loads((files("kvtier.plan") / "hardware.toml").read_text(encoding="utf-8"))
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
    """The item `name` of a kind; case is ignored, blanks and underscores count as hyphens.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    known, plain = catalogue()[kind], _plain(name)
    if plain not in known:
        suggestion = near(plain, sorted(known))
        raise ConfigError(f"{KINDS[kind]} = {name!r} (from {origin}): not in the catalogue of {kind}s{suggestion}")
    return known[plain]


def split_count(text: str, origin: str) -> tuple[int | None, str]:
    """Number and name of ``8xh100-sxm``, ``h100-sxmx8`` or ``h100-sxm``: the grammar of all commands.

    Raises:
        ConfigError: the number is zero or too large.
    """
    if any(_plain(text) in items for items in catalogue().values()):  # mi300x ends in an x of its own
        return None, text.strip()
    found = _COUNTED.fullmatch(text.strip())
    if found is None or not (found[1] or found[3]) or (found[1] and found[3]):
        return None, text.strip()
    count = int(found[1] or found[3])
    if not 1 <= count <= COUNT_MAX:
        raise ConfigError(f"{origin}: {text!r}; allowed: from 1 to {COUNT_MAX:,} of them")
    return count, found[2].strip()


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def hardware_tables() -> Iterator[Table]:
    """The catalogue, a table for each kind."""
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


def _cell(key: str, value: Any) -> str:  # noqa: ANN401 - what TOML has
    if key.endswith("bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if key.endswith("_s"):
        return time_text(value)
    return bytes_text(value) if key.endswith("bytes") else f"{value:g}" if isinstance(value, int | float) else value
