"""Inputs of a plan. Later wins: defaults, an example, a file, a probe's record, options, `--set`."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.schema import Setting, near, read, read_toml
from kvtier.config.tier_list import HOST, DescribedTier, SettingOrigin, describe
from kvtier.config.value_types import parse_size, shown_place, within
from kvtier.errors import ConfigError
from kvtier.plan.hardware import split_count
from kvtier.plan.inputs import SECTIONS, SETTINGS, Inputs
from kvtier.plan.probe_record import fastest, read_links
from kvtier.size.capacity import WEIGHT_BYTES

EXAMPLES = files("kvtier.plan") / "examples"
OPTIONS = {
    "model.name": "model",
    "model.ignore": "ignore",
    "model.kv_dtype": "dtype",
    "model.weights": "weights",
    "model.parameters": "weights",
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
    "traffic.trace_time_unit": "time-unit",
    "target.ttft_s": "ttft",
    "target.ttft_p95_s": "target-p95",
    **dict.fromkeys(
        (
            *("host.capacity_bytes", "host.channels", "host.channel_bytes_per_s", "host.share"),
            *("disk.name", "disk.count", "disk.capacity_bytes", "disk.read_bytes_per_s", "disk.write_bytes_per_s"),
            *("shared.capacity_bytes", "shared.adapters", "shared.adapter_bytes_per_s"),
        ),
        "tier",
    ),
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

    A limit of the 95th percentile alone replaces the default limit of the mean; where both are given, both hold.
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
    origins = {value.setting.name: value.origin for value in given}
    if "ttft_p95_s" in values["target"] and "ttft_s" not in values["target"]:
        values["target"]["ttft_s"], origins["target.ttft_s"] = 0.0, origins["target.ttft_p95_s"]
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


def weight_options(text: str) -> dict[str, object]:
    """Inputs of ``--weights fp8``, or of their bytes: ``141GB`` are the parameters that fill them in bf16."""
    if text in WEIGHT_BYTES:
        return {"model.weights": "bf16" if text == "fp16" else text}
    try:
        found = within(parse_size(text), 1, 2**60)
    except ValueError:
        raise ConfigError(f"--weights {text!r}: neither a size nor one of {', '.join(WEIGHT_BYTES)}") from None
    return {"model.weights": "bf16", "model.parameters": found / WEIGHT_BYTES["bf16"]}


def tier_options(texts: Sequence[str]) -> dict[str, object]:
    """Inputs of all `--tier` options together: ``host=1TiB``, ``disk=4xpm1753``, ``disk=4x7.68TB``, ``s3=1000TB``.

    Tiers that no text names have no capacity. A size of drives is that of one drive. A remote kind is the plan's
    ``shared``, any other its ``disk``.

    Raises:
        ConfigError: a text is malformed, names a tier twice, or has a figure that a plan does not have.
    """
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        tier, source = describe(text, SettingOrigin("", "--tier")), f"--tier {shown_place(text)!r}"
        section = HOST if tier.kind == HOST else "shared" if tier.is_remote else "disk"
        if section in found:
            raise ConfigError(f"{source}: {section} is given twice; allowed: once")
        for figure in ("latency_s",) if section == "disk" else ("latency_s", "write_bytes_per_s", "drives"):
            if getattr(tier, figure) is not None:
                raise ConfigError(f"{source}: a plan has no {figure} of {section}; allowed: without it")
        found[section] = _drives(tier, source) if section == "disk" else _link(section, tier)
    absent = {"host.capacity_bytes": 0, "disk.count": 0, "shared.capacity_bytes": 0}
    return {**absent, **{name: value for inputs in found.values() for name, value in inputs.items()}} if found else {}


def _drives(tier: DescribedTier, source: str) -> dict[str, object]:
    """Inputs of drives; None: not given. Rates of a text are of all drives, those of inputs of one."""
    if None not in (tier.capacity_bytes, tier.drives):
        raise ConfigError(f"{source}: a capacity and drives; allowed: one of them, and --set disk.filled")
    number, part = split_count(tier.drives, "--tier") if tier.drives else (None, "")
    count = 0 if tier.capacity_bytes == 0 else number or 1
    read, write = tier.read_bytes_per_s, tier.write_bytes_per_s
    if not count and (read or write):
        raise ConfigError(f"{source}: rates of no drives; allowed: a capacity, or no rates")
    return {
        "disk.count": count,
        "disk.capacity_bytes": part if part[:1].isdigit() else tier.capacity_bytes or None,
        "disk.name": None if part[:1].isdigit() else part or None,
        "disk.read_bytes_per_s": read and count and read / count,
        "disk.write_bytes_per_s": write and count and write / count,
    }


def _link(section: str, tier: DescribedTier) -> dict[str, object]:
    """Inputs of host memory or of shared storage; None: not given. A rate is that of one link with its full share."""
    one = None if tier.read_bytes_per_s is None else 1
    link, number, more = {
        HOST: ("channel_bytes_per_s", "channels", {"share": one}),
        "shared": ("adapter_bytes_per_s", "adapters", {}),
    }[section]
    inputs = {"capacity_bytes": tier.capacity_bytes, link: tier.read_bytes_per_s, number: one, **more}
    return {f"{section}.{key}": value for key, value in inputs.items()}


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
