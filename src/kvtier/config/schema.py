"""Sections of typed settings, which check their values when constructed, and TOML files of such sections."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from kvtier.config.value_types import FormedText, Hidden, Kind
from kvtier.errors import ConfigError
from kvtier.keys.secret import redacted

FILE_BYTES_MAX = 1 << 20
LINE_DOTS_MAX = 256
"""The parser's time grows with the square of the parts of a dotted key."""

_Value = TypeVar("_Value")


class Setting(NamedTuple):
    """One setting, without its value."""

    section: str
    key: str
    kind: Kind
    default: object
    """None where a value is needed (`is_needed`)."""
    help: str
    source: str
    """Publication that the default comes from, if any."""
    is_needed: bool = False
    """There is no default."""

    @property
    def name(self) -> str:
        """``section.key``."""
        return f"{self.section}.{self.key}"


def setting(
    default: _Value,
    kind: Kind,
    help: str,  # noqa: A002 - the word that click uses
    source: str = "",
    *,
    is_private: bool = False,
) -> _Value:
    """A field of a `SettingsSection`; the section's `repr` leaves out what `is_private`."""
    return field(default=default, repr=not is_private, metadata={"kind": kind, "help": help, "source": source})


def needed(kind: Kind, help: str) -> Any:  # noqa: A002, ANN401 - as `dataclasses.field`
    """A field of a `SettingsSection` without a default."""
    return field(metadata={"kind": kind, "help": help, "source": ""})


def other_default(base: "type[SettingsSection]", key: str, default: _Value) -> _Value:
    """The field `key` of `base` with another default, for a subclass."""
    (spec,) = (each for each in fields(cast("Any", base)) if each.name == key)
    return field(default=default, metadata=spec.metadata)


class SettingsSection:
    """A group of settings. Each value is checked when the section is made."""

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
        """The settings, in the order they are written."""
        return (each._replace(section=self.label) for each in settings(type(self)))


def settings(section: type[SettingsSection]) -> Iterator[Setting]:
    """The settings of `section`, in the order they are written. Other fields are left out."""
    for spec in fields(cast("Any", section)):
        meta = spec.metadata
        if "kind" in meta:
            is_needed = spec.default is MISSING
            default = None if is_needed else spec.default
            yield Setting(section.section, spec.name, meta["kind"], default, meta["help"], meta["source"], is_needed)


def read(setting: Setting, raw: object, origin: str, *, is_text: bool) -> object:
    """The value of `setting` for `raw`.

    Raises:
        ConfigError: `raw` is not allowed; the message names it (but never a secret), its origin and what is allowed.
    """
    try:
        return setting.kind.read(raw, is_text=is_text)
    except (ValueError, OverflowError) as error:
        kind = setting.kind
        is_hidden = isinstance(kind, Hidden) or (isinstance(kind, FormedText) and kind.is_hidden)
        shown = "(hidden)" if is_hidden else short(raw)
        message = f"{setting.name} = {shown} (from {origin}): {error}; allowed: {kind.allowed}"
        raise ConfigError(message) from None


def near(word: str, words: Sequence[str]) -> str:
    """End of a message about an unknown word: the nearest words, and all words if they are few."""
    close = get_close_matches(word.lower(), words, n=3, cutoff=0.5)
    suggestion = f"; did you mean {' or '.join(close)}?" if close else ""
    return suggestion if close and len(words) > 24 else f"{suggestion or ';'} known here: {', '.join(words)}"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: the file is unreadable, longer than `FILE_BYTES_MAX`, not TOML, or nested too deep.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ConfigError(f"file {path}: longer than {FILE_BYTES_MAX} bytes")
        if any(line.count(b".") > LINE_DOTS_MAX for line in content.splitlines()):
            raise ConfigError(f"file {path}: more than {LINE_DOTS_MAX} dots in a line")
        return tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"file {path}: {error.strerror}; allowed: a readable TOML file") from error
    except RecursionError:
        raise ConfigError(f"file {path}: nested too deep; allowed: tables of plain values") from None
    except ValueError as error:  # a UnicodeDecodeError, or a TOMLDecodeError, which names line and column
        raise ConfigError(f"file {path}: not TOML: {error}") from error


def short(raw: object) -> str:
    """A value for messages, without what may be a secret."""
    if type(raw) in {list, tuple, dict}:
        return f"({type(raw).__name__})"
    text = repr(redacted(raw)) if isinstance(raw, str) else redacted(repr(raw))
    return text if len(text) <= 80 else f"{text[:77]}..."
