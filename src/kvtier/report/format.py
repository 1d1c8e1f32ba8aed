"""Formats numbers as text with units. A kB is 1,000 bytes and a KiB is 1,024. KB is never printed."""

import math

NONE = "-"
UNBOUNDED = "unbounded"
DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
YEAR_S = 365.25 * 86_400


def digits(number: float, figures: int = 3) -> str:
    """Return `number` rounded to `figures` significant digits, but with all digits before the point."""
    text = f"{number:,.0f}" if abs(number) >= 10 ** (figures - 1) else f"{number:.{figures}g}"
    return f"{float(text):.12f}".rstrip("0").rstrip(".") if "e" in text else text


def exact(count: float) -> str:
    """Return `count` with thousands separated, and its fraction if it has one: ``147,456``, ``4,444.25``."""
    return f"{round(count):,}" if float(count).is_integer() else f"{count:,.4f}".rstrip("0").rstrip(".")


def bytes_text(count: float) -> str:
    """Return `count` bytes in steps of 1,000 with three digits, for estimates: ``147 kB``."""
    return _scaled(count, 1000, DECIMAL, 3)


def decimal(count: float) -> str:
    """Return `count` bytes in steps of 1,000 with four digits: ``147.5 kB``."""
    return _scaled(count, 1000, DECIMAL, 4)


def binary(count: float) -> str:
    """Return `count` bytes in steps of 1,024 with four digits: ``144 KiB``."""
    return _scaled(count, 1024, BINARY, 4)


def both(count: float) -> str:
    """Return `count` bytes in both units: ``147.5 kB = 144 KiB``."""
    return f"{decimal(count)} = {binary(count)}"


def rate_text(bytes_per_s: float) -> str:
    """Return a bandwidth in GB/s, so that a column is easy to compare, or in a smaller unit below 10 MB/s."""
    if bytes_per_s < 1e7:
        return f"{bytes_text(bytes_per_s)}/s" if bytes_per_s else NONE
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:,.0f} GB/s"


def time_text(seconds: float) -> str:
    """Return a duration in a unit from microseconds to years, with three digits."""
    if math.isinf(seconds):
        return UNBOUNDED
    if seconds >= 100 * YEAR_S:
        return "over 100 years"
    for unit, factor in (("years", YEAR_S), ("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (2 * factor if factor > 1 else 1):
            return f"{digits(seconds / factor)} {unit}"
    return f"{digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{digits(seconds * 1e6)} us"


def count_text(count: float) -> str:
    """Return a whole count, such as users, rounded down."""
    return UNBOUNDED if math.isinf(count) else f"{math.floor(count + 1e-6):,}"


def counted(count: float, name: str) -> str:
    """Return a count with its name in the singular or plural: ``1 drive``, ``1,024 drives``, ``2.5 years``."""
    return f"{count:,.12g} {name}{'' if count == 1 else 's'}"


def short_count(count: float | None) -> str:
    """Return a count, such as tokens, with a suffix for thousands: ``131.1k``. None means no limit."""
    if count is None:
        return "inf"
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:,.4g}{unit}"
    return f"{count:,.0f}"


def power_text(number: float) -> str:
    """Return a possibly very large number with a power of a thousand: ``835.5e12``."""
    for exponent in (15, 12, 9, 6):
        if abs(number) >= 10**exponent:
            return f"{number / 10**exponent:.4g}e{exponent}"
    return f"{int(number):,}" if number == int(number) else digits(number, 4)


def share_text(share: float | None) -> str:
    """Return a fraction as a percentage, or as a factor if it is at least 10."""
    if share is None:
        return NONE
    if math.isinf(share):
        return UNBOUNDED
    return f"{share:.1%}" if share < 10 else f"{share:,.0f}x"


def ratio_text(after: float | None, before: float | None) -> str:
    """Return `after` over `before` as a factor: ``1.72x``."""
    if after is None or before is None or not before or math.isinf(after) or math.isinf(before):
        return NONE
    return f"{after / before:.2f}x"


def _scaled(count: float, step: int, units: tuple[str, ...], figures: int) -> str:
    power = 0
    # 999.96 with four digits would be shown as 1000, so it belongs to the next unit.
    while abs(count) >= step * (1 - 0.5 * 10.0**-figures) and power + 1 < len(units):
        count, power = count / step, power + 1
    return f"{digits(count, figures)} {units[power]}"
