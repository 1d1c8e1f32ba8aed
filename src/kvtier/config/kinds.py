"""What a setting's value may be: how text is read, what is allowed, how a value is shown.

A kind reads two sorts of raw values: text from the edge (environment, flags) and values that have a type already
(TOML, Python). Reading what it has read gives the same value again, so constructors check with the same code.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol, TypeVar

from kvtier.errors import ConfigError
from kvtier.keys.secret import SECRET_BYTES, Secret, parse

SIZE_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_SIZE_UNITS_FOLDED = {unit.lower(): factor for unit, factor in SIZE_UNITS.items()}
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]*)", re.ASCII)
_SUFFIXED = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(|k|ki|m|mi|g|gi)", re.ASCII | re.IGNORECASE)
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_Number = TypeVar("_Number", int, float)
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse_size(text: str) -> int:
    """Bytes of a size such as ``64GiB``, ``1.5 GB`` or ``4096``; units in any case, fractions of a byte cut off.

    Raises:
        ValueError: it is not a size.
    """
    found = _QUANTITY.fullmatch(text.strip())
    factor = _SIZE_UNITS_FOLDED.get(found[2].lower() or "b") if found else None
    if found is None or factor is None or (not found[2] and "." in found[1]):
        raise ValueError("not a size")
    return int(Decimal(found[1]) * factor)


def parse_seconds(text: str) -> float:
    """Seconds of a duration such as ``500ms``, ``2 min`` or ``0.5`` (seconds).

    Raises:
        ValueError: it is not a duration.
    """
    found = _QUANTITY.fullmatch(text.strip())
    factor = TIME_UNITS.get(found[2].lower() or "s") if found else None
    if found is None or factor is None:
        raise ValueError("not a duration")
    return float(found[1]) * factor


def parse_count(text: str) -> int:
    """Tokens or users of ``4096``, ``131,072``, ``128k`` (128,000) or ``128Ki`` (131,072).

    Raises:
        ValueError: it is not a whole number.
    """
    found = _SUFFIXED.fullmatch(text.strip().replace(",", "").replace("_", ""))
    count = Decimal(found[1]) * _SUFFIXES[found[2].lower()] if found else None
    if count is None or count != int(count):
        raise ValueError("not a whole number; 128k is 128,000 and 128Ki is 131,072")
    return int(count)


def size_text(count: int) -> str:
    """Bytes for people: the largest binary unit that leaves at least 1, exact where it divides."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit]
        if abs(count) >= factor:
            return f"{count // factor} {unit}" if count % factor == 0 else f"{count / factor:.2f} {unit}"
    return f"{count} B"


def seconds_text(duration_s: float) -> str:
    """A duration for people: microseconds, milliseconds or seconds."""
    if duration_s >= 1 or duration_s == 0:
        return f"{duration_s:g} s"
    return f"{duration_s * 1e3:g} ms" if duration_s >= 1e-3 else f"{duration_s * 1e6:g} us"


