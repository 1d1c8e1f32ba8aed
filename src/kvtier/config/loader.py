"""Loads the settings from defaults, a TOML file, the environment and flags; the last one wins. Values have origins."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.schema import read, read_toml, settings
from kvtier.config.sections import SECTIONS, Config, find, find_section
from kvtier.config.tier_list import HOST, SettingOrigin, TierList
from kvtier.errors import ConfigError
from kvtier.keys.secret import redacted

PREFIX = "KVTIER_"
TIERS = "tiers"
TIERS_VARIABLE = "KVTIER_TIERS"
FILE_VARIABLE = "KVTIER_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The settings and their origins, by ``section.key`` or ``tiers.NAME.key``; ``tiers`` is the list itself."""

    config: Config
    origins: Mapping[str, SettingOrigin]
    file: Path | None = None
    """The file that was read."""


class _RawSetting(NamedTuple):
    section: str
    key: str
    raw: object
    origin: SettingOrigin
    is_text: bool


def load(
    file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Iterable[str] = (),
    tiers: Sequence[str] = (),
) -> Loaded:
    """Load all settings.

    Args:
        file: a TOML file with a table for each section and a list of tiers; None means the file in ``KVTIER_CONFIG``,
            if any.
        environ: environment with variables ``KVTIER_SECTION__KEY``, ``KVTIER_TIERS`` (tiers as texts, separated by
            white space) and ``KVTIER_TIERS__NAME__KEY``.
        flags: texts of the form ``section.key=value`` or ``tiers.NAME.key=value``; later ones win.
        tiers: tiers as texts; if there are any, they replace the list of the file and the environment.

    Raises:
        ConfigError: the file is missing or not TOML, a setting is unknown, or a value is not allowed.
    """
    origins = {setting.name: SettingOrigin("default") for kind in SECTIONS.values() for setting in settings(kind)}
    named = file or environ.get(FILE_VARIABLE)
    path = Path(named) if named else None
    listed = TierList()
    values, given = _read(chain(_from_file(path), _from_environment(environ), _from_flags(flags, tiers)), listed)
    origins |= given
    try:
        parts: dict[str, Any] = {section: kind(**values.get(section, {})) for section, kind in SECTIONS.items()}
        config = Config(**parts, tiers=listed.settings())
        origins |= dict(listed.origins())
    except ConfigError as error:  # single values are valid, but not their combination
        origins |= listed.given()
        sources = "; ".join(
            f"{name} is from {origin}"
            for name, origin in origins.items()
            if name in {word.strip(".,:;") for word in str(error).split()}
        )
        raise ConfigError(f"{error} ({sources})" if sources else str(error)) from None
    return Loaded(config=config, origins=origins, file=path)


def override(base: Config, given: Iterable[tuple[str, object]], origin: str) -> Config:
    """`base` with single values from Python or JSON.

    Args:
        base: the settings.
        given: name (``section.key``, ``tiers.NAME.key``, or ``tiers`` for the whole list) and typed value.
        origin: the source of the values, for messages.

    Raises:
        ConfigError: a setting is unknown, its value is not allowed, or it is given twice.
    """
    raws: list[_RawSetting] = []
    for name, raw in sorted(given, key=lambda item: item[0] != TIERS):  # the list first
        section, _, key = name.partition(".")
        if any((section, key) == (it.section, it.key) for it in raws):
            raise ConfigError(f"{name} (from {origin}): given twice; allowed: one of the two forms")
        raws.append(_RawSetting(section, key, raw, SettingOrigin("", origin), is_text=False))
    listed = TierList(base.tiers)
    values, _ = _read(raws, listed)
    parts: dict[str, Any] = {section: replace(getattr(base, section), **each) for section, each in values.items()}
    return replace(base, **parts, tiers=listed.settings())


