"""Kinds of settings: each reads, checks and shows values.

Raw values are text (environment, flags) or typed (TOML, Python). A kind also accepts the values that it returns, so
constructors use the same checks.
"""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from kvtier.keys.seal_keys import FORM, parse
from kvtier.keys.secret import SECRET_BYTES, Secret, redacted

SIZE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

COUNT_UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_SIZE_UNITS_FOLDED = COUNT_UNITS | {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}
_TIME_UNITS_EXACT = {"": Decimal(1)} | {unit: Decimal(str(factor)) for unit, factor in TIME_UNITS.items()}
COUNT_FORMS = "128k is 128,000 and 128Ki is 131,072"
_QUANTITY = re.compile(r"((?:[0-9]{1,20}|[0-9]{1,3}(?:[,_][0-9]{3}){1,6})(?:\.[0-9]{1,20})?) ?([A-Za-z]*)", re.ASCII)
"""Allows separators only between groups of three digits, because another comma may stand for a decimal point."""
_Number = TypeVar("_Number", int, float)
_SECRET = re.compile(rf"[0-9A-Fa-f]{{{2 * SECRET_BYTES}}}")
_SETTINGS = re.compile("[?&;#]")
_NO_KIND = re.compile("(?!/)[^:=?;#@&]*[@&]")
"""Matches the start of a string that may be the end of a secret with a space in it."""
_VARIABLE = re.compile(r"\$[{(]?([A-Za-z_]\w*)[})]?", re.ASCII)
"""Matches a variable as shells or Kubernetes write it."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse_number(
    text: str, units: Mapping[str, int | Decimal] = COUNT_UNITS, problem: str = f"not a number; {COUNT_FORMS}"
) -> Decimal:
    """Read a number such as ``4096``, ``131,072``, ``1.5k`` (1,500) or ``128Ki`` (131,072). Units are case-insensitive.

    This is the grammar of every count, size, time and speed. The keys of `units` are in lower case.

    Raises:
        ValueError: `text` is not a number in this form. The message is `problem`.
    """
    found = _QUANTITY.fullmatch(text.strip())
    factor = units.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise ValueError(problem)
    return Decimal(found[1].replace(",", "")) * factor


def parse_size(text: str) -> int:
    """Read a size such as ``64GiB``, ``1.5 GB``, ``128Ki`` or ``4096`` as bytes. Drop fractions of a byte.

    Raises:
        ValueError: `text` is not a size.
    """
    if "." in text and text.strip()[-1].isdigit():
        raise ValueError("not a size")
    return int(parse_number(text, _SIZE_UNITS_FOLDED, "not a size"))


def parse_seconds(text: str) -> float:
    """Read a duration such as ``500ms``, ``2 min``, ``7d`` or ``0.5`` (seconds) as seconds.

    Raises:
        ValueError: `text` is not a duration.
    """
    return float(parse_number(text, _TIME_UNITS_EXACT, "not a duration"))


def parse_count(text: str, *, is_signed: bool = False) -> int:
    """Read a count such as ``4096``, ``131,072``, ``128k`` (128,000) or ``128Ki`` (131,072).

    Args:
        text: the number.
        is_signed: whether to accept a negative number, so that the caller can refuse it with the allowed range.

    Raises:
        ValueError: `text` is not a whole number.
    """
    sign = "-" if is_signed and text.strip().startswith("-") else ""
    count = parse_number(text.strip().removeprefix(sign), problem=(problem := f"not a whole number; {COUNT_FORMS}"))
    if count != int(count):
        raise ValueError(problem)
    return -int(count) if sign else int(count)


def size_text(count: int) -> str:
    """Return `count` bytes as text in the largest binary unit that gives at least 1, whole or with two decimals."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit]
        if abs(count) >= factor:
            return f"{count // factor} {unit}" if count % factor == 0 else f"{count / factor:.2f} {unit}"
    return f"{count} B"


def date_text(seconds: float | None) -> str:
    """Return seconds since 1970 as a date and time."""
    if seconds is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        return f"{seconds:.0f} s since 1970"  # an mtime may lie in any year


def age_text(seconds: float | None) -> str:
    """Return how long ago something was, in days, hours, minutes or seconds."""
    if seconds is None:
        return "unknown"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"


