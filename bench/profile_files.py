"""Profiles stores and loads of files and of host memory: system calls, processor time and functions for each object.

    python bench/profile_files.py --dir DIR --record bench/records/profile_files.json

A tier is full and is driven by a mover, as in an engine. Host memory is full, too, and is driven by a session. Each
count comes from a pass of its own, so none slows another: processor time without tools, system calls from `strace -f
-c`, functions from cProfile in every thread. The ceilings of files are fio with as many jobs as threads, and the file
system called from one Python thread (`RawFiles` creates and renames, `RawSegment` overwrites). That of host memory is a
plain copy with as many threads. Processor time is in seconds for each GB of 10^9 bytes.
"""

import argparse
import cProfile
import itertools
import os
import pstats
import re
import resource
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.report.output import write_json
from kvtier.runtime.arena import Arena
from kvtier.runtime.mover import Threads
from kvtier.tier.files.direct import aligned_buffer, can_direct
from kvtier.tier.files.raw_client import RawFiles, RawSegment
from kvtier.tools.bench.io import Fio
from kvtier.tools.bench.io_harness import (
    BLOCKS,
    CHUNK_TOKENS,
    PROC_IO,
    FullTier,
    chunk_key,
    engine_blocks,
    layout_of,
    memcpy,
    open_session,
    session_load,
    session_store,
)
from kvtier.tools.run_record import RecordedSetting, make_record
from kvtier.types import ObjectName, Place, Prefix

OPS = ("store", "load")
HOST = "host"
TIERS, SIZES, THREADS = ("directory", "disk", HOST), (512 << 10, 4 << 20), (2,)
FUNCTIONS = 25
"""Functions with the most time of their own that the record keeps."""
_ROW = re.compile(r"\s*[\d.]+\s+([\d.]+)\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)")


def timed(act: Callable[[], object], gigabytes: float, count: int) -> dict[str, float]:
    """Run `act`, and return its rate, its processor time and what it does for each of its `count` objects."""
    before, start_s, moved = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), _moved()
    act()
    seconds, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
    took = {name: getattr(after, f"ru_{name}") - getattr(before, f"ru_{name}") for name in ("utime", "stime", "nvcsw")}
    calls_bytes, device_bytes = (now - then for now, then in zip(_moved(), moved, strict=True))
    return {
        "gb_per_s": gigabytes / seconds,
        "cpu_s_per_gb": (took["utime"] + took["stime"]) / gigabytes,
        "user_s_per_gb": took["utime"] / gigabytes,
        "system_s_per_gb": took["stime"] / gigabytes,
        "waits_per_object": took["nvcsw"] / count,
        "bytes_in_calls_per_object": calls_bytes / count,
        "bytes_on_device_per_object": device_bytes / count,
    }


def _moved() -> tuple[int, int]:
    """Return the bytes that this process passed to read and write calls, and those that went to or from the device."""
    rows = dict(line.split(": ") for line in PROC_IO.read_text().splitlines())
    return int(rows["rchar"]) + int(rows["wchar"]), int(rows["read_bytes"]) + int(rows["write_bytes"])


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(statistics.median(each[name] for each in samples), 4) for name in samples[0]}


@contextmanager
def traced_calls(count: int, into: dict[str, Any]) -> Generator[None]:
    """Count this process's system calls in the `with` block, for each of its `count` objects."""
    with tempfile.NamedTemporaryFile("r") as file:
        command = ["strace", "-f", "-c", "-o", file.name, "-p", str(os.getpid())]
        tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        tracer.stderr.readline()  # it is attached
        time.sleep(0.2)  # to the other threads, too
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.communicate(timeout=30)
        rows = sorted(_ROW.findall(file.read()), key=lambda row: -int(row[1]))
        for seconds, calls, name in rows:
            if name != "total" and int(calls) >= count // 10:
                into[name] = {"calls": round(int(calls) / count, 2), "us": round(1e6 * float(seconds) / count, 1)}


def functions(profiles: list[cProfile.Profile], count: int) -> list[dict[str, Any]]:
    """Return the functions with the most time of their own, in calls and microseconds for each object."""
    stats = pstats.Stats(*(it for it in profiles if it.getstats())).stats  # pyright: ignore[reportAttributeAccessIssue]
    rows = sorted(((own_s, calls, place) for place, (_, calls, own_s, _, _) in stats.items()), reverse=True)
    total = sum(calls for _, calls, _ in rows)
    top = [
        {"function": f"{Path(path).name}:{name}", "calls": round(calls / count, 2), "us": round(1e6 * own_s / count, 1)}
        for own_s, calls, (path, _, name) in rows[:FUNCTIONS]
    ]
    return [{"function": "all", "calls": round(total / count, 1)}, *top]


class HostMemory:
    """Full host memory that stores and loads like a `FullTier`. Each store evicts the chunks of the one before."""

    def __init__(self, size: int, count: int, threads: int) -> None:
        layout, engine, self._store_number = layout_of(size), engine_blocks(size, count), 0
        self._places = [Place(0, n, tuple(range(n * BLOCKS, (n + 1) * BLOCKS))) for n in range(count)]
        self._open = ExitStack()
        arena = self._open.enter_context(closing(Arena(layout, (count + 2,), populate=True)))
        opened = open_session(layout, arena, count + 2, engine, threads=Threads(device=threads))
        self._session = self._open.enter_context(opened)

    def store(self) -> None:
        """Store new chunks."""
        self._store_number += 1
        session_store(self._session, self._prefix(), self._places)

    def load(self) -> None:
        """Load the chunks of the last store."""
        session_load(self._session, self._prefix(), self._places)

    def close(self) -> None:
        """Close the session."""
        self._open.close()

    def _prefix(self) -> Prefix:
        first = self._store_number * len(self._places)
        return Prefix(tuple(chunk_key(first + n) for n in range(len(self._places))), CHUNK_TOKENS)


