"""The hardware catalogue: `hardware.toml`, read once, each entry with its source and date."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvtier.errors import ConfigError
from kvtier.plan.reading import near

KINDS = {"gpu": "gpu.name", "drive": "disk.name", "memory": "host.memory", "network": "shared.network"}
"""Kind of hardware to the input that names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One piece of hardware as its source describes it."""

    kind: str
    name: str
    values: dict[str, Any]
    """Bytes, bytes a second, FLOP/s by format of the weights, watts."""
    source: str
    date: str
    """When the source was read."""


@cache
def catalogue() -> dict[str, dict[str, Item]]:
    """Kind to name to item."""
    tables = tomllib.loads((files("kvtier.plan") / "hardware.toml").read_text(encoding="utf-8"))
    sources = tables["source"]
    return {
        kind: {
            name: Item(
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


def find(kind: str, name: str, origin: str) -> Item:
    """The item `name` of a kind; upper and lower case, blanks and underscores make no difference.

    Raises:
        ConfigError: there is none; the message names the nearest, and what to set instead.
    """
    known = catalogue()[kind]
    plain = name.lower().replace(" ", "-").replace("_", "-")
    if plain not in known:
        told = near(plain, sorted(known))
        raise ConfigError(f"{KINDS[kind]} = {name!r} (from {origin}): not in the catalogue of {kind}s{told}")
    return known[plain]
