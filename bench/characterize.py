"""Shows what the drive sees of kvtier's disk and directory tiers and of LMCache's file backend, under one load.

    python3 -m venv peer && peer/bin/pip install lmcache==0.5.6 torch
    python bench/characterize.py --lmcache peer/bin/python --dir DIR --record bench/records/characterize.json \
        --picture docs/images/characterize.svg

Each backend is a process of its own that runs the conversations of `bench/parts/object_load.py`, while the kernel's
block layer is captured (`kvtier characterize`). It needs root. kvtier's tiers are full and replace victims, and verify
what they load. LMCache's native file backend runs in its best configuration: O_DIRECT, aligned memory in huge pages,
and as many workers as kvtier has threads. Then it runs in its default configuration with the page cache. Each
repetition starts with another backend. `python bench/tables.py` makes the table of docs/internals/measurements.md from
the record.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
from bench.parts.command import picture_option, record_option, recorded_settings
from bench.parts.command import run as run_script
from bench.parts.object_load import ObjectLoad
from bench.parts.samsung_io import paper_table

from kvtier.cli.options import tell_written
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.tools.bench.io import HUGE_PAGES
from kvtier.tools.characterize.capture import CaptureSettings
from kvtier.tools.characterize.capture import run as capture
from kvtier.tools.characterize.io_trace import NO_PROCESS, IoLayer, IoTrace, transfers
from kvtier.tools.characterize.io_trace_readers import ObjectLog, WriteAmplification, read_objects, write_amplification
from kvtier.tools.characterize.measures import IoMeasures, measure
from kvtier.tools.charts.chart import Axis, Chart, Curve, write_charts
from kvtier.tools.options import Bytes, WorkDirectory, ended_by_signals
from kvtier.tools.run_record import make_record

PARTS = Path(__file__).parent / "parts"
DEADLINE_S = 900.0
ARMS = ("disk", "directory", "lmcache", "lmcache, page cache")
QUIET = ("LMCACHE_TRACK_USAGE=false", "LMCACHE_LOG_LEVEL=ERROR", "LMCACHE_DISABLE_BANNER=1")
POINTS_MAX = 1500
"""The most requests of one arm in the picture. If there are more, every n-th is drawn."""
SIZE_INCHES = (4.2, 3.4)
"""Size of one map."""
MARGIN = 3
"""Space needed, as a multiple of the load's objects. kvtier's tiers are full, so they need it twice, and a reserve."""


@dataclass(frozen=True, slots=True)
class Objects:
    """The backend as the application sees it. GB is 10^9 bytes of payload."""

    reads: int
    writes: int
    gb_per_s: float
    read_ms: dict[str, float]
    """``p50`` and ``p99`` of one object. In LMCache an object ends with its call, which has up to four objects."""
    write_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One backend and one size of objects, in one repetition."""

    arm: str
    repetition: int
    chunk_bytes: int
    seconds: float
    objects: Objects
    device: IoMeasures
    """What the device saw from the backend's process."""
    amplification: WriteAmplification
    requests_per_object: float
    """Requests of the device, per object."""
    later_bytes: int
    """Bytes that the process and kernel threads wrote after the load, while the file systems were synced."""


def measure_arms(
    lmcache: Path,
    directory: Path,
    *,
    sizes: Sequence[int],
    arms: Sequence[str],
    streams: int,
    turns: int,
    conversations: int,
    threads: int,
    repeats: int,
    tick: Callable[[float], None] = lambda _steps: None,
) -> tuple[list[ArmRow], dict[tuple[str, int], np.ndarray]]:
    """Run every arm with every size, in turn.

    Args:
        lmcache: Python of LMCache's environment.
        directory: a directory on the drive to measure; all files go to a temporary directory in it.
        sizes: payload bytes of an object.
        arms: names of `ARMS`.
        streams: number of conversations at once.
        turns: number of turns of a conversation.
        conversations: number of conversations of a stream.
        threads: kvtier's threads, and LMCache's workers.
        repeats: number of repetitions.
        tick: called with 1 after each arm of each size.

    Returns:
        The rows, and for each arm and size the requests of the device in its last repetition.

    Raises:
        ConfigError: the right to capture is missing, there is too little room, or a backend failed.
    """
    rows: list[ArmRow] = []
    requests: dict[tuple[str, int], np.ndarray] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        for repetition, size in product(range(repeats), sizes):
            load = ObjectLoad(size, streams, turns, conversations)
            needed, free = MARGIN * load.objects * size, shutil.disk_usage(place).free
            if needed > free:
                raise ConfigError(
                    f"{size_text(free)} are free in {str(directory)!r}, and objects of {size_text(size)} need "
                    f"{size_text(needed)}; allowed: a smaller --size, fewer --streams or --turns, another --dir"
                )
            first = repetition % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                root = Path(place) / f"store-{len(rows)}"
                journal = Path(place) / f"journal-{len(rows)}"
                try:
                    seen = _captured(_command(arm, lmcache, root, journal, load, threads), directory)
                finally:
                    shutil.rmtree(root, ignore_errors=True)
                log = read_objects([journal])
                rows.append(arm_row(arm, repetition, size, seen, log))
                at_device = during(seen, log.trace).at(IoLayer.DEVICE)
                requests[arm, size] = transfers(seen.of_chosen(at_device))
                tick(1)
    return rows, requests


