"""Inputs of a plan come in here. Later wins: defaults, an example, a file, a probe's record, options, `--set`."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.links import fastest, read_links
from kvtier.config.schema import Setting, read, read_toml
from kvtier.errors import ConfigError
from kvtier.plan.inputs import SECTIONS, SETTINGS, Inputs

EXAMPLES = files("kvtier.plan") / "examples"
STATED = "stated"
"""The table of an example file that is no input: what its source says, to be compared."""


class _Entry(NamedTuple):
    setting: Setting
    raw: object
    origin: str
    is_text: bool


def load(
    *,
    example: str = "",
    file: Path | None = None,
    options: Mapping[str, object] | None = None,
    sets: Iterable[str] = (),
    probe: Path | None = None,
) -> Inputs:
    """Read the inputs of a plan.

    Args:
        example: name of an example that ships with the package; empty means none.
        file: TOML file with a table for each section.
        options: values by ``section.key``, as the command line's options give them; None means not given.
        sets: ``section.key=value`` texts.
        probe: record of `kvtier probe`, for the speed of links instead of the catalogue's.

    Raises:
        ConfigError: an unknown example, section or input, a value that is not allowed, or a file that is no TOML.
    """
    entries = [
        *_from_tables(example_tables(example) if example else {}, f"example {example}"),
        *_from_tables(read_toml(file) if file else {}, f"file {file}"),
        *(_from_probe(probe) if probe else ()),
        *_from_options(options or {}),
        *_from_sets(sets),
    ]
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for setting, raw, origin, is_text in entries:
        values[setting.section][setting.key] = read(setting, raw, origin, is_text=is_text)
        origins[setting.name] = origin
    parts: dict[str, Any] = {section: kind(**values[section]) for section, kind in SECTIONS.items()}
    return Inputs(**parts, origins=origins)


def example_names() -> list[str]:
    """The examples that ship with the package."""
    return sorted(it.name.removesuffix(".toml") for it in EXAMPLES.iterdir() if it.name.endswith(".toml"))


def example_tables(name: str) -> dict[str, Any]:
    """The tables of one example.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in example_names():
        raise ConfigError(f"example {name!r}: unknown{near(name, example_names())}")
    return tomllib.loads((EXAMPLES / f"{name}.toml").read_text(encoding="utf-8"))


def near(word: str, words: list[str]) -> str:
    """The end of a message about an unknown word: the nearest that is known, and all of them where they are few."""
    close = get_close_matches(word.lower(), words, n=3, cutoff=0.5)
    told = f"; did you mean {' or '.join(close)}?" if close else ""
    return told if close and len(words) > 24 else f"{told or ';'} known here: {', '.join(words)}"


def _from_tables(tables: Mapping[str, Any], origin: str) -> Iterator[_Entry]:
    for section, table in tables.items():
        if section == STATED:
            continue
        if not isinstance(table, dict):
            raise ConfigError(f"{section} (from {origin}): not a section; write its inputs below a line [{section}]")
        for key, raw in cast("dict[str, object]", table).items():
            yield _Entry(_find(f"{section}.{key}", origin), raw, origin, is_text=False)


def _from_probe(path: Path) -> Iterator[_Entry]:
    """What was measured needs no share of what a data sheet promises."""
    links = read_links(path, "--probe")
    origin = f"probe {path}"

    def measured(name: str, value: float | None, **besides: float) -> Iterator[_Entry]:
        if value is not None:
            for key, raw in {name: value, **{it.replace("__", "."): number for it, number in besides.items()}}.items():
                yield _Entry(_find(key, origin), raw, origin, is_text=False)

    drive = "disk" if "disk" in links else "directory"
    yield from measured("host.channel_bytes_per_s", fastest(links, "host", "copy"), host__channels=1, host__share=1.0)
    yield from measured("gpu.link_bytes_per_s", fastest(links, "gpu", "to_gpu"), software__link_share=1.0)
    yield from measured("disk.read_bytes_per_s", fastest(links, drive, "read"))
    yield from measured("disk.write_bytes_per_s", fastest(links, drive, "write"))


def _from_options(options: Mapping[str, object]) -> Iterator[_Entry]:
    for name, raw in options.items():
        if raw is not None:
            setting = SETTINGS[name]
            yield _Entry(setting, raw, f"--{OPTIONS.get(name, setting.key)}", is_text=isinstance(raw, str))


def _from_sets(sets: Iterable[str]) -> Iterator[_Entry]:
    for text in sets:
        name, equals, raw = text.partition("=")
        if not equals or "." not in name:
            raise ConfigError(f"--set {text}: not section.key=value; known sections: {', '.join(SECTIONS)}")
        yield _Entry(_find(name.strip(), f"--set {name.strip()}"), raw.strip(), f"--set {name.strip()}", is_text=True)


def _find(name: str, origin: str) -> Setting:
    if name in SETTINGS:
        return SETTINGS[name]
    section, _, key = name.partition(".")
    if section not in SECTIONS:
        raise ConfigError(f"{section} (from {origin}): unknown section{near(section, list(SECTIONS))}")
    known = [it.key for it in SETTINGS.values() if it.section == section]
    raise ConfigError(f"{name} (from {origin}): unknown input{near(key, known)}")


OPTIONS = {
    "model.name": "model",
    "model.kv_dtype": "dtype",
    "model.weights": "weights",
    "model.tp": "tp",
    "gpu.name": "gpu",
    "gpu.count": "gpus",
    "traffic.users": "users",
    "traffic.turns": "turns",
    "traffic.interval_s": "interval",
    "traffic.prefix_tokens": "system",
    "traffic.history_tokens": "history",
    "traffic.question_tokens": "question",
    "traffic.answer_tokens": "answer",
    "traffic.reuse": "reuse",
    "traffic.trace": "trace",
    "target.ttft_s": "ttft",
    "host.capacity_bytes": "host",
    "disk.name": "drive",
    "disk.count": "drives",
}
"""Inputs that have an option of their own on the command line."""
