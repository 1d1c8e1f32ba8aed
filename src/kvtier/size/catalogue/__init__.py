"""Models that are known by name: plain data beside this file, in the words of each model's config.json."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from typing import Any, cast

COPIES = "copies.toml"

_SUFFIXES = ("-instruct", "-chat", "-it", "-hf", "-base", "-bf16", "-fp8")


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue."""

    name: str
    repository: str
    """Whose config.json it is: organisation/name."""
    via: str
    """Where the copy was read."""
    date: str
    """When it was read, YYYY-MM-DD."""
    aliases: tuple[str, ...]
    parameters_billion: float | None
    active_billion: float | None
    config: Mapping[str, object]


@cache
def entries() -> Mapping[str, Entry]:
    """Every model, by name, in alphabetical order."""
    folder = files(__name__)
    copies = tomllib.loads(folder.joinpath(COPIES).read_text(encoding="utf-8"))
    found: dict[str, Entry] = {}
    for file in folder.iterdir():
        if not file.name.endswith(".toml") or file.name == COPIES:
            continue
        for name, told in tomllib.loads(file.read_text(encoding="utf-8")).items():
            found[name] = _entry(name, told, copies[told["via"]])
    return dict(sorted(found.items()))


def find(name: str) -> Entry | None:
    """The model that `name` means: its name, an alias, or its repository; case and ``-instruct`` do not matter."""
    return _by_any_name().get(_plain(name))


def all_names() -> list[str]:
    """Names and aliases, for guessing what was meant."""
    return sorted(_by_any_name())


@cache
def _by_any_name() -> Mapping[str, Entry]:
    named: dict[str, Entry] = {}
    for entry in entries().values():
        for name in (entry.name, entry.repository, *entry.aliases):
            named.setdefault(_plain(name), entry)
    return named


def _plain(name: str) -> str:
    plain = name.strip().lower().rpartition("/")[2]
    for suffix in _SUFFIXES:
        plain = plain.removesuffix(suffix)
    return plain


def _entry(name: str, told: dict[str, Any], copy: dict[str, Any]) -> Entry:
    layers = told["config"].get("num_hidden_layers", 0)
    return Entry(
        name=name,
        repository=told["repository"],
        via=copy["text"],
        date=str(copy["read"]),
        aliases=tuple(told.get("aliases", ())),
        parameters_billion=told.get("parameters_billion"),
        active_billion=told.get("active_billion"),
        config=cast("dict[str, object]", _expanded(told["config"], layers)),
    )


def _expanded(value: object, layers: int) -> object:
    """`value` with every ``{ repeat = [...] }`` as the list it stands for."""
    if not isinstance(value, dict):
        return value
    inner = cast("dict[str, object]", value)
    if set(inner) == {"repeat"}:
        return list(islice(cycle(cast("list[object]", inner["repeat"])), layers))
    return {key: _expanded(item, layers) for key, item in inner.items()}
