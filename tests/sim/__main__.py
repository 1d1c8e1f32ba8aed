"""Runs many seeds: `python -m tests.sim --seeds 0:5000`. Exits 1 when a seed fails, and names it."""

import argparse
import sys
import time
from collections import Counter
from dataclasses import asdict

from tests.sim.run import SeedReport, run

PROGRESS_S = 2.0


def main() -> int:
    """Run the seeds that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, END not included, or one seed (default 0:1000)")
    parser.add_argument("--steps", type=int, default=None, help="steps of each seed; drawn per seed by default")
    parser.add_argument("--failures", type=int, default=10, help="stop after this many failed seeds (default 10)")
    parser.add_argument("--trace", action="store_true", help="print the end of the trace of each failed seed")
    arguments = parser.parse_args()
    first, _, end = str(arguments.seeds).partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    return _run_all(seeds, arguments.steps, arguments.failures, is_traced=arguments.trace)


def _run_all(seeds: range, steps: int | None, failures_max: int, *, is_traced: bool) -> int:
    began_s = printed_s = time.monotonic()
    totals: Counter[str] = Counter()
    failed = 0
    for done, seed in enumerate(seeds, 1):
        report = run(seed, steps)
        _count(totals, report)
        if not report.is_good:
            failed += 1
            _print_failure(report, is_traced=is_traced)
            if failed >= failures_max:
                break
        now_s = time.monotonic()
        if now_s - printed_s > PROGRESS_S:
            printed_s = now_s
            sys.stderr.write(f"{done}/{len(seeds)} seeds, {done / (now_s - began_s):.0f} a second, {failed} failed\n")
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
