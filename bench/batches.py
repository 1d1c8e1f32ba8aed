"""Measures loads and stores of small and large objects through the mover, on this tree and another commit's in turn.

    python bench/batches.py --before 880d00b --dir DIR --record bench/records/batches.json

Each side is a process with a full disk store of its own. A round asks both for a store and a load, and the sides take
turns to go first. ADR 22 quotes the record.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtier.report.output import write_json
from kvtier.tools.bench.io_harness import FullTier
from kvtier.tools.run_record import RecordedSetting, make_record

TOP = Path(__file__).parents[1]
SIZES = (64 << 10, 512 << 10, 4 << 20, 32 << 20)
THREADS = (4, 8)
"""Numbers of read threads, and of write threads."""
STREAMS = 8
SIDES = ("before", "now")
OPS = ("store", "load")


def serve(root: Path, kind: str, size: int, count: int, threads: int, seed: int) -> None:
    """Serve as one side. For each input line, ``store`` or ``load``, print a line with seconds and CPU seconds."""
    tier = FullTier(kind, root, size, count, threads, streams=STREAMS, seed=seed)
    for _ in range(2):  # the second replaces the first, as all later ones do
        tier.store()
    print("ready", flush=True)
    for line in sys.stdin:
        sample = tier.store() if line.strip() == "store" else tier.load()
        print(json.dumps([sample.seconds, sample.cpu_s]), flush=True)
    tier.close()


class Side:
    """The process that measures one tree."""

    def __init__(self, source: Path, root: Path, given: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(root), *given],
            env={**os.environ, "PYTHONPATH": str(source)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._line()

    def ask(self, op: str) -> list[float]:
        """Run one store or load. Return its seconds and CPU seconds."""
        assert self._process.stdin is not None
        print(op, file=self._process.stdin, flush=True)
        return json.loads(self._line())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side has ended with {self._process.wait()}")
        return line


def measure(
    sources: dict[str, Path], folder: Path, size: int, threads: int, given: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure the rows of one object size and number of threads."""
    from kvtier.tools.bench.repeats import ratio  # noqa: PLC0415 - the other commit, which serves with this script, may lack it

    count = max(4, given.sample_bytes // size)
    options = ["--tier", given.tier, "--size", str(size), "--count", str(count)]
    options += ["--threads", str(threads), "--seed", str(given.seed)]
    sides = {name: Side(source, folder / f"{name}-{size}-{threads}", options) for name, source in sources.items()}
    taken: dict[tuple[str, str], list[list[float]]] = {(op, name): [] for op in OPS for name in SIDES}
    for number in range(given.rounds):
        for op in OPS:
            for name in SIDES if number % 2 else SIDES[::-1]:
                taken[op, name].append(sides[name].ask(op))
    for side in sides.values():
        side.close()
    rows: list[dict[str, object]] = []
    for op in OPS:
        before, now = (taken[op, name] for name in SIDES)
        row: dict[str, object] = {"op": op, "object_bytes": size, "threads": threads, "objects": count}
        for at, what in enumerate(("seconds", "cpu_s")):
            # Above 1, this tree is faster or takes less CPU time.
            row[f"{what}_ratio"], row[f"{what}_ratio_span"] = ratio([it[at] for it in before], [it[at] for it in now])
            for name in SIDES:
                row[f"{what}_{name}"] = round(statistics.median(each[at] for each in taken[op, name]), 5)
        row["samples"] = {name: [[round(it, 5) for it in each] for each in taken[op, name]] for name in SIDES}
        rows.append(row)
        print({key: value for key, value in row.items() if key != "samples"}, flush=True)
    return rows


def main() -> None:
    """Unpack the other commit, measure both trees and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default="880d00b", help="the commit to compare with")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the drive in question")
    parser.add_argument("--tier", default="disk", help="the kind of tier")
    parser.add_argument("--threads", type=int, action="append", help="read threads, and as many write threads")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sample-bytes", type=int, default=128 << 20, help="moved by one store or load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="write the JSON record to this file")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, action="append", help="of an object; several times for several sizes")
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.tier, given.size[0], given.count, given.threads[0], given.seed)
        return
    rows: list[dict[str, object]] = []
    sizes, threads = given.size or SIZES, given.threads or THREADS
    with tempfile.TemporaryDirectory(prefix="kvtier-batches-", dir=given.dir) as folder:
        packed = subprocess.run(["git", "archive", given.before, "src"], cwd=TOP, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
        sources = {"before": Path(folder) / "src", "now": TOP / "src"}
        for size, count in itertools.product(sizes, threads):
            rows += measure(sources, Path(folder), size, count, given)
    if given.record is not None:
        settings = {
            "before": RecordedSetting(given.before, "flag"),
            "streams": RecordedSetting(STREAMS, "default"),
            "sizes": RecordedSetting(sizes, "flag" if given.size else "default"),
            **{name: RecordedSetting(getattr(given, name), "flag") for name in ("tier", "rounds")},
            "threads": RecordedSetting(threads, "flag" if given.threads else "default"),
            "sample_bytes": RecordedSetting(given.sample_bytes, "flag"),
        }
        record = make_record("batches", settings=settings, seed=given.seed, results=rows, directory=given.dir)
        write_json("--record", given.record, record)


if __name__ == "__main__":
    main()
