"""Inputs of a plan. Later wins: defaults, an example, a file, a probe's record, options, `--set`."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.schema import Setting, near, read, read_toml
from kvtier.errors import ConfigError
from kvtier.plan.hardware import split_count
from kvtier.plan.inputs import SECTIONS, SETTINGS, Inputs
from kvtier.plan.probe_record import fastest, read_links
from kvtier.tier import registry

EXAMPLES = files("kvtier.plan") / "examples"
OPTIONS = {
    "model.name": "model",
    "model.kv_dtype": "dtype",
    "model.weights": "weights",
    "model.tp": "tp",
    "gpu.name": "gpu",
    "gpu.count": "gpu",
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
    "host.capacity_bytes": "tier",
    "disk.name": "tier",
    "disk.count": "tier",
    "disk.capacity_bytes": "tier",
    "shared.capacity_bytes": "tier",
}
"""Inputs with an option on the command line, and its name; `--gpu` and `--tier` give several."""


class _Value(NamedTuple):
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
        ConfigError: an unknown example, section or input, a value that is not allowed, or a file that is not TOML.
    """
    given = [
        *_from_tables(example_tables(example) if example else {}, f"example {example}"),
        *_from_tables(read_toml(file) if file else {}, f"file {file}"),
        *(_from_probe(probe) if probe else ()),
        *_from_options(options or {}),
        *_from_sets(sets),
    ]
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting, raw, origin, is_text in given:
        values[setting.section][setting.key] = read(setting, raw, origin, is_text=is_text)
    parts: dict[str, Any] = {section: kind(**values[section]) for section, kind in SECTIONS.items()}
    return Inputs(**parts, origins={value.setting.name: value.origin for value in given})


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


def _from_tables(tables: Mapping[str, Any], origin: str) -> Iterator[_Value]:
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{section} (from {origin}): not a section; write its inputs below a line [{section}]")
        for key, raw in cast("dict[str, object]", table).items():
            yield _Value(_find(f"{section}.{key}", origin), raw, origin, is_text=False)


def _from_probe(path: Path) -> Iterator[_Value]:
    """Measured speeds. A share of the data sheet does not apply to them, so it becomes 1."""
    links = read_links(path, "--probe")
    drive = "disk" if "disk" in links else "directory"
    for rate, shares in (
        (("host.channel_bytes_per_s", fastest(links, "host", "copy")), {"host.channels": 1, "host.share": 1.0}),
        (
            ("gpu.link_bytes_per_s", fastest(links, "gpu", "to_gpu")),
            {"software.link_share": 1.0, "software.load_bytes_per_s": 0.0},  # the measured stream of one GPU
        ),
        (("disk.read_bytes_per_s", fastest(links, drive, "read")), {}),
        (("disk.write_bytes_per_s", fastest(links, drive, "write")), {}),
    ):
        if rate[1] is not None:
            for name, raw in (rate, *shares.items()):
                yield _Value(SETTINGS[name], raw, f"probe {path}", is_text=False)


def gpu_options(text: str) -> dict[str, object]:
    """Inputs of ``--gpu 8xh100-sxm``, or of ``--gpu h100-sxm``, which is one.

    Raises:
        ConfigError: the number is not allowed.
    """
    count, name = split_count(text, "--gpu")
    return {"gpu.name": name, "gpu.count": count or 1}


def tier_options(texts: Sequence[str]) -> dict[str, object]:
    """Inputs of all `--tier` options together: ``host=1TiB``, ``disk=4xpm1753``, ``disk=4x7.68TB``, ``shared=1000TB``.

    Tiers that no text names have no capacity. A size of drives is that of one drive. The name of a kind stands for
    ``shared`` if the kind is remote, and otherwise for ``disk``.

    Raises:
        ConfigError: a text is malformed, or names a tier twice or one that a plan does not have.
    """
    found: dict[str, object] = {}
    for text in texts:
        tier, equals, what = (it.strip() for it in text.partition("="))
        if tier in registry.names():
            tier = "shared" if registry.by_name(tier, f"--tier {text!r}").is_remote else "disk"
        capacity = {"host": "host.capacity_bytes", "shared": "shared.capacity_bytes", "disk": "disk.count"}.get(tier)
        if capacity is None or not equals or not what:
            raise ConfigError(
                f"--tier {text!r}; allowed: host=1TiB, disk=4xpm1753, disk=4x7.68TB, shared=1000TB, s3=1000TB"
            )
        if capacity in found:
            raise ConfigError(f"--tier {text!r}: {tier} is given twice; allowed: once")
        if tier != "disk":
            found[capacity] = what
            continue
        count, name = (0, "") if what == "0" else split_count(what, "--tier")
        found["disk.count"] = 1 if count is None else count
        if name:
            found["disk.capacity_bytes" if name[0].isdigit() else "disk.name"] = name
    absent = {"host.capacity_bytes": 0, "disk.count": 0, "shared.capacity_bytes": 0}
    return {**absent, **found} if found else {}


def _from_options(options: Mapping[str, object]) -> Iterator[_Value]:
    for name, raw in options.items():
        if raw is not None:
            setting = SETTINGS[name]
            yield _Value(setting, raw, f"--{OPTIONS.get(name, setting.key)}", is_text=isinstance(raw, str))


def _from_sets(sets: Iterable[str]) -> Iterator[_Value]:
    for text in sets:
        name, equals, raw = text.partition("=")
        if not equals or "." not in name:
            raise ConfigError(f"--set {text}: not section.key=value; known sections: {', '.join(SECTIONS)}")
        origin = f"--set {name.strip()}"
        yield _Value(_find(name.strip(), origin), raw.strip(), origin, is_text=True)


def _find(name: str, origin: str) -> Setting:
    if name in SETTINGS:
        return SETTINGS[name]
    section, _, key = name.partition(".")
    if section not in SECTIONS:
        raise ConfigError(f"{section} (from {origin}): unknown section{near(section, list(SECTIONS))}")
    known = [it.key for it in SETTINGS.values() if it.section == section]
    raise ConfigError(f"{name} (from {origin}): unknown input{near(key, known)}")
