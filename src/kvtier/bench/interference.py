"""What the tier's threads cost the engine's: how much longer a step of pure Python takes while objects move.

A step is a fixed amount of Python work, half a millisecond on an idle machine, as between two launches of an engine's
loop. It needs the interpreter's lock all the time, which the mover's threads also need, for microseconds, around each
of their system calls. Samples beside a tier at full rate alternate with samples alone, because machines drift.

A step that the system took off its core to run something else says nothing about us. Such steps are told by the
thread's count of involuntary switches: `undisturbed` figures leave them out.
"""

import resource
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

STEP_S = 0.5e-3
STEPS = 2000
"""Steps of one sample: enough for a 99th percentile."""

DEADLINE_S = 120.0


class Steps(NamedTuple):
    """Milliseconds that steps took."""

    p50_ms: float
    p99_ms: float
    undisturbed_p99_ms: float
    """Of the steps that the system did not interrupt; of all, when it interrupted all."""
    undisturbed: float
    """Their share."""


@dataclass(frozen=True, slots=True)
class Interference:
    """Medians over the samples; rises are from a sample alone to the one beside the tier that followed it."""

    alone: Steps
    beside: Steps
    rise_p99_ms: float
    undisturbed_rise_p99_ms: float


def measure(move: Callable[[threading.Event], None], *, repeats: int = 5, steps: int = STEPS) -> Interference:
    """Measure.

    Args:
        move: moves objects at full rate until the event is set; called in a thread of its own.
        repeats: pairs of samples.
        steps: steps of a sample.
    """
    loops = _calibrated()
    alone: list[Steps] = []
    beside: list[Steps] = []
    for _ in range(repeats):
        alone.append(_sample(loops, steps))
        stop = threading.Event()
        mover = threading.Thread(target=move, args=(stop,), name="kvtier interference", daemon=True)
        mover.start()
        try:
            beside.append(_sample(loops, steps))
        finally:
            stop.set()
            mover.join(DEADLINE_S)
    pairs = list(zip(alone, beside, strict=True))
    return Interference(
        _medians(alone),
        _medians(beside),
        round(statistics.median(after.p99_ms - before.p99_ms for before, after in pairs), 3),
        round(statistics.median(after.undisturbed_p99_ms - before.undisturbed_p99_ms for before, after in pairs), 3),
    )


def _calibrated() -> int:
    """How many rounds of the work take `STEP_S` when nothing disturbs them."""
    loops = 1000
    fastest = min(_step(loops)[0] for _ in range(200))
    return max(1, round(loops * STEP_S / fastest))


def _sample(loops: int, steps: int) -> Steps:
    told = [_step(loops) for _ in range(steps)]
    every = sorted(seconds * 1e3 for seconds, _ in told)
    undisturbed = sorted(seconds * 1e3 for seconds, was_interrupted in told if not was_interrupted)
    return Steps(_at(every, 0.5), _at(every, 0.99), _at(undisturbed or every, 0.99), len(undisturbed) / steps)


def _step(loops: int) -> tuple[float, bool]:
    """Seconds, and whether the system interrupted it."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    start = time.perf_counter()
    total = 0
    for number in range(loops):
        total += number
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw > before


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def _medians(samples: list[Steps]) -> Steps:
    return Steps(*(round(statistics.median(column), 3) for column in zip(*samples, strict=True)))
