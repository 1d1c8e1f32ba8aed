"""Models known by name. The TOML files in this folder list the models with the fields of each config.json."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from typing import Any, cast

COPIES = "copies.toml"

_SUFFIXES = ("-instruct", "-chat", "-it", "-hf", "-base", "-bf16", "-fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of the catalogue."""

    name: str
    repository: str
    """Repository of the config.json, in the form organization/name."""
    via: str
    """Site from which the copy was read."""
    date: str
    """Date on which the copy was read, YYYY-MM-DD."""
    aliases: tuple[str, ...]
    parameters_billion: float | None
    active_billion: float | None
    weights: str
    """Format of most weights in the repository."""
    experts: tuple[int, int]
    """Routed experts per layer, and experts that a token uses; zeros if there are none, or they are unknown."""
    config: Mapping[str, object]


@cache
def entries() -> Mapping[str, ModelEntry]:
    """Read all models, and return them by name in alphabetical order."""
    tables = {
        file.name: tomllib.loads(file.read_text(encoding="utf-8"))
        for file in files(__name__).iterdir()
        if file.name.endswith(".toml")
    }
    copies = tables.pop(COPIES)
    return {
        name: _entry(name, table, copies[table["via"]])
        for name, table in sorted((name, table) for models in tables.values() for name, table in models.items())
    }


def find(name: str) -> ModelEntry | None:
    """Find the model with this name, alias or repository. Case and suffixes such as ``-instruct`` are ignored."""
    return by_any_name().get(_plain(name))


@cache
def by_any_name() -> Mapping[str, ModelEntry]:
    """Return the models by every name, repository and alias."""
    by_name: dict[str, ModelEntry] = {}
    for entry in entries().values():
        for name in (entry.name, entry.repository, *entry.aliases):
            by_name.setdefault(_plain(name), entry)
    return by_name


def _plain(name: str) -> str:
    plain = name.strip().lower().rpartition("/")[2]
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    return plain


def _entry(name: str, table: dict[str, Any], copy: dict[str, Any]) -> ModelEntry:
    return ModelEntry(
        name=name,
        repository=table["repository"],
        via=copy["text"],
        date=str(copy["read"]),
        aliases=tuple(table.get("aliases", ())),
        parameters_billion=table.get("parameters_billion"),
        active_billion=table.get("active_billion"),
        weights=table.get("weights", "bf16"),
        experts=tuple(table.get("experts", (0, 0))),
        config=cast("dict[str, object]", _expanded(table["config"], table["config"].get("num_hidden_layers", 0))),
    )


def _expanded(value: object, layers: int) -> object:
    """Replace each ``{ repeat = [...] }`` in `value` with the list for all layers."""
    if not isinstance(value, dict):
        return value
    inner = cast("dict[str, object]", value)
    if set(inner) == {"repeat"}:
        return list(islice(cycle(cast("list[object]", inner["repeat"])), layers))
    return {key: _expanded(item, layers) for key, item in inner.items()}
