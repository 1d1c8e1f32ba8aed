"""Bytes as text and text as counts. A kB is 1,000 bytes and a KiB is 1,024; we never write KB without saying which."""

import re
from dataclasses import dataclass
from decimal import Decimal

DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(|k|ki|m|mi|g|gi)", re.ASCII | re.IGNORECASE)
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_FIGURE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgtpe]?i?)b", re.ASCII | re.IGNORECASE)


def decimal(count: float) -> str:
    """`count` bytes in steps of 1,000, four digits: ``147.5 kB``."""
    return _scaled(count, 1000, DECIMAL)


def binary(count: float) -> str:
    """`count` bytes in steps of 1,024, four digits: ``144 KiB``."""
    return _scaled(count, 1024, BINARY)


def both(count: float) -> str:
    """`count` bytes in both units: ``147.5 kB = 144 KiB``."""
    return f"{decimal(count)} = {binary(count)}"


def exact(count: float) -> str:
    """`count` with thousands separated; a fraction only where there is one: ``147,456``, ``4,444.25``."""
    return f"{round(count):,}" if float(count).is_integer() else f"{count:,.4f}".rstrip("0").rstrip(".")


def _scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    power = 0
    # 999.96 would be shown as 1000, so it belongs to the next unit already.
    while abs(count) >= step * (1 - 5e-5) and power + 1 < len(units):
        count, power = count / step, power + 1
    digits = max(0, 3 - max(0, len(str(int(abs(count)))) - 1)) if power else 3
    text = f"{count:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {units[power]}"


def parse_count(text: str) -> int:
    """Tokens or users of ``4096``, ``131,072``, ``128k`` (128,000) or ``128Ki`` (131,072).

    Raises:
        ValueError: it is not a whole number.
    """
    found = _COUNT.fullmatch(text.strip().replace(",", "").replace("_", ""))
    count = Decimal(found[1]) * _COUNT_UNITS[found[2].lower()] if found else None
    if count is None or count != int(count):
        raise ValueError("not a whole number; 128k is 128,000 and 128Ki is 131,072")
    return int(count)


@dataclass(frozen=True, slots=True)
class Figure:
    """A size as somebody printed it, such as ``150 KB``."""

    text: str
    number: float
    prefix: str
    """Upper case: "" for bytes, then "K", "M" ... "E"."""
    is_binary: bool
    """It says KiB, so 1,024 is meant; KB may mean either."""
    step: float
    """What the last printed digit counts: 0.01 for 1.47."""
    rough: float
    """The same without trailing zeros, which may be printed for their place alone: 10 for 150."""

    def bytes(self, thousand: int) -> float:
        """The figure in bytes, read with a kilo of `thousand`."""
        return self.number * self.unit_bytes(thousand)

    def unit_bytes(self, thousand: int) -> float:
        """Bytes of the figure's unit, read with a kilo of `thousand`."""
        return float(thousand) ** ("", "K", "M", "G", "T", "P", "E").index(self.prefix)


def parse_figure(text: str) -> Figure:
    """Read a printed size.

    Raises:
        ValueError: it is not a size.
    """
    found = _FIGURE.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None or not float(found[1]):
        raise ValueError("not a size; write it like 150 KB, 0.33 GB or 144 KiB")
    digits, unit = found[1], found[2].upper()
    decimals = len(digits.partition(".")[2])
    zeros = 0 if decimals else len(digits) - len(digits.rstrip("0"))
    return Figure(
        text=text.strip(),
        number=float(digits),
        prefix=unit.removesuffix("I"),
        is_binary=unit.endswith("I"),
        step=10.0**-decimals,
        rough=10.0 ** (zeros or -decimals),
    )