def seconds_text(duration_s: float) -> str:
    """Return a duration as text in microseconds, milliseconds or seconds."""
    if duration_s >= 1 or duration_s == 0:
        return f"{duration_s:g} s"
    return f"{duration_s * 1e3:g} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:g} us"


class Kind(Protocol):
    """The type of a setting. It defines the allowed values, and reads and shows values."""

    @property
    def allowed(self) -> str:
        """The allowed values, in words, for messages."""
        ...

    def read(self, raw: object, *, is_text: bool) -> object:
        """Convert `raw` to a value of this type. With `is_text`, its source has no types (environment, flags).

        Raises:
            ValueError: `raw` is not allowed. The message says why in a few words.
        """
        ...

    def show(self, value: object) -> str:
        """Return `value` as readable text."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes: an integer, or a string such as ``64GiB``."""

    least: int = 0
    most: int = 2**50

    @property
    def allowed(self) -> str:
        """The allowed units and range, in words, for messages."""
        units = "bytes as an integer, or a number with KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        return f"{units}; from {size_text(self.least)} to {size_text(self.most)}"

    def read(self, raw: object, *, is_text: bool) -> int:
        """Read an integer, or a string with or without a unit."""
        del is_text
        if isinstance(raw, str):
            raw = parse_size(raw)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a size")  # noqa: TRY004 - a user's mistake, not a caller's
        return within(raw, self.least, self.most)

    def show(self, value: object) -> str:
        """Return the size with a unit."""
        return size_text(value) if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration: seconds as a number, or a string such as ``500ms``."""

    least: float
    most: float

    @property
    def allowed(self) -> str:
        """The allowed units and range, in words, for messages."""
        span = f"{seconds_text(self.least)} to {seconds_text(self.most)}"
        return f"seconds as a number, or a number with us, ms, s, min, h, d; from {span}"

    def read(self, raw: object, *, is_text: bool) -> float:
        """Read a number, or a string with or without a unit."""
        del is_text
        if isinstance(raw, str):
            raw = parse_seconds(raw)
        if not isinstance(raw, int | float) or isinstance(raw, bool) or not math.isfinite(raw):
            raise ValueError("not a duration")
        return float(within(raw, self.least, self.most))

    def show(self, value: object) -> str:
        """Return the duration with a unit."""
        return seconds_text(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class RateKind(Kind):
    """A rate in bytes per second: a size and ``/s``, such as ``12GB/s``."""

    @property
    def allowed(self) -> str:
        """The allowed strings, in words, for messages."""
        return "a size a second, such as 12GB/s"

    def read(self, raw: object, *, is_text: bool) -> int:
        """Read a rate. Refuse text without a unit, which may be meant for another setting."""
        if isinstance(raw, str) and raw.strip().endswith("/s"):
            raw, is_text = parse_size(raw.strip().removesuffix("/s")), False
        if is_text or not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a rate")
        return within(raw, 1, 10**16)


@dataclass(frozen=True, slots=True)
class Count(Kind):
    """A whole number."""

    least: int
    most: int

    @property
    def allowed(self) -> str:
        """The allowed range, in words, for messages."""
        return f"a whole number from {self.least} to {self.most}"

    def read(self, raw: object, *, is_text: bool) -> int:
        """Read an integer, or its text if `is_text`."""
        if is_text and isinstance(raw, str):
            raw = parse_count(raw, is_signed=True)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a whole number")  # noqa: TRY004 - a user's mistake, not a caller's
        return within(raw, self.least, self.most)


@dataclass(frozen=True, slots=True)
class ChoiceKind(Kind):
    """One of several words, or one of the names in a registry."""

    words: tuple[str, ...] | Callable[[], Sequence[str]]

    @property
    def allowed(self) -> str:
        """The allowed words, for messages."""
        return ", ".join(word or "empty" for word in self._words())

    def read(self, raw: object, *, is_text: bool) -> str:
        """Read a word."""
        word = raw.strip() if is_text and isinstance(raw, str) else raw
        if not isinstance(word, str) or word not in self._words():
            raise ValueError("not one of the choices")
        return word

    def show(self, value: object) -> str:
        """Return the word, or ``(none)``."""
        return str(value) or "(none)"

    def _words(self) -> Sequence[str]:
        return self.words() if callable(self.words) else self.words


@dataclass(frozen=True, slots=True)
class Switch:
    """True or false."""

    @property
    def allowed(self) -> str:
        """The allowed words, for messages."""
        return "true or false"

    def read(self, raw: object, *, is_text: bool) -> bool:
        """Read a boolean, or its word if `is_text`."""
        word = raw.strip().lower() if is_text and isinstance(raw, str) else ""
        if word in _TRUE or raw is True:
            return True
        if word in _FALSE or raw is False:
            return False
        raise ValueError("neither true nor false")

    def show(self, value: object) -> str:
        """Return ``true`` or ``false``."""
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Location:
    """A path, made absolute; empty means none, unless `is_needed`.

    A leading ``~`` is the home directory. Variables are refused: no shell expands them in a file or JSON, so they
    would become part of a directory's name.
    """

    is_needed: bool = False

    @property
    def allowed(self) -> str:
        """The allowed paths, in words, for messages."""
        return "a path" if self.is_needed else "a path, or empty for none"

    def read(self, raw: object, *, is_text: bool) -> Path | None:
        """Read a path and make it absolute."""
        del is_text
        if raw is None or raw == "":
            if self.is_needed:
                raise ValueError("empty")
            return None
        if not isinstance(raw, str | Path) or "\0" in str(raw):
            raise ValueError("not a path")
        if found := _VARIABLE.search(str(raw)):
            hint = f"; for {Path.home()} write ~ at the beginning" if found[1] == "HOME" else ""
            raise ValueError(f"{found[0]} is not replaced here{hint}")
        os.fsencode(raw)  # JSON may hold half of a surrogate pair, which names no file
        try:
            # An absolute path, so that a later change of the working directory does not change the store.
            return Path(raw).expanduser().absolute()
        except RuntimeError as error:
            raise ValueError("unknown home directory") from error

    def show(self, value: object) -> str:
        """Return the path, or ``(none)``."""
        return "(none)" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class FileLocation(Location):
    """The path of a file that must exist and be readable. `tier.files.path_checks.tier_file` reads it."""

    pem: str = ""
    """Label of the file's PEM content, such as ``CERTIFICATE``; empty allows any format."""


