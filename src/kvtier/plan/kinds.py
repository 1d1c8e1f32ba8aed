"""Kinds of values that only a plan needs, besides those of `kvtier.config.kinds`: words, numbers, rates."""

import math
from dataclasses import dataclass

from kvtier.config.kinds import Size, parse_size, size_text
from kvtier.report.format import bytes_text, power_text


@dataclass(frozen=True, slots=True)
class Word:
    """Free text without line ends: a name, or a path."""

    what: str
    most: int = 400

    @property
    def allowed(self) -> str:
        """See `kvtier.config.kinds.Kind`."""
        return self.what

    def read(self, raw: object, *, is_text: bool) -> str:
        """See `kvtier.config.kinds.Kind`."""
        del is_text
        if not isinstance(raw, str) or not raw.isprintable() or len(raw) > self.most:
            raise ValueError("not a name")
        return raw.strip()

    def show(self, value: object) -> str:
        """See `kvtier.config.kinds.Kind`."""
        return str(value) or "(none)"


@dataclass(frozen=True, slots=True)
class Real:
    """A number, also written ``6.98e9``."""

    least: float
    most: float
    zero_means: str = ""
    """What 0 stands for, where it is no number."""

    @property
    def allowed(self) -> str:
        """See `kvtier.config.kinds.Kind`."""
        zero = f"; 0: {self.zero_means}" if self.zero_means else ""
        return f"a number from {self.least:g} to {self.most:g}{zero}"

    def read(self, raw: object, *, is_text: bool) -> float:
        """See `kvtier.config.kinds.Kind`."""
        if is_text and isinstance(raw, str):
            raw = _float(raw)
        return _within(raw, self.least, self.most, zero_allowed=bool(self.zero_means))

    def show(self, value: object) -> str:
        """See `kvtier.config.kinds.Kind`."""
        if not isinstance(value, int | float):
            return str(value)
        if value == 0 and self.zero_means:
            return self.zero_means
        return power_text(value)


@dataclass(frozen=True, slots=True)
class Maybe:
    """A number, or nothing: then it is derived from other inputs."""

    number: Real
    otherwise: str
    """Where it comes from when it is not given."""

    @property
    def allowed(self) -> str:
        """See `kvtier.config.kinds.Kind`."""
        return f"{self.number.allowed}, or auto: {self.otherwise}"

    def read(self, raw: object, *, is_text: bool) -> float | None:
        """See `kvtier.config.kinds.Kind`."""
        if raw is None or raw == "auto":
            return None
        return self.number.read(raw, is_text=is_text)

    def show(self, value: object) -> str:
        """See `kvtier.config.kinds.Kind`."""
        return self.otherwise if value is None else self.number.show(value)


@dataclass(frozen=True, slots=True)
class Capacity(Size):
    """Bytes, shown in the units in which they are round: drives are sold in decimal ones, memory in binary ones."""

    zero_means: str = "none"

    def show(self, value: object) -> str:
        """See `kvtier.config.kinds.Kind`."""
        if not isinstance(value, int):
            return str(value)
        if not value:
            return self.zero_means
        return size_text(value) if value % 2**20 == 0 else bytes_text(value)


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes a second: a number, or a size such as ``14.5 GB/s``."""

    least: float = 1e6
    most: float = 1e16
    zero_means: str = "from the catalogue"

    @property
    def allowed(self) -> str:
        """See `kvtier.config.kinds.Kind`."""
        span = f"{bytes_text(self.least)}/s to {bytes_text(self.most)}/s"
        return f"bytes a second as a number, or a size such as 14.5 GB/s; from {span}; 0: {self.zero_means}"

    def read(self, raw: object, *, is_text: bool) -> float:
        """See `kvtier.config.kinds.Kind`."""
        del is_text
        if isinstance(raw, str):
            text = raw.strip().removesuffix("/s")
            try:
                raw = float(text)
            except ValueError:
                raw = parse_size(text)
        return _within(raw, self.least, self.most, zero_allowed=True)

    def show(self, value: object) -> str:
        """See `kvtier.config.kinds.Kind`."""
        if not isinstance(value, int | float):
            return str(value)
        return f"{bytes_text(value)}/s" if value else self.zero_means


def _float(text: str) -> float:
    try:
        return float(text.strip().replace(",", ""))
    except ValueError:
        raise ValueError("not a number") from None


def _within(raw: object, least: float, most: float, *, zero_allowed: bool) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not math.isfinite(raw):
        raise ValueError("not a number")
    if raw == 0 and zero_allowed:
        return 0.0
    if raw < least:
        raise ValueError("too small")
    if raw > most:
        raise ValueError("too large")
    return float(raw)
