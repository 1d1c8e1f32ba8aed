"""The loop of the benchmarks: repeats with a warm-up and a deadline, and every sample of what a repeat measured."""

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

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
    """The samples of `repeats` repeats, by name.

    Args:
        once: measures everything once, in turn; called with the number of the repeat. Those that warm up are below 0.
        repeats: samples of each name.
        warm_up: repeats before them, which are not kept.
        until_s: monotonic time after which only the first repeat begins.
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
