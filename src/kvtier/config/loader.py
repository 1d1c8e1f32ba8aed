"""Loads the settings from defaults, a TOML file, the environment and flags; the last one wins. Values have origins."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from kvtier.config.schema import Setting, read, read_toml, settings
from kvtier.config.sections import SECTIONS, Config, find, find_section
from kvtier.errors import ConfigError

PREFIX = "KVTIER_"
FILE_VARIABLE = "KVTIER_CONFIG"


class Origin(NamedTuple):
    """The source of a value."""

    layer: Literal["default", "file", "environment", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.where}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The settings and their origins, by ``section.key``."""

    config: Config
    origins: Mapping[str, Origin]
    file: Path | None = None
    """The file that was read."""


class _RawSetting(NamedTuple):
    setting: Setting
    raw: object
    origin: Origin
    is_text: bool


def load(file: str | Path | None = None, environ: Mapping[str, str] = os.environ, flags: Iterable[str] = ()) -> Loaded:
    """Load all settings.

    Args:
        file: a TOML file with a table for each section; None means the file in ``KVTIER_CONFIG``, if any.
        environ: environment with ``KVTIER_SECTION__KEY`` variables.
        flags: texts of the form ``section.key=value``; later ones win.

    Raises:
        ConfigError: the file is missing or not TOML, a setting is unknown, or a value is not allowed.
    """
    origins = {setting.name: Origin("default") for kind in SECTIONS.values() for setting in settings(kind)}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    named = file or environ.get(FILE_VARIABLE)
    path = Path(named) if named else None
    for setting, raw, origin, is_text in chain(_from_file(path), _from_environment(environ), _from_flags(flags)):
        values[setting.section][setting.key] = read(setting, raw, str(origin), is_text=is_text)
        origins[setting.name] = origin
    try:
        parts: dict[str, Any] = {section: kind(**values[section]) for section, kind in SECTIONS.items()}
    except ConfigError as error:  # single values are valid, but not their combination
        sources = "; ".join(
            f"{name} is from {origin}" for name, origin in origins.items() if name in str(error).split()
        )
        raise ConfigError(f"{error} ({sources})") from None
    return Loaded(config=Config(**parts), origins=origins, file=path)


def _from_file(path: Path | None) -> Iterator[_RawSetting]:
    if path is None:
        return
    origin = Origin("file", str(path))
    for section, table in read_toml(path).items():
        known = find_section(section, str(origin))
        if not isinstance(table, dict):
            raise ConfigError(f"{section} (from {origin}): not a section; allowed: settings below a line [{section}]")
        for key, raw in cast("dict[str, object]", table).items():
            yield _RawSetting(find(known, key, str(origin)), raw, origin, is_text=False)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_RawSetting]:
    # Names without a double underscore may belong to other programs: Kubernetes sets KVTIER_PORT for a service named
    # kvtier. But a setting's name with a single underscore is a typing error that must not be ignored.
    slips = {f"{PREFIX}{section}_{s.key}".upper(): s for section, kind in SECTIONS.items() for s in settings(kind)}
    for name, raw in sorted(environ.items()):
        if name in slips:
            right = f"{PREFIX}{slips[name].section}__{slips[name].key}".upper()
            raise ConfigError(f"environment {name}: unknown setting; did you mean {right}?")
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if name.startswith(PREFIX) and separator:
            origin = Origin("environment", name)
            yield _RawSetting(find(find_section(section, str(origin)), key, str(origin)), raw, origin, is_text=True)


def _from_flags(flags: Iterable[str]) -> Iterator[_RawSetting]:
    for flag in flags:
        name, equals, raw = flag.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"flag --set {name}: not section.key=value; allowed sections: {', '.join(SECTIONS)}")
        origin = Origin("flag", f"--set {name.strip()}")
        yield _RawSetting(find(find_section(section, str(origin)), key, str(origin)), raw, origin, is_text=True)
