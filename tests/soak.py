"""Runs many operations on every kind of tier while processes and servers are killed and stopped.

Run it as `python -m tests.soak`. For each kind, processes work on one store and compare every byte that they get. This
process kills them, stops them and harms the store. Two kinds run at a time. It prints a table, writes a record, and
exits 1 unless all is right.
"""

import argparse
import json
import logging
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tests.soak_places import COLUMNS, CONTROLS, KINDS, Counts, Opened, Place

from kvtier.errors import TierError
from kvtier.tools.run_record import commit

OPERATIONS = 1_000_000
SHARES = {"s3_ceph": 0.2}
"""Share of the operations that a slow server gets. The small S3 server gets all of them."""
NOTE = """
operations: objects that were written, read, deleted or looked up. compared: objects of which every byte was compared.
faults: of servers, networks, files and devices. s3 is a small server of the tests, s3_ceph a fifth of the operations on
Ceph's gateway.
"""
PROCESSES = 2
"""Processes for each kind. One continues while the other is killed or stopped."""
FAULTS = 100
"""Faults for each kind and million operations."""
STOPPED_S = 1.5
OPENING_S = 60.0
RIGHT_MIN = 0.05
"""Least share of operations that return bytes to compare. With less, the soak proves little."""
STALL_S = 180.0
"""A kind in which nothing happens for this long has failed."""


def work(open_place: Callable[[int], Opened], folder: Path, number: int, seed: int, operations: int) -> None:
    """Run as a process: make steps until all processes of the kind have done `operations`."""
    logging.basicConfig(filename=folder / "log")
    sys.stdout = (folder / "printed").open("a")  # repairs print what they did
    table = table_of(folder)
    try:
        opened = patiently(open_place, number)

        def run(thread: int) -> None:
            step = opened.step(random.Random(f"{seed} {thread}"), Counts(table[number * 2 + thread]))
            while table[:, 0].sum() < operations:
                step()

        with ThreadPoolExecutor(opened.threads) as threads:
            for done in [threads.submit(run, thread) for thread in range(opened.threads)]:
                done.result()
        opened.close()
    except BaseException:  # noqa: BLE001 - it is reported
        with (folder / "failures").open("a") as file:
            file.write(traceback.format_exc())
        raise SystemExit(1) from None


def patiently(open_place: Callable[[int], Opened], number: int) -> Opened:
    """Open a store whose server may be down, and which children of a killed process may lock a little longer."""
    end_s = time.monotonic() + OPENING_S
    while time.monotonic() < end_s:
        with suppress(TierError):
            return open_place(number)
        time.sleep(0.2)
    return open_place(number)


def table_of(folder: Path, mode: Any = "r+") -> Any:
    """Map the counts of all threads, with a row for each."""
    return np.memmap(folder / "counts", np.int64, mode, shape=(2 * PROCESSES, len(COLUMNS)))


class Row:
    """One kind, or an object store in front of it."""

    def __init__(self, name: str, folder: Path, operations: int) -> None:
        self.name, self.folder, self.wanted = name, folder, operations
        self.harm: Counter[str] = Counter()
        self.seconds = 0.0
        folder.mkdir(parents=True)
        self.table = table_of(folder, "w+")

    def count(self, *columns: str) -> int:
        return int(sum(self.table[:, COLUMNS.index(column)].sum() for column in columns))

    def fail(self, why: str) -> None:
        with (self.folder / "failures").open("a") as file:
            file.write(f"{why}\n")

    @property
    def failures(self) -> str:
        path = self.folder / "failures"
        return path.read_text() if path.exists() else ""

    @property
    def is_right(self) -> bool:
        done = self.count("operations")
        return not self.failures and done >= self.wanted and self.count("right") > done * RIGHT_MIN

    def summary(self) -> dict[str, Any]:
        """Return the figures for the table and the record."""
        return {
            "kind": self.name,
            "operations": self.count("operations"),
            "compared": self.count("right"),
            "kills": self.harm["kill"],
            "stops": self.harm["stop"],
            "faults": self.harm["fault"] + self.count("begun", "damaged", "lost", "forked"),
            "wrong": self.failures.count("AssertionError: wrong bytes") + self.failures.count("with a new owner"),
            "seconds": round(self.seconds),
            "is_right": self.is_right,
        }


