"""Runs many seeds: `python -m tests.sim --seeds 0:5000`. If a seed fails, it names the seed and exits 1."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import repeat

from tests.sim import objects
from tests.sim.run import SeedReport, run

PROGRESS_S = 2.0
CHUNK_SEEDS = 16
"""Number of seeds that a process takes at once."""


def main() -> int:
    """Run the seeds that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, END not included, or one seed (default 0:1000)")
    parser.add_argument("--steps", type=int, default=None, help="steps of each seed; drawn per seed by default")
    parser.add_argument("--failures", type=int, default=10, help="stop after this many failed seeds (default 10)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="seeds at once (default: the cores)")
    parser.add_argument("--objects", action="store_true", help="calls of an object store instead of a session's")
    parser.add_argument("--hinted", type=float, default=0.0, help="share of requests with hints about their prefix")
    parser.add_argument("--ranks", type=int, default=1, help="up to so many unequal ranks (default 1)")
    parser.add_argument("--trace", action="store_true", help="print the end of the trace of each failed seed")
    arguments = parser.parse_args()
    first, _, end = str(arguments.seeds).partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if arguments.processes < 1:
        parser.error(f"--processes {arguments.processes}; allowed: 1 or more")
    run_one = objects.run if arguments.objects else partial(run, hinted=arguments.hinted, most_ranks=arguments.ranks)
    if min(arguments.processes, len(seeds)) <= 1:
        reports = map(run_one, seeds, repeat(arguments.steps))
        return _run_all(reports, len(seeds), arguments.failures, is_traced=arguments.trace)
    with ProcessPoolExecutor(arguments.processes) as pool:
        reports = pool.map(run_one, seeds, repeat(arguments.steps), chunksize=CHUNK_SEEDS)
        code = _run_all(reports, len(seeds), arguments.failures, is_traced=arguments.trace)
        pool.shutdown(cancel_futures=True)
        return code


def _run_all(reports: Iterator[SeedReport], seeds: int, failures_max: int, *, is_traced: bool) -> int:
    began_s = printed_s = time.monotonic()
    totals: Counter[str] = Counter()
    failed = 0
    for done, report in enumerate(reports, 1):
        _count(totals, report)
        if not report.is_good:
            failed += 1
            _print_failure(report, is_traced=is_traced)
            if failed >= failures_max:
                break
        now_s = time.monotonic()
        if now_s - printed_s > PROGRESS_S:
            printed_s = now_s
            sys.stderr.write(f"{done}/{seeds} seeds, {done / (now_s - began_s):.0f} a second, {failed} failed\n")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(totals.items()))
    sys.stdout.write(f"{totals['seeds']} seeds in {time.monotonic() - began_s:.1f} s, {failed} failed: {counts}\n")
    return 1 if failed else 0


def _count(totals: "Counter[str]", report: SeedReport) -> None:
    totals["seeds"] += 1
    totals["steps"] += report.steps
    totals.update(asdict(report.counts))
    totals.update(report.incidents)


def _print_failure(report: SeedReport, *, is_traced: bool) -> None:
    sys.stdout.write(f"seed {report.seed} step {report.steps}: {report.failure}\n")
    if is_traced:
        sys.stdout.write("\n".join(report.trace) + "\n" + report.where + "\n")


if __name__ == "__main__":
    sys.exit(main())
