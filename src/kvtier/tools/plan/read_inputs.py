"""Read the inputs of a plan. Later sources win: defaults, an example, a file, a probe's record, options, `--set`."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.schema import Setting, read, read_toml, unknown
from kvtier.config.tier_list import HOST, DescribedTier, SettingOrigin, describe
from kvtier.config.value_types import parse_size, shown_place, within
from kvtier.errors import ConfigError
from kvtier.tools.plan.hardware import fastest, read_links, split_count
from kvtier.tools.plan.inputs import SECTIONS, SETTINGS, Inputs
from kvtier.tools.size.sizes import WEIGHT_BYTES

EXAMPLES = files("kvtier.tools.plan") / "examples"
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
            *("shared.capacity_bytes", "shared.read_bytes_per_s", "shared.write_bytes_per_s"),
        ),
        "tier",
    ),
}
"""Name of the command-line option of each input that has one. `--gpu` and `--tier` set several inputs."""


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
        options: values of command-line options by ``section.key``; None means not given.
        sets: strings of the form ``section.key=value``.
        probe: record of `kvtier probe`. Its link speeds replace those of the catalogue.

    Raises:
        ConfigError: an unknown example, section or input, a value that is not allowed, or a file that is not TOML.

    If only the 95th percentile is given a limit, that limit replaces the default limit of the mean. If both limits are
    given, both apply.
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
    """Return the names of the examples that ship with the package."""
    return sorted(it.name.removesuffix(".toml") for it in EXAMPLES.iterdir() if it.name.endswith(".toml"))


def example_tables(name: str) -> dict[str, Any]:
    """Read the tables of one example.

    Raises:
        ConfigError: there is no example of that name.
    """
    if name not in example_names():
        raise unknown("unknown", name, example_names(), setting="example", value=repr(name))
    return tomllib.loads((EXAMPLES / f"{name}.toml").read_text(encoding="utf-8"))


def _from_tables(tables: Mapping[str, Any], origin: str) -> Iterator[_Value]:
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{section} (from {origin}): not a section; write its inputs below a line [{section}]")
        for key, raw in cast("dict[str, object]", table).items():
            yield _Value(_find(f"{section}.{key}", origin), raw, origin, is_text=False)


def _from_probe(path: Path) -> Iterator[_Value]:
    """Yield the measured speeds. Shares that correct a data sheet's speeds become 1, since they are not needed."""
    links = read_links(path, "--probe")
    drive = "disk" if "disk" in links else "directory"
    for rate, shares in (
        (("host.channel_bytes_per_s", fastest(links, "host", "copy")), {"host.channels": 1, "host.share": 1.0}),
        (
            ("gpu.link_bytes_per_s", fastest(links, "gpu", "to_gpu")),
            {"software.link_share": 1.0, "software.load_bytes_per_s": 0.0},  # measured with one GPU's stream
        ),
        (("disk.read_bytes_per_s", fastest(links, drive, "read")), {}),
        (("disk.write_bytes_per_s", fastest(links, drive, "write")), {}),
    ):
        if rate[1] is not None:
            for name, raw in (rate, *shares.items()):
                yield _Value(SETTINGS[name], raw, f"probe {path}", is_text=False)


def gpu_options(text: str) -> dict[str, object]:
    """Return the inputs that an option such as ``--gpu 8xh100-sxm`` sets; ``--gpu h100-sxm`` means one GPU.

    Raises:
        ConfigError: the number is not allowed.
    """
    count, name = split_count(text, "--gpu")
    return {"gpu.name": name, "gpu.count": count or 1}


def weight_options(text: str) -> dict[str, object]:
    """Return the inputs that an option such as ``--weights fp8`` sets.

    A size, such as ``141GB``, means as many parameters as fill it in bf16.
    """
    if text in WEIGHT_BYTES:
        return {"model.weights": "bf16" if text == "fp16" else text}
    try:
        found = within(parse_size(text), 1, 2**60)
    except ValueError:
        raise ConfigError(f"--weights {text!r}: neither a size nor one of {', '.join(WEIGHT_BYTES)}") from None
    return {"model.weights": "bf16", "model.parameters": found / WEIGHT_BYTES["bf16"]}