def opened_place(word: str, size: int, threads: int, count: int, root: Path) -> FullTier | HostMemory:
    """Open the place that `word` names: host memory, or a full tier in `root`."""
    return HostMemory(size, count, threads) if word == HOST else FullTier(word, root, size, count, threads)


def profile(word: str, size: int, threads: int, given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Return the profile of each operation on a full tier in `root`, or on full host memory."""
    count = max(8, given.sample_bytes // size)
    gigabytes = count * size / 1e9
    tier = opened_place(word, size, threads, count, root / "plain")
    acts = {"store": tier.store, "load": tier.load}
    found: dict[str, Any] = {op: {"system_calls_per_object": {}} for op in OPS}
    tier.store()
    tier.store()
    samples = [{op: timed(acts[op], gigabytes, count) for op in OPS} for _ in range(given.rounds)]
    for op in OPS:
        found[op] |= {"objects": count, **medians([each[op] for each in samples])}
        with traced_calls(count, found[op]["system_calls_per_object"]):
            acts[op]()
    tier.close()
    profiles: list[cProfile.Profile] = []

    def begin(*_: object) -> None:
        profiles.append(cProfile.Profile())
        profiles[-1].enable()  # replaces this function in the thread

    threading.setprofile(begin)
    tier = opened_place(word, size, threads, count, root / "profiled")
    threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    acts = {"store": tier.store, "load": tier.load}
    tier.store()
    tier.store()
    for op in OPS:
        for each in profiles:
            each.clear()
        acts[op]()
        found[op]["functions"] = functions(profiles, count)
    tier.close()
    return found


def copying(size: int, threads: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return what a plain copy of memory reaches."""
    engine = engine_blocks(size, max(8, given.sample_bytes // size))
    twin = [np.zeros_like(blocks) for blocks in engine]
    memcpy(engine, twin, threads)
    reached = statistics.median(memcpy(engine, twin, threads) for _ in range(given.rounds))
    return {op: {"memcpy_gb_per_s": round(reached, 3)} for op in OPS}


def ceilings(size: int, threads: int, given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Return what fio and plain files reach in `root`."""
    count = max(8, given.sample_bytes // size)
    gigabytes = count * size / 1e9
    fio = Fio(root, block_bytes=size, threads=threads, total_bytes=count * size)
    fio.measure("store")
    reached = {op: [fio.measure(op).gb_per_s for _ in range(given.rounds)] for op in OPS}
    fio.close()
    found: dict[str, Any] = {op: {"fio_gb_per_s": round(statistics.median(reached[op]), 3)} for op in OPS}
    names = [ObjectName(number.to_bytes(32, "big")) for number in range(count)]
    frame = aligned_buffer(size)
    frame[:] = np.random.default_rng(1).integers(0, 256, size, np.uint8).data
    for kind in (RawFiles, RawSegment):
        client = kind(root / kind.__name__, direct=can_direct(str(root)))
        acts: dict[str, Callable[[], object]] = {
            "store": lambda client=client: [client.put(name, frame) for name in names],
            "load": lambda client=client: [client.get(name, frame) for name in names],
        }
        samples: list[dict[str, dict[str, float]]] = []
        for number in range(given.rounds + 1):
            for name in names if number else ():
                client.delete(name)
            samples.append({op: timed(acts[op], gigabytes, count) for op in OPS})
        client.close()
        for op in OPS:
            found[op][kind.__name__] = medians([each[op] for each in samples[1:]])
    return found


def main() -> None:
    """Profile the tiers, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tier", action="append", help=f"a kind of tier, or {HOST}; several times for several")
    parser.add_argument("--size", type=int, action="append", help="bytes of an object; several times")
    parser.add_argument("--threads", type=int, action="append", help="read threads, and as many write threads")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample-bytes", type=int, default=256 << 20, help="moved by one store or load")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the drive in question")
    parser.add_argument("--record", type=Path, help="write the JSON record to this file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tiers, sizes, counts = given.tier or TIERS, given.size or SIZES, given.threads or THREADS
    for size, threads in itertools.product(sizes, counts):
        with tempfile.TemporaryDirectory(prefix="kvtier-profile-", dir=given.dir) as folder:
            limits, copied = ceilings(size, threads, given, Path(folder)), copying(size, threads, given)
        for word in tiers:
            with tempfile.TemporaryDirectory(prefix="kvtier-profile-", dir=given.dir) as folder:
                found = profile(word, size, threads, given, Path(folder))
            for op in OPS:
                ceiling = (copied if word == HOST else limits)[op]
                row = {"tier": word, "op": op, "object_bytes": size, "threads": threads, "ceiling": ceiling}
                rows.append(row | found[op])
                for name, value in rows[-1].items():
                    print(f"{name}: {value}" if name != "functions" else "\n".join(map(str, value)), flush=True)
    if given.record is not None:
        settings = {
            "tiers": RecordedSetting(tiers, "flag" if given.tier else "default"),
            "sizes": RecordedSetting(sizes, "flag" if given.size else "default"),
            "threads": RecordedSetting(counts, "flag" if given.threads else "default"),
            **{name: RecordedSetting(getattr(given, name), "flag") for name in ("rounds", "sample_bytes")},
        }
        record = make_record("profile_files", settings=settings, seed=1, results=rows, directory=given.dir)
        write_json("--record", given.record, record)


if __name__ == "__main__":
    main()
