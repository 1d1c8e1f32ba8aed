"""Measures how much longer a step of pure Python takes while the disk tier moves objects at full rate.

    python bench/interference.py DIR --chunk-bytes 4194304        # DIR on the drive in question; prints JSON lines

A step is a fixed amount of Python work, 0.5 ms on an idle machine, like an engine's host code between two kernel
launches. It holds the GIL, which the tier's threads also need for microseconds around each system call. Samples beside
the tier alternate with samples alone, because machines drift.

A step that the kernel preempted measures other processes. The thread's count of involuntary context switches finds
such steps, and the `undisturbed` figures exclude them. ADR 8 quotes the results. There is no record.
"""

import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import run as run_script

from kvtier.tools.bench.io_harness import FullTier
from kvtier.tools.options import WorkDirectory

STEP_S = 0.5e-3
STEPS = 2000
"""Steps in one sample, enough for a 99th percentile."""

DEADLINE_S = 120.0
SAMPLE_BYTES = 256 << 20


class Steps(NamedTuple):
    """Percentiles of the steps' duration."""

    p50_ms: float
    p99_ms: float
    undisturbed_p99_ms: float
    """99th percentile of steps without preemption, or of all steps if every one was preempted."""
    undisturbed: float
    """Share of steps without preemption."""


@dataclass(frozen=True, slots=True)
class Interference:
    """Medians over the samples. A rise compares a sample alone with the next one beside the tier."""

    alone: Steps
    beside: Steps
    rise_p99_ms: float
    undisturbed_rise_p99_ms: float


def measure(move: Callable[[threading.Event], None], *, repeats: int = 5, steps: int = STEPS) -> Interference:
    """Alternate samples alone and beside `move`.

    Args:
        move: moves objects in its own thread until the event is set.
        repeats: pairs of samples.
        steps: steps per sample.
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
    """Return how many iterations of the loop take `STEP_S` without disturbance."""
    loops = 1000
    fastest = min(_step(loops)[0] for _ in range(200))
    return max(1, round(loops * STEP_S / fastest))


def _sample(loops: int, steps: int) -> Steps:
    taken = [_step(loops) for _ in range(steps)]
    every = sorted(seconds * 1e3 for seconds, _ in taken)
    undisturbed = sorted(seconds * 1e3 for seconds, is_preempted in taken if not is_preempted)
    return Steps(_at(every, 0.5), _at(every, 0.99), _at(undisturbed or every, 0.99), len(undisturbed) / steps)


def _step(loops: int) -> tuple[float, bool]:
    """Run a step. Return its seconds, and whether the kernel preempted it."""
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


@click.command()
@click.argument("directory", type=WorkDirectory())
@click.option("--chunk-bytes", type=click.IntRange(4096), default=4 << 20, show_default=True, help="Of an object.")
@click.option(
    "--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="Read threads, write threads."
)
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Pairs of samples.")
def interference(directory: Path, chunk_bytes: int, threads: int, repeats: int) -> None:
    """Measure stores and loads of a disk tier in a temporary directory in DIRECTORY."""
    count = max(2, SAMPLE_BYTES // chunk_bytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        disk = FullTier("disk", Path(place) / "store", chunk_bytes, count, threads)
        try:
            disk.store()
            for op, act in (("store", disk.store), ("load", disk.load)):

                def move(stop: threading.Event, act: Callable[[], object] = act) -> None:
                    while not stop.is_set():
                        act()

                found = measure(move, repeats=repeats)
                shown = {**asdict(found), "alone": found.alone._asdict(), "beside": found.beside._asdict()}
                click.echo(json.dumps({"op": op, "chunk_bytes": chunk_bytes, "threads": threads, **shown}))
        finally:
            disk.close()


if __name__ == "__main__":
    run_script(interference)