def tier_options(texts: Sequence[str]) -> dict[str, object]:
    """Return the inputs that all `--tier` options set together, as in ``host=1TiB``, ``disk=4x7.68TB``, ``s3=1000TB``.

    If there is any text, a tier that no text names gets no capacity. A size after a number of drives is the size of one
    drive. A tier of a remote kind becomes the plan's ``shared``, one of any other kind its ``disk``.

    Raises:
        ConfigError: a text is malformed, gives a second tier where a plan takes only one, or has a figure that
            a plan does not have.
    """
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        tier, source = describe(text, SettingOrigin("", "--tier")), f"--tier {shown_place(text)!r}"
        section = HOST if tier.kind == HOST else "shared" if tier.is_remote else "disk"
        if section in found:
            raise ConfigError(
                f"{source}: a plan takes only one {section} tier, and an earlier --tier already gives it; leave one of "
                "them out"
            )
        for key, figure in {"latency": "latency_s", "write": "write_bytes_per_s", "drives": "drives"}.items():
            is_planned = section == "disk" if key == "drives" else section != HOST and key == "write"
            if getattr(tier, figure) is not None and not is_planned:
                raise ConfigError(f"{source}: a plan does not use {key}= for {section}; leave out {key}=")
        found[section] = {HOST: _host, "disk": _drives, "shared": _shared}[section](tier, source)
    absent = {"host.capacity_bytes": 0, "disk.count": 0, "shared.capacity_bytes": 0}
    return {**absent, **{name: value for inputs in found.values() for name, value in inputs.items()}} if found else {}


def _drives(tier: DescribedTier, source: str) -> dict[str, object]:
    """Return the inputs of the drives that `tier` describes. None means that an input is not given.

    Rates in `tier` are for all drives; rates in the inputs are for one drive.
    """
    if None not in (tier.capacity_bytes, tier.drives):
        raise ConfigError(
            f"{source} gives a capacity and drives; give one of them, and the share of drives for KV as --set "
            "disk.filled"
        )
    number, part = split_count(tier.drives, "--tier") if tier.drives else (None, "")
    count = 0 if tier.capacity_bytes == 0 else number or 1
    read, write = tier.read_bytes_per_s, tier.write_bytes_per_s
    if not count and (read or write):
        raise ConfigError(f"{source} gives rates for no drives; give a capacity above 0, or leave out the rates")
    return {
        "disk.count": count,
        "disk.capacity_bytes": part if part[:1].isdigit() else tier.capacity_bytes or None,
        "disk.name": None if part[:1].isdigit() else part or None,
        "disk.read_bytes_per_s": read and count and read / count,
        "disk.write_bytes_per_s": write and count and write / count,
    }


def _host(tier: DescribedTier, _: str) -> dict[str, object]:
    """Return the inputs of host memory. None means that an input is not given.

    A given rate becomes that of a single channel, which KV uses completely.
    """
    one = None if tier.read_bytes_per_s is None else 1
    inputs = {"channel_bytes_per_s": tier.read_bytes_per_s, "channels": one, "share": one}
    return {"host.capacity_bytes": tier.capacity_bytes, **{f"host.{key}": value for key, value in inputs.items()}}


def _shared(tier: DescribedTier, _: str) -> dict[str, object]:
    """Return the inputs of shared storage, with rates of the whole store. None means that an input is not given."""
    keys = ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s")
    return {f"shared.{key}": getattr(tier, key) for key in keys}


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
        raise unknown("unknown section", section, list(SECTIONS), setting=section, origin=origin)
    known = [it.key for it in SETTINGS.values() if it.section == section]
    raise unknown("unknown input", key, known, setting=name, origin=origin)