def _command(arm: str, lmcache: Path, root: Path, journal: Path, load: ObjectLoad, threads: int) -> list[str]:
    shared = ["--root", str(root), "--journal", str(journal), f"--threads={threads}", *load.arguments()]
    if not arm.startswith("lmcache"):
        return [sys.executable, str(PARTS / "tier_objects.py"), "--kind", arm, *shared]
    direct = str(int(arm == "lmcache"))
    script = str(PARTS / "lmcache_objects.py")
    return ["env", *QUIET, HUGE_PAGES, str(lmcache), script, "--direct", direct, *shared]


def _captured(command: Sequence[str], directory: Path) -> IoTrace:
    found = capture(CaptureSettings(device=str(directory), command=command, seconds=DEADLINE_S, output=2))
    if found.exit_code:
        raise ConfigError(f"{' '.join(command[:8])} ... failed with code {found.exit_code}; its messages are above")
    if found.exit_code is None:
        raise ConfigError(f"{' '.join(command[:8])} ... took longer than {DEADLINE_S:g} s")
    return found.trace


def during(trace: IoTrace, other: IoTrace) -> IoTrace:
    """Return `trace` without requests issued before `other` began or after it ended."""
    offset_s = other.began_s - trace.began_s
    issued_s = trace.requests["issued_s"]
    kept = trace.requests[(issued_s >= offset_s) & (issued_s <= offset_s + other.seconds)].copy()
    kept["issued_s"] -= offset_s
    kept["completed_s"] -= offset_s
    return replace(trace, requests=kept, began_s=other.began_s, seconds=other.seconds)


def arm_row(arm: str, repetition: int, size: int, seen: IoTrace, log: ObjectLog) -> ArmRow:
    """Return what one arm measured.

    Args:
        arm: name of the arm.
        repetition: number of the repetition, from 0.
        size: payload bytes of an object.
        seen: the capture, from before the load until after it.
        log: the load's journal.
    """
    objects = log.trace.requests
    took_ms = (objects["completed_s"] - objects["issued_s"]) * 1e3
    is_write = objects["is_write"]
    while_it_ran = during(seen, log.trace)
    # If the device had no request, the layer above would be measured.
    device = measure(replace(while_it_ran, requests=while_it_ran.at(IoLayer.DEVICE)))
    writes = transfers(seen.at(IoLayer.DEVICE))
    writes = writes[writes["is_write"] & (writes["issued_s"] > log.trace.began_s - seen.began_s + log.trace.seconds)]
    later = int(seen.of_chosen(writes)["bytes"].sum()) + int(writes["bytes"][writes["process"] == NO_PROCESS].sum())
    return ArmRow(
        arm=arm,
        repetition=repetition,
        chunk_bytes=size,
        seconds=round(log.trace.seconds, 3),
        objects=Objects(
            reads=int((~is_write).sum()),
            writes=int(is_write.sum()),
            gb_per_s=round(int(log.payload_bytes.sum()) / log.trace.seconds / 1e9, 3),
            read_ms=_percentiles(took_ms[~is_write]),
            write_ms=_percentiles(took_ms[is_write]),
        ),
        device=device,
        amplification=write_amplification(log, while_it_ran),
        requests_per_object=round(device.requests / len(objects), 2),
        later_bytes=later,
    )


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{percent}": round(float(np.percentile(values, percent)), 3) for percent in (50, 99)}


def without_gaps(rows: np.ndarray) -> np.ndarray:
    """Return for each request the number of bytes below its first byte that any request covers."""
    order = np.argsort(rows["position"], kind="stable")
    begin = rows["position"][order].astype(np.int64)
    reach = np.maximum.accumulate(begin + rows["bytes"][order].astype(np.int64))
    above = np.concatenate([begin[:1], np.maximum(begin[1:], reach[:-1])])
    new = np.maximum(reach - above, 0)
    below = np.empty(len(rows), np.int64)
    # A request that overlaps an earlier one begins below the end of what is counted so far.
    below[order] = np.cumsum(new) - new - np.maximum(above - begin, 0)
    return below