class Kind(Protocol):
    """One sort of value."""

    @property
    def allowed(self) -> str:
        """What is allowed, for a message."""
        ...

    def read(self, raw: object, *, is_text: bool) -> object:
        """The value of `raw`; `is_text` when it comes from a place that knows only text.

        Raises:
            ValueError: what is wrong with it, in a few words.
        """
        ...

    def show(self, value: object) -> str:
        """`value` for people."""
        ...


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: an integer inside, also ``64GiB`` at the edge."""

    least: int = 0
    most: int = 2**50

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        units = "bytes as an integer, or a number with KiB, MiB, GiB, TiB, kB, MB, GB, TB"
        return f"{units}; from {size_text(self.least)} to {size_text(self.most)}"

    def read(self, raw: object, *, is_text: bool) -> int:
        """See `Kind`."""
        del is_text
        if isinstance(raw, str):
            raw = parse_size(raw)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a size")  # noqa: TRY004 - a user's mistake, not a caller's
        return within(raw, self.least, self.most)

    def show(self, value: object) -> str:
        """See `Kind`."""
        return size_text(value) if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration: seconds as a float inside, also ``500ms`` at the edge."""

    least: float
    most: float

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        span = f"{seconds_text(self.least)} to {seconds_text(self.most)}"
        return f"seconds as a number, or a number with us, ms, s, min, h; from {span}"

    def read(self, raw: object, *, is_text: bool) -> float:
        """See `Kind`."""
        del is_text
        if isinstance(raw, str):
            raw = parse_seconds(raw)
        if not isinstance(raw, int | float) or isinstance(raw, bool) or not math.isfinite(raw):
            raise ValueError("not a duration")
        return float(within(raw, self.least, self.most))

    def show(self, value: object) -> str:
        """See `Kind`."""
        return seconds_text(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number."""

    least: int
    most: int

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return f"a whole number from {self.least} to {self.most}"

    def read(self, raw: object, *, is_text: bool) -> int:
        """See `Kind`."""
        if is_text and isinstance(raw, str):
            if not re.fullmatch(r"-?[0-9]{1,20}", raw.strip(), re.ASCII):
                raise ValueError("not a whole number")
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a whole number")  # noqa: TRY004 - a user's mistake, not a caller's
        return within(raw, self.least, self.most)

    def show(self, value: object) -> str:
        """See `Kind`."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return ", ".join(self.words)

    def read(self, raw: object, *, is_text: bool) -> str:
        """See `Kind`."""
        word = raw.strip() if is_text and isinstance(raw, str) else raw
        if not isinstance(word, str) or word not in self.words:
            raise ValueError("not one of the choices")
        return word

    def show(self, value: object) -> str:
        """See `Kind`."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Named:
    """The name of something that a registry knows, ours or an outsider's."""

    names: Callable[[], Sequence[str]]

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return ", ".join(self.names())

    def read(self, raw: object, *, is_text: bool) -> str:
        """See `Kind`."""
        name = raw.strip() if is_text and isinstance(raw, str) else raw
        if not isinstance(name, str) or name not in self.names():
            raise ValueError("not known here")
        return name

    def show(self, value: object) -> str:
        """See `Kind`."""
        return str(value)


@dataclass(frozen=True, slots=True)
class Switch:
    """True or false."""

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return "true or false"

    def read(self, raw: object, *, is_text: bool) -> bool:
        """See `Kind`."""
        word = raw.strip().lower() if is_text and isinstance(raw, str) else ""
        if word in _TRUE or raw is True:
            return True
        if word in _FALSE or raw is False:
            return False
        raise ValueError("neither true nor false")

    def show(self, value: object) -> str:
        """See `Kind`."""
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Location:
    """A path, made absolute against the working directory (``~`` is the home directory); empty means none."""

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return "a path, or empty for none"

    def read(self, raw: object, *, is_text: bool) -> Path | None:
        """See `Kind`."""
        del is_text
        if raw is None or raw == "":
            return None
        if not isinstance(raw, str | Path) or "\0" in str(raw):
            raise ValueError("not a path")
        try:
            # A process that changes its directory later must not find itself with another store.
            return Path(raw).expanduser().absolute()
        except RuntimeError as error:
            raise ValueError("no home directory is known for it") from error

    def show(self, value: object) -> str:
        """See `Kind`."""
        return "(none)" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Hidden:
    """A secret: 64 hexadecimal digits at the edge, 32 bytes inside, never shown; empty means none."""

    @property
    def allowed(self) -> str:
        """See `Kind`."""
        return "64 hexadecimal digits, or empty for none"

    def read(self, raw: object, *, is_text: bool) -> Secret | None:
        """See `Kind`."""
        del is_text
        if raw is None or raw == "":
            return None
        if isinstance(raw, bytes) and len(raw) == SECRET_BYTES:
            return Secret(raw)
        try:
            return parse(raw if isinstance(raw, str) else "")
        except ConfigError:
            raise ValueError("not a secret") from None

    def show(self, value: object) -> str:
        """See `Kind`: only whether there is one."""
        return "(none)" if value is None else "(set)"


def within(value: _Number, least: _Number, most: _Number) -> _Number:
    """`value`, if it is from `least` to `most`.

    Raises:
        ValueError: it is not.
    """
    if value < least:
        raise ValueError("too small")
    if value > most:
        raise ValueError("too large")
    return value
