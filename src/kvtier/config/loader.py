"""Loads settings and their origins from defaults, a TOML file, the environment and flags. The last one wins."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from kvtier.config.schema import read, read_toml, settings
from kvtier.config.sections import SECTIONS, Config, find, find_section
from kvtier.config.tier_list import HOST, SettingOrigin, TierList
from kvtier.config.value_types import Location
from kvtier.errors import ConfigError
from kvtier.keys.secret import redacted

PREFIX = "KVTIER_"
TIERS = "tiers"
TIERS_VARIABLE = "KVTIER_TIERS"
FILE_VARIABLE = "KVTIER_CONFIG"
AND = " and "
"""Separates the origins of settings that contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The settings, and their origins by ``section.key`` or ``tiers.NAME.key``; ``tiers`` is that of the list."""

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
    tiers: Sequence[str | Mapping[str, object]] = (),
) -> Loaded:
    """Load all settings.

    Args:
        file: a TOML file with a table for each section and a list of tiers; None means the file in ``KVTIER_CONFIG``,
            if any.
        environ: environment with variables ``KVTIER_SECTION__KEY``, ``KVTIER_TIERS`` (tiers as strings, separated by
            white space) and ``KVTIER_TIERS__NAME__KEY``.
        flags: strings of the form ``section.key=value`` or ``tiers.NAME.key=value``; later ones win.
        tiers: tiers as strings or tables; if there are any, they replace the list of the file and the environment.

    Raises:
        ConfigError: the file is missing or not TOML, a setting is unknown, or a value is not allowed.
    """
    origins = {setting.name: SettingOrigin("default") for kind in SECTIONS.values() for setting in settings(kind)}
    named = file or environ.get(FILE_VARIABLE)
    try:
        path = Location().read(named, is_text=True)
    except ValueError as error:
        raise ConfigError(
            str(error), setting=FILE_VARIABLE, value=repr(str(named)), allowed="the path of a TOML file"
        ) from None
    listed = TierList()
    values, given = _read(chain(_from_file(path), _from_environment(environ), _from_flags(flags, tiers)), listed)
    origins |= given
    try:
        parts: dict[str, Any] = {section: kind(**values.get(section, {})) for section, kind in SECTIONS.items()}
        config = Config(**parts, tiers=listed.settings())
        origins |= dict(listed.origins())
    except ConfigError as error:  # single values are valid, but not their combination
        found = map((origins | listed.given()).get, error.setting.split(", "))
        error.origin = error.origin or AND.join(map(str, filter(None, found)))
        raise
    return Loaded(config=config, origins=origins, file=path)


def override(base: Config, given: Iterable[tuple[str, object]], origin: str) -> Config:
    """Return `base` with some values overridden from Python or JSON.

    Args:
        base: the settings.
        given: pairs of a name (``section.key``, ``tiers.NAME.key``, or ``tiers`` for the whole list) and a typed value.
        origin: the source of the values, for messages.

    Raises:
        ConfigError: a setting is unknown, its value is not allowed, or it is given twice.
    """
    raws: list[_RawSetting] = []
    for name, raw in sorted(given, key=lambda item: item[0] != TIERS):  # the list comes first
        section, _, key = name.partition(".")
        if any((section, key) == (it.section, it.key) for it in raws):
            raise ConfigError("is given in two forms", setting=name, origin=origin, allowed="one of them")
        raws.append(_RawSetting(section, key, raw, SettingOrigin("", origin), is_text=False))
    listed = TierList(base.tiers)
    values, _ = _read(raws, listed)
    parts: dict[str, Any] = {section: replace(getattr(base, section), **each) for section, each in values.items()}
    return replace(base, **parts, tiers=listed.settings())


def overridden(loaded: Loaded, given: Iterable[tuple[str, object]], origin: SettingOrigin) -> Loaded:
    """Return `loaded` with values overridden as by `override`, and with their origin.

    Raises:
        ConfigError: a setting is unknown, its value is not allowed, or it is given twice.
    """
    values = list(given)
    try:
        config = override(loaded.config, values, origin.where)
    except ConfigError as error:  # valid values, but not their combination
        error.origin = error.origin or origin.where
        raise
    names = [name for name, _ in values if name != TIERS]
    if len(names) < len(values):
        names += [each.name for tier in config.tiers for each in tier.settings()]
    if config.host.capacity_bytes != loaded.config.host.capacity_bytes:  # a string in the list may set it
        names.append(f"{HOST}.capacity_bytes")
    return Loaded(config=config, origins={**loaded.origins, **dict.fromkeys(names, origin)}, file=loaded.file)


def _read(raws: Iterable[_RawSetting], listed: TierList) -> tuple[dict[str, dict[str, Any]], dict[str, SettingOrigin]]:
    """Return the values by section and key, and their origins by name. Values of tiers go to `listed` instead."""
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
    """Yield single values for `override` from JSON, nested by section (``{"host": {"evictor": "lru"}}``) or flat.

    Raises:
        ConfigError: a section is unknown, or not an object.
    """
    for name, value in given.items():
        if "." in name or name == TIERS:
            yield name, value
            continue
        find_section(name, origin)
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"has the type {type(value).__name__}",
                setting=name,
                origin=origin,
                allowed="a section of settings, such as {...}",
            )
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
            raise ConfigError(
                "is not a section", setting=section, origin=origin, allowed=f"settings below a line [{section}]"
            )
        for key, raw in cast("dict[str, object]", table).items():
            yield _RawSetting(section, key, raw, origin, is_text=False)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_RawSetting]:
    # Names without a double underscore may belong to other programs: Kubernetes sets KVTIER_PORT for a service named
    # kvtier. But a setting's name with a single underscore is a typo that must not be ignored.
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
            raise ConfigError(f"unknown setting; did you mean {slips[name]}?", setting=name, origin="environment")
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX) or not separator:
            continue
        origin = SettingOrigin("environment", name)
        if section == TIERS:
            tier, separator, key = key.partition("__")
            if not separator:
                raise ConfigError(
                    "names no setting of a tier",
                    setting=name,
                    origin="environment",
                    allowed=f"{TIERS_VARIABLE}__NAME__KEY, such as capacity_bytes",
                )
            key = f"{tier}.{key}"
        yield _RawSetting(section, key, raw, origin, is_text=True)


def _from_flags(flags: Iterable[str], tiers: Sequence[object]) -> Iterator[_RawSetting]:
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
                "does not name a setting and its value",
                setting="--set",
                value=shown[:80],
                allowed=f"section.key=value or tiers.NAME.key=value; the sections are {', '.join(SECTIONS)}",
            )
        yield _RawSetting(section, key, raw, SettingOrigin("flag", f"--set {name.strip()}"), is_text=True)