def _map(heading: str, rows: np.ndarray) -> Chart:
    every = max(1, len(rows) // POINTS_MAX)
    place_gb = without_gaps(rows) / 1e9
    marks: list[Curve] = []
    for is_write, label, colour in ((False, "read", "disk"), (True, "write", "tiered")):
        of_way = np.flatnonzero(rows["is_write"] == is_write)
        shown = of_way[:: every if len(of_way) > POINTS_MAX // 3 else 1]
        x, y = rows["issued_s"][shown], place_gb[shown]
        marks.append(Curve(x=x, y=y, colour=colour, dash="", marker=".", label=f"{label} ({len(of_way):,})"))
    return Chart(heading=heading, marks=marks, x=Axis(label="seconds"), y=Axis(label="address, gaps left out, GB"))


def draw_maps(path: Path, requests: dict[tuple[str, int], np.ndarray], size: int) -> None:
    """Draw addresses over time of the arms with direct I/O, side by side.

    Raises:
        ConfigError: the file cannot be written.
    """
    charts = {
        arm: _map(f"{arm}, objects of {size_text(size)}", rows)
        for (arm, of_size), rows in requests.items()
        if of_size == size and "page cache" not in arm
    }
    write_charts("--picture", path, charts, SIZE_INCHES, columns=len(charts))


def table(rows: Sequence[ArmRow]) -> Table:
    """The rows for a terminal."""
    lines = [
        (
            row.arm,
            size_text(row.chunk_bytes),
            str(row.repetition),
            f"{row.objects.gb_per_s:.2f}",
            f"{row.objects.read_ms['p99']:.0f}",
            f"{row.requests_per_object:.1f}",
            size_text(int(row.device.request_bytes["p50"])),
            f"{row.device.sequential_share['per_process'] or 0:.0%}",
            f"{row.device.queue_depth['mean']:.0f} / {row.device.queue_depth['peak']:.0f}",
            f"{row.device.gb_per_s['mean']:.2f}",
            f"{row.amplification.device_ratio or 0:.2f}",
        )
        for row in rows
    ]
    heads = ("backend", "object", "repetition", "GB/s", "read p99 ms", "requests", "median", "sequential", "depth")
    return Table((*heads, "device GB/s", "written / payload"), lines, title="One load, each backend in turn", numeric=2)


def as_results(rows: Sequence[ArmRow]) -> dict[str, Any]:
    """Return the rows for a record, without figures over time or of single processes."""
    found: list[dict[str, Any]] = []
    for row in rows:
        fields = asdict(row)
        for name in ("over_time", "processes", "sequential_by_last"):
            del fields["device"][name]
        amplification = row.amplification
        fields["amplification"] |= {
            "framed_ratio": amplification.framed_ratio,
            "device_ratio": amplification.device_ratio,
        }
        found.append(fields)
    return {"results": found}


@click.command()
@click.option("--lmcache", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True,
              help="Python of LMCache's environment.")  # fmt: skip
@click.option("--dir", "directory", type=WorkDirectory(), default=Path(), help="On the drive to measure.  [here]")
@click.option("--size", "sizes", type=Bytes(), multiple=True, default=("4MiB", "32MiB"), show_default=True,
              help="Bytes of an object, repeatable.")  # fmt: skip
@click.option("--arm", "arms", type=click.Choice(ARMS), multiple=True, default=ARMS, show_default=True)
@click.option("--streams", type=click.IntRange(1, 256), default=8, show_default=True, help="Conversations at once.")
@click.option("--turns", type=click.IntRange(2, 1000), default=24, show_default=True,
              help="Of a conversation; 24 read 92 % of the objects.")  # fmt: skip
@click.option("--conversations", type=click.IntRange(1, 1000), default=1, show_default=True, help="Of a stream.")
@click.option("--threads", type=click.IntRange(1, 64), default=8, show_default=True, help="Threads, and workers.")
@click.option("--repeats", type=click.IntRange(1, 100), default=3, show_default=True, help="Repetitions, in turn.")
@record_option
@picture_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def characterize(directory: Path, record: Path | None, picture: Path | None, as_json: bool, **given: Any) -> None:  # noqa: ANN401, FBT001 - flags
    """What the drive sees of kvtier's tiers and of LMCache's file backend, under one load."""
    load_average = [os.getloadavg()[0]]
    steps = given["repeats"] * len(given["sizes"]) * len(given["arms"])
    with ended_by_signals(), progress("characterize", steps) as advance:
        rows, requests = measure_arms(directory=directory, tick=advance, **given)
    load_average.append(os.getloadavg()[0])
    results = as_results(rows) | {"load_average": load_average}
    if record is not None:
        settings = recorded_settings(given)
        made = make_record("characterize", settings=settings, seed=1, results=results, directory=directory)
        write_json("--record", record, made)
        tell_written(record)
    if picture is not None:
        draw_maps(picture, requests, max(given["sizes"]))
        tell_written(picture)
    if as_json:
        print_json(results)
    else:
        print_table(table(rows))
        for row in rows:
            if row.repetition == given["repeats"] - 1:
                print_table(paper_table(row.device, f"{row.arm}, {size_text(row.chunk_bytes)}, beside Samsung's paper"))


if __name__ == "__main__":
    run_script(characterize)
