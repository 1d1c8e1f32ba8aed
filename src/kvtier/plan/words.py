"""Numbers as people read them: decimal units, three or four digits, and words for what has no end."""

import math

NEVER = "-"
ENDLESS = "without end"


def bytes_text(count: float) -> str:
    """Bytes in decimal units, as drives are sold."""
    for unit, factor in (("EB", 1e18), ("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def rate_text(bytes_per_s: float) -> str:
    """Bytes a second in GB/s, so that a column can be compared; very small ones as what they are."""
    if bytes_per_s < 1e7:
        return f"{bytes_text(bytes_per_s)}/s" if bytes_per_s else NEVER
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:,.0f} GB/s"


def time_text(seconds: float) -> str:
    """A time, from microseconds to years."""
    if math.isinf(seconds):
        return ENDLESS
    year_s = 365.25 * 86_400
    if seconds >= 100 * year_s:
        return "over 100 years"
    for unit, factor in (("years", year_s), ("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (2 * factor if factor > 1 else 1):
            return f"{digits(seconds / factor)} {unit}"
    return f"{digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{digits(seconds * 1e6)} us"


def count_text(count: float) -> str:
    """A count such as users: whole, cut off, since half a user is not served."""
    if math.isinf(count):
        return ENDLESS
    return f"{math.floor(count + 1e-6):,}"


def load_text(load: float, *, is_users: bool) -> str:
    """A load in users, or in queries a second."""
    return count_text(load) if is_users or math.isinf(load) else digits(load)


def share_text(share: float) -> str:
    """A share as a percentage."""
    if math.isinf(share):
        return ENDLESS
    return f"{share:.1%}" if share < 10 else f"{share:,.0f}x"


def ratio_text(after: float | None, before: float | None) -> str:
    """How many times."""
    if after is None or before is None or not before or math.isinf(after) or math.isinf(before):
        return NEVER
    return f"{after / before:.2f}x"


def price_text(amount: float) -> str:
    """An amount of money, or so much for money: three digits that count."""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"


def power_text(number: float) -> str:
    """A number that may be very large, with a power of a thousand: 835.5e12."""
    for exponent in (15, 12, 9, 6):
        if abs(number) >= 10**exponent:
            return f"{number / 10**exponent:.4g}e{exponent}"
    return f"{int(number):,}" if number == int(number) else f"{number:.4g}"


def digits(number: float) -> str:
    """Three digits that count, or all before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"
