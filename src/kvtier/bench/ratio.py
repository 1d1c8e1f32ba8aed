"""The one rule for ratios in benchmarks: the quotient of the two medians that a table prints, and its spread."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[float, float]
"""The smallest and the largest quotient of two neighbouring samples."""


class Ratio(NamedTuple):
    """How one row of samples compares with another."""

    value: float
    """Quotient of the medians."""
    span: Span


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of two rows of samples that were taken in turn. Neighbours are compared, because machines drift.

    Raises:
        ValueError: the numbers of samples differ.
    """
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    value = statistics.median(ours) / statistics.median(theirs)
    return Ratio(round(value, 3), (round(min(each), 3), round(max(each), 3)))


def ratio_text(value: float | None, span: Span | None) -> str:
    """Such as ``0.82 (0.66 to 0.91)``; empty without a ratio, and without a spread for one sample."""
    if value is None:
        return ""
    return f"{value:.2f}" if span is None or span[0] == span[1] else f"{value:.2f} ({span[0]:.2f} to {span[1]:.2f})"