@dataclass(frozen=True, slots=True)
class SecretLocation(Location):
    """The path of a file with a secret. Text that may be the secret itself is refused."""

    def read(self, raw: object, *, is_text: bool) -> Path | None:
        """Read a path and make it absolute."""
        if isinstance(raw, str) and "/" not in raw and redacted(raw) != raw:
            raise ValueError("may be the secret itself rather than the path of its file")
        return Location.read(self, raw, is_text=is_text)


@dataclass(frozen=True, slots=True)
class Text:
    """Text without control characters."""

    least: int = 0
    most: int = 1024

    @property
    def allowed(self) -> str:
        """The allowed strings, in words, for messages."""
        return f"a string of {self.least} to {self.most} characters, without control characters"

    def read(self, raw: object, *, is_text: bool) -> str:
        """Read a string."""
        del is_text
        if not isinstance(raw, str) or not raw.isprintable():
            raise ValueError("not a printable string")
        within(len(raw), self.least, self.most)
        return raw

    def show(self, value: object) -> str:
        """Return the text, or ``(none)``."""
        return str(value) or "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedText(Text):
    """Text in a given form. Empty means none."""

    form: str
    is_formed: Callable[[str], object]
    """Returns a true value for a string in this form, and may raise ValueError for others."""
    is_hidden: bool = False
    """Whether messages hide invalid text, because it may contain a key."""

    @property
    def allowed(self) -> str:
        """The allowed strings, in words, for messages."""
        return f"{self.form}; or empty for none"

    def read(self, raw: object, *, is_text: bool) -> str:
        """Read a string in this form."""
        text = Text.read(self, raw, is_text=is_text)
        if text and not self.is_formed(text):
            raise ValueError("malformed")
        return text


