"""The loop of the benchmarks, which keeps every sample, and the ratio of two series of samples.

The loop repeats with a warm-up and a deadline. A ratio is the quotient of the two medians that a table prints.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")
Advance = Callable[[float], None]


def repeated(
    once: Callable[[int], Mapping[Name, Sample]],
    repeats: int,
    *,
    warm_up: int = 0,
    until_s: float = math.inf,
    advance: Advance = lambda _steps: None,
) -> dict[Name, list[Sample]]:
    """Call `once` for each repeat, and return its samples by name.

    Args:
        once: measures everything once, in turn. It receives the number of the repeat, which is negative in a warm-up.
        repeats: number of samples for each name.
        warm_up: number of preceding repeats whose samples are dropped.
        until_s: monotonic time after which only the first repeat still starts.
        advance: called with 1 after each repeat.
    """
    found: dict[Name, list[Sample]] = {}
    for number in range(-warm_up, repeats):
        if number > 0 and time.monotonic() > until_s:
            break
        for name, sample in once(number).items():
            if number >= 0:
                found.setdefault(name, []).append(sample)
        advance(1)
    return found


Span = tuple[float, float]
"""The smallest and the largest quotient of two samples of the same repeat."""


class Ratio(NamedTuple):
    """The ratio of one series of samples to another."""

    value: float
    """Quotient of the medians."""
    span: Span


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of two series of samples that were taken in turn.

    The span compares only samples of the same repeat, because a machine's speed drifts.

    Raises:
        ValueError: the numbers of samples differ.
    """
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    value = statistics.median(ours) / statistics.median(theirs)
    return Ratio(round(value, 3), (round(min(each), 3), round(max(each), 3)))


def ratio_text(value: float | None, span: Span | None) -> str:
    """Format a ratio as ``0.82 (0.66 to 0.91)``. A single sample has no span. The string is empty without a ratio."""
    if value is None:
        return ""
    return f"{value:.2f}" if span is None or span[0] == span[1] else f"{value:.2f} ({span[0]:.2f} to {span[1]:.2f})"
