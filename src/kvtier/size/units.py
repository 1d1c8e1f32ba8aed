"""Sizes and counts read from text. KB may mean 1,000 bytes or 1,024: the caller decides."""

import re
from dataclasses import dataclass
from decimal import Decimal

_COUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(|k|ki|m|mi|g|gi)", re.ASCII | re.IGNORECASE)
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_FIGURE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgtpe]?i?)b", re.ASCII | re.IGNORECASE)


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
    """A size as printed in a document, such as ``150 KB``."""

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