@dataclass(frozen=True, slots=True)
class Hidden:
    """A secret of 32 bytes, or 64 hexadecimal digits as text. It is never shown. Empty means none."""

    @property
    def allowed(self) -> str:
        """The allowed strings, in words, for messages."""
        return "64 hexadecimal digits, or empty for none"

    def read(self, raw: object, *, is_text: bool) -> Secret | None:
        """Read hexadecimal digits, or 32 bytes."""
        del is_text
        if raw is None or raw == "":
            return None
        if isinstance(raw, bytes) and len(raw) == SECRET_BYTES:
            return Secret(raw)
        if not isinstance(raw, str) or not _SECRET.fullmatch(raw.strip()):
            raise ValueError("not a secret")
        return Secret(bytes.fromhex(raw.strip()))

    def show(self, value: object) -> str:
        """Return ``(set)`` or ``(none)``, never the secret."""
        return "(set)" if value else "(none)"


class PrivateText(str):
    """Text that `repr` and formatting hide. `reveal` returns it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(hidden)" if self else "(none)"

    __str__ = __repr__

    def __format__(self, _spec: str, /) -> str:
        return repr(self)

    def reveal(self) -> str:
        """Return the text itself."""
        return "".join(self)


@dataclass(frozen=True, slots=True)
class HiddenText(Hidden):
    """Secret text, such as a password. It is never shown. Empty means none."""

    @property
    def allowed(self) -> str:
        """The allowed strings, in words, for messages."""
        return "a string of up to 4096 characters, without control characters, or empty for none"

    def read(self, raw: object, *, is_text: bool) -> PrivateText:  # type: ignore[override]
        """Read a string."""
        return PrivateText("".join(Text(0, 4096).read(raw, is_text=is_text)))


@dataclass(frozen=True, slots=True)
class HiddenKeys(HiddenText):
    """The keys of sealed frames, one per line as `keys.seal_keys` reads them.

    A semicolon also ends a line. Empty means none.
    """

    @property
    def allowed(self) -> str:
        """The allowed strings, in words, for messages."""
        return f"lines of the form {FORM}, separated by newlines or semicolons"

    def read(self, raw: object, *, is_text: bool) -> PrivateText:  # type: ignore[override]  # noqa: ARG002
        """Read keys, one per line.

        Raises:
            ConfigError: a line is invalid. The message gives its number.
        """
        if not isinstance(raw, str):
            raise ValueError("not a string")  # noqa: TRY004 - a user's mistake, not a caller's
        text = "".join(raw).replace(";", "\n")
        if text and not parse(text.encode(errors="replace"), "store.keys").keys:
            raise ValueError("contains no key")
        return PrivateText(text)


def shown_place(text: str) -> str:
    """Return the start of a URL or a tier for messages, without any part of a login or settings that may be secret."""
    if _NO_KIND.match(text):
        return "(hidden)"
    name, colon, where = _SETTINGS.split(redacted(text), maxsplit=1)[0].partition(":")
    if any("@" in behind or "%40" in behind for behind in _SETTINGS.split(text, maxsplit=1)[1:]):
        where = "(hidden)"  # the mark may be part of a password
    return f"{name}{colon}{where.partition('=')[0]}"[:120]


def through_proxy(url: str) -> str:
    """Describe the proxy that the environment names for `url`, without its login; empty if there is none."""
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415 - slow, and rare

    parts, named = urlsplit(url), getproxies()
    host, proxy = parts.hostname or "", named.get(parts.scheme) or named.get("all", "")
    with suppress(ValueError):  # the host is a name, or a part is not a network
        exempt = [ip_network(each.strip(), strict=False) for each in named.get("no", "").split(",") if "/" in each]
        proxy = "" if any(ip_address(host) in each for each in exempt) else proxy
    if not proxy or proxy_bypass(host):
        return ""
    return f" through the proxy {proxy.rpartition('://')[2].rpartition('@')[2].partition('/')[0]}"


def within(value: _Number, least: _Number, most: _Number) -> _Number:
    """Return `value` if it is between `least` and `most`, inclusive.

    Raises:
        ValueError: `value` is outside this range.
    """
    if value < least:
        raise ValueError("too small")
    if value > most:
        raise ValueError("too large")
    return value
