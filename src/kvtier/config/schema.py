"""Defines sections of typed settings, which check their values when constructed, and reads them from TOML files."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from kvtier.config.value_types import FormedText, Hidden, Kind
from kvtier.errors import ConfigError
from kvtier.keys.secret import redacted

FILE_BYTES_MAX = 1 << 20
LINE_DOTS_MAX = 256
"""Maximum dots in a line. The parser's time is quadratic in the number of parts of a dotted key."""

_Value = TypeVar("_Value")


class Setting(NamedTuple):
    """One setting, without its value."""

    section: str
    key: str
    kind: Kind
    default: object
    """The default value; None if a value is required (`is_needed`)."""
    help: str
    source: str
    """The publication from which the default comes, if any."""
    is_needed: bool = False
    """Whether the setting has no default."""

    @property
    def name(self) -> str:
        """The name, ``section.key``."""
        return f"{self.section}.{self.key}"


def setting(
    default: _Value,
    kind: Kind,
    help: str,  # noqa: A002 - click's word
    source: str = "",
    *,
    is_private: bool = False,
) -> _Value:
    """Declare a field of a `SettingsSection`. The section's `repr` omits it if `is_private`."""
    return field(default=default, repr=not is_private, metadata={"kind": kind, "help": help, "source": source})


def needed(kind: Kind, help: str) -> Any:  # noqa: A002, ANN401 - as `dataclasses.field`
    """Declare a field of a `SettingsSection` without a default."""
    return field(metadata={"kind": kind, "help": help, "source": ""})


def other_default(base: "type[SettingsSection]", key: str, default: _Value) -> _Value:
    """Declare the field `key` of `base` with another default, for a subclass."""
    (spec,) = (each for each in fields(cast("Any", base)) if each.name == key)
    return field(default=default, metadata=spec.metadata)


class SettingsSection:
    """A group of settings. Each value is checked when the section is constructed."""

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        for each in self.settings():
            value = getattr(self, each.key)
            if each.is_needed or value is not each.default:
                object.__setattr__(self, each.key, read(each, value, "Python", is_text=False))

    @property
    def label(self) -> str:
        """The section's name in settings and messages."""
        return self.section

    def settings(self) -> Iterator[Setting]:
        """Return the settings, in the order in which they are declared."""
        label = self.label
        return (each if label == each.section else each._replace(section=label) for each in settings(type(self)))


@cache
def settings(section: type[SettingsSection]) -> tuple[Setting, ...]:
    """Return the settings of `section` in the order of their declaration. Its other fields are left out."""
    found: list[Setting] = []
    for spec in fields(cast("Any", section)):
        meta = spec.metadata
        if "kind" in meta:
            is_needed = spec.default is MISSING
            default = None if is_needed else spec.default
            found.append(
                Setting(section.section, spec.name, meta["kind"], default, meta["help"], meta["source"], is_needed)
            )
    return tuple(found)


def read(setting: Setting, raw: object, origin: str, *, is_text: bool) -> object:
    """Return the value of `setting` for `raw`.

    Raises:
        ConfigError: `raw` is not allowed. The message gives `raw` (never a secret), its origin and the allowed values.
    """
    try:
        return setting.kind.read(raw, is_text=is_text)
    except (ValueError, OverflowError) as error:
        kind = setting.kind
        is_hidden = isinstance(kind, Hidden) or (isinstance(kind, FormedText) and kind.is_hidden)
        raise ConfigError(
            str(error),
            setting=setting.name,
            value="(hidden)" if is_hidden else short(raw),
            origin=origin,
            allowed=kind.allowed,
        ) from None


def unknown(problem: str, word: str, words: Sequence[str], **fields: str) -> ConfigError:
    """Return an error about an unknown word. It suggests the nearest words, and lists all words if they are few.

    Args:
        problem: the problem, such as ``unknown section``.
        word: the unknown word.
        words: the known words.
        fields: other fields of the error.
    """
    close = get_close_matches(word.lower(), words, n=3, cutoff=0.5)
    return ConfigError(
        f"{problem}; did you mean {' or '.join(close)}?" if close else problem,
        allowed="" if close and len(words) > 24 else ", ".join(words),
        **fields,
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Raises:
        ConfigError: the file is unreadable, longer than `FILE_BYTES_MAX`, not TOML, or nested too deeply.
    """
    about = {"setting": "TOML file", "value": str(path)}
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"longer than {FILE_BYTES_MAX} bytes", **about)
        if any(line.count(b".") > LINE_DOTS_MAX for line in content.splitlines()):
            raise ConfigError(f"more than {LINE_DOTS_MAX} dots in a line", **about)
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"{error.strerror}", **about, allowed="a readable TOML file") from error
    except RecursionError:
        raise ConfigError("is nested too deeply", **about, allowed="tables of plain values") from None
    except ValueError as error:  # a UnicodeDecodeError, or a TOMLDecodeError that names line and column
        raise ConfigError(f"is not valid TOML: {error}", **about) from error


def short(raw: object) -> str:
    """Return a value as a short text for messages, without likely secrets."""
    if type(raw) in {list, tuple, dict}:
        return f"({type(raw).__name__})"
    text = repr(redacted(raw)) if isinstance(raw, str) else redacted(repr(raw))
    return text if len(text) <= 80 else f"{text[:77]}..."