def _read(raws: Iterable[_RawSetting], listed: TierList) -> tuple[dict[str, dict[str, Any]], dict[str, SettingOrigin]]:
    """The values by section and key, and their origins by name. Those of tiers go to `listed`."""
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, SettingOrigin] = {}
    for section, key, raw, origin, is_text in raws:
        if section == TIERS and key:
            name, _, of_tier = key.partition(".")
            listed.set(name, of_tier, raw, origin, is_text=is_text)
        elif section == TIERS:
            host_bytes = listed.replace(raw, origin)
            if host_bytes is not None:
                setting = find(SECTIONS[HOST], "capacity_bytes", str(origin))
                values.setdefault(HOST, {})[setting.key] = read(setting, host_bytes, str(origin), is_text=False)
                origins[setting.name] = origin
        else:
            setting = find(find_section(section, str(origin)), key, str(origin))
            values.setdefault(section, {})[key] = read(setting, raw, str(origin), is_text=is_text)
            origins[setting.name] = origin
    return values, origins


def flat(given: Mapping[str, object], origin: str) -> Iterator[tuple[str, object]]:
    """Single values for `override`, from JSON by section (``{"host": {"evictor": "lru"}}``) or flat.

    Raises:
        ConfigError: a section is unknown, or no object.
    """
    for name, value in given.items():
        if "." in name or name == TIERS:
            yield name, value
            continue
        find_section(name, origin)
        if not isinstance(value, Mapping):
            what = f"is a {type(value).__name__}"
            raise ConfigError(f"{name} (from {origin}) {what}; allowed: a section of settings, such as {{...}}")
        for inner, raw in cast("Mapping[str, object]", value).items():
            yield f"{name}.{inner}", raw


def _from_file(path: Path | None) -> Iterator[_RawSetting]:
    if path is None:
        return
    origin = SettingOrigin("file", str(path))
    tables = read_toml(path)
    if TIERS in tables:
        yield _RawSetting(TIERS, "", tables.pop(TIERS), origin, is_text=False)
    for section, table in tables.items():
        find_section(section, str(origin))
        if not isinstance(table, dict):
            raise ConfigError(f"{section} (from {origin}): not a section; allowed: settings below a line [{section}]")
        for key, raw in cast("dict[str, object]", table).items():
            yield _RawSetting(section, key, raw, origin, is_text=False)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_RawSetting]:
    # Names without a double underscore may belong to other programs: Kubernetes sets KVTIER_PORT for a service named
    # kvtier. But a setting's name with a single underscore is a typing error that must not be ignored.
    slips = {
        f"{PREFIX}{section}_{s.key}".upper(): f"{PREFIX}{section}__{s.key}".upper()
        for section, kind in SECTIONS.items()
        for s in settings(kind)
    }
    slips[f"{PREFIX}TIER"] = TIERS_VARIABLE
    if TIERS_VARIABLE in environ:
        origin = SettingOrigin("environment", TIERS_VARIABLE)
        yield _RawSetting(TIERS, "", environ[TIERS_VARIABLE].split(), origin, is_text=True)
    for name, raw in sorted(environ.items()):
        if name in slips:
            raise ConfigError(f"environment {name}: unknown setting; did you mean {slips[name]}?")
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX) or not separator:
            continue
        origin = SettingOrigin("environment", name)
        if section == TIERS:
            tier, separator, key = key.partition("__")
            if not separator:
                raise ConfigError(f"environment {name}: allowed: {TIERS_VARIABLE}__NAME__KEY, such as capacity_bytes")
            key = f"{tier}.{key}"
        yield _RawSetting(section, key, raw, origin, is_text=True)


def _from_flags(flags: Iterable[str], tiers: Sequence[str]) -> Iterator[_RawSetting]:
    if tiers:
        yield _RawSetting(TIERS, "", list(tiers), SettingOrigin("flag", "--tier"), is_text=True)
    for flag in flags:
        name, equals, raw = flag.partition("=")
        section, dot, key = name.strip().partition(".")
        is_name = bool(equals) and redacted(name) == name  # else it may hold a secret, such as one that ends in "="
        if not is_name or not dot or (section == TIERS and not key.partition(".")[2]):
            hidden = f"{section}.(hidden)" if section in SECTIONS else "(hidden)"
            shown = name if is_name else hidden
            raise ConfigError(
                f"flag --set {shown[:80]}: not section.key=value or tiers.NAME.key=value; allowed sections: "
                f"{', '.join(SECTIONS)}"
            )
        yield _RawSetting(section, key, raw, SettingOrigin("flag", f"--set {name.strip()}"), is_text=True)