class Processes(dict[int, Any]):
    """The processes of a row by number, which can be killed and stopped."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance

    def kill(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self[number].kill()
            self[number].join(30)

    def stop(self, seconds: float, chosen: Sequence[int] = range(PROCESSES)) -> None:
        """Stop all processes, or those that are chosen."""
        pids = [self[number].pid for number in chosen if self[number].is_alive()]
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(seconds if signum == signal.SIGSTOP else 0)


def drive(row: Row, place: Place, opens: Callable[[int], Opened], processes: Processes) -> None:
    """Run the processes of a row and harm them, until the operations are done or something is wrong."""
    chance, context = processes.chance, multiprocessing.get_context("forkserver")

    def begin(number: int) -> None:
        given = (opens, row.folder, number, chance.randrange(1 << 30), row.wanted)
        processes[number] = context.Process(target=work, args=given, daemon=True)
        processes[number].start()

    shares = [4, 2, 5 if place.faults else 0]
    spacing = max(1000, round(OPERATIONS / FAULTS / place.rate))
    began_s = moved_s = time.monotonic()
    last, next_harm = 0, min(spacing, row.wanted) // 2
    try:
        for number in range(PROCESSES):
            begin(number)
        while any(each.is_alive() for each in processes.values()) and not row.failures:
            time.sleep(0.02)
            now_s, done = time.monotonic(), row.count("operations")
            row.seconds = now_s - began_s
            if done != last:
                last, moved_s = done, now_s
            elif now_s - moved_s > STALL_S:
                row.fail(f"nothing happened for {STALL_S:g} s")
            if next_harm <= done < row.wanted and not row.failures:
                next_harm = done + spacing
                (what,) = chance.choices(["kill", "stop", "fault"], shares)
                row.harm[what] += 1
                if what == "fault":
                    chance.choice(place.faults)()
                elif what == "stop":
                    processes.stop(STOPPED_S, [chance.randrange(PROCESSES)])
                else:
                    processes.kill([number := chance.randrange(PROCESSES)])
                    begin(number)
                place.heal()
    finally:
        processes.kill([*processes])


def soak_kind(kind: str, folder: Path, rows: Sequence[tuple[Row, str]], seed: int) -> None:
    """Run the rows of one kind, one after the other."""
    processes = Processes(random.Random(f"{seed} {kind}"))
    try:
        with (KINDS | CONTROLS)[kind](folder, processes.chance, processes.stop) as place:
            for row, what in rows:
                if not row.failures:  # nothing has interrupted it
                    drive(row, place, getattr(place, what), processes)
    except Exception:  # noqa: BLE001 - whatever it is, the row has failed
        for row, _ in rows:
            if row.count("operations") < row.wanted:
                row.fail(traceback.format_exc())


def progress(rows: Sequence[Row]) -> str:
    """Say how far the rows are that have begun and not ended."""
    shares = {row.name: row.count("operations") / row.wanted for row in rows}
    running = [f"{name} {share:.0%}" for name, share in shares.items() if 0 < share < 1]
    done, compared = (sum(row.count(column) for row in rows) for column in ("operations", "right"))
    return f"{done:,} operations, {compared:,} compared | {', '.join(running)}"


def render(summaries: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    columns = [it for it in summaries[0] if it != "is_right"]
    lines = [columns, *([f"{row[it]:,}" if it != "kind" else row[it] for it in columns] for row in summaries)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    marks = ["", *("" if row["is_right"] else "  FAILED" for row in summaries)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + mark
        for row, mark in zip(lines, marks, strict=True)
    )


def main() -> int:
    """Run the soak that the arguments describe."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of each kind (default 1,000,000)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join([*KINDS, *CONTROLS])} (default: all)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), help="default: random")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    parser.add_argument("--folder", default=memory, help=f"for all files (default: {memory or 'a temporary one'})")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := set(kinds) - {*KINDS, *CONTROLS}:
        parser.error(f"--kinds {', '.join(sorted(unknown))}; allowed: {', '.join([*KINDS, *CONTROLS])}")
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=arguments.folder))
    with_objects = [kind for kind in kinds if kind in KINDS and kind not in SHARES]
    rows: list[Row] = []
    with ThreadPoolExecutor(2) as threads:
        running = []
        for kind in kinds:
            wanted = round(arguments.operations * SHARES.get(kind, 1))
            mine = [(Row(kind, folder / kind / "tier", wanted), "tier")]
            if kind in with_objects:
                share = -(-arguments.operations // len(with_objects))
                mine.append((Row(f"object store on {kind}", folder / kind / "objects", share), "objects"))
            rows += [row for row, _ in mine]
            running.append(threads.submit(soak_kind, kind, folder / kind, mine, arguments.seed))
        every_s, end = (1, "\x1b[K\r") if sys.stdout.isatty() else (15, "\n")
        try:
            while wait(running, every_s).not_done:
                print(progress(rows), end=end, flush=True)
        except KeyboardInterrupt:
            for row in rows:
                row.fail("interrupted")
    return report(rows, arguments.seed, arguments.out, folder)


def report(rows: Sequence[Row], seed: int, out: Path | None, folder: Path) -> int:
    """Print and write the results."""
    summaries = sorted((row.summary() for row in rows), key=lambda row: row["kind"].startswith("object"))
    print(f"\n{render(summaries)}\n{NOTE}\n")
    is_right = all(row["is_right"] for row in summaries)
    for row in rows:
        if row.failures:
            print(f"{row.name}:\n{row.failures[-3000:]}")
    if out:
        machine = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
        record = {"commit": commit(), "seed": seed, "machine": machine, "rows": summaries}
        record["failures"] = {row.name: row.failures for row in rows if row.failures}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    if is_right:
        shutil.rmtree(folder)
    print(f"seed {seed}: " + ("all is right" if is_right else f"FAILED; everything is in {folder}"))
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
