"""Measures the object store over a `disk` tier, and fio, in turn in one run.

    python bench/objects.py --dir DIR --record bench/records/objects.json

Objects are pages of 64 tokens of Llama-3.1-8B: K and V of 4 MiB each, in ordinary memory of the caller. The tier is
full and replaces victims. One thread calls, with 128 objects per call. Bytes pass through the staging area and are
packed or verified within the timed part. fio copies and checks nothing.
"""

import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
from bench.parts.command import record_option, recorded_settings
from bench.parts.command import run as run_script

from kvtier.cli.options import tell_written
from kvtier.config.sections import Config, HostConfig
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.report.output import print_json, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tiered_object_store import ObjectStore
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.files.direct import can_direct
from kvtier.tools.bench.io import Fio, has_fio
from kvtier.tools.bench.repeats import Span, ratio, ratio_text
from kvtier.tools.options import Bytes, WorkDirectory, ended_by_signals
from kvtier.tools.run_record import make_record
from kvtier.types import ChunkKey, ObjectBytes, ObjectId, Outcome

PIECE_BYTES = 4 << 20
PAGE_TOKENS = 64
LAYOUT = KvLayout(PAGE_TOKENS, (GroupLayout(History(), (PIECE_BYTES, PIECE_BYTES), "bench/objects"),))
OBJECT_BYTES = 2 * PIECE_BYTES
NAMES = 2048
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class ObjectsRow:
    """Medians of one operation."""

    op: str
    """``put``, ``get``, ``memcpy``, ``leading_run`` or ``contains``."""
    gb_per_s: float | None
    ratio: float | None
    """Ratio to fio."""
    ratio_span: Span | None
    ms: float
    """Time of a call."""
    samples: tuple[float, ...]
    """GB/s of each repeat, or milliseconds."""


def measure(
    directory: Path,
    *,
    objects: int,
    repeats: int,
    threads: int,
    tier_threads: int,
    staging_bytes: int,
    tick: Callable[[], None] = lambda: None,
) -> list[ObjectsRow]:
    """Measure every operation.

    Args:
        directory: a directory on the drive to measure; all files go to a temporary directory in it.
        objects: number of objects in one call.
        repeats: samples per row.
        threads: number of fio's jobs.
        tier_threads: number of the tier's read threads, and of its write threads. A thread packs or verifies between
            its requests, so fio's depth needs more of them.
        staging_bytes: `host.staging_bytes`.
        tick: called before each repeat.

    Raises:
        ConfigError: fio is missing or fails, or a call has lost an object.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and its rate is the reference; allowed: install the package fio")
    total_bytes = objects * OBJECT_BYTES
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        root = Path(place)
        tier = DiskSettings(
            path=root / "disk",
            capacity_bytes=int(2 * total_bytes),
            read_threads=tier_threads,
            write_threads=tier_threads,
        )
        config = Config(host=HostConfig(staging_bytes=staging_bytes), tiers=(tier,))
        fio = Fio(root, block_bytes=PIECE_BYTES, threads=threads, total_bytes=total_bytes, is_direct=can_direct(place))
        store = open_object_store(config, LAYOUT, bytes(32))
        try:
            return _rows(store, fio, objects, repeats, tick)
        finally:
            store.close()
            fio.close()


def _rows(store: ObjectStore, fio: Fio, objects: int, repeats: int, tick: Callable[[], None]) -> list[ObjectsRow]:
    source = np.random.default_rng(1).integers(0, 256, (objects, 2, PIECE_BYTES), np.uint8)
    target = np.zeros_like(source)
    rates: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    fio.measure("store")
    for number in range(repeats + 2):  # the first two fill the tier
        is_timed = number >= 2
        ids = [_id(f"{number} {place}") for place in range(objects)]
        if is_timed:
            tick()
        for op, reference in (("put", "store"), ("get", "load")):
            memory, call = (source, store.put_from) if op == "put" else (target, store.get_into)
            target[:, :, ::4096] = 0
            top = fio.measure(reference).gb_per_s if is_timed else 0.0
            spent_s = _call(call, ids, memory)
            if is_timed:
                rates.setdefault(f"fio {op}", []).append(top)
                rates.setdefault(op, []).append(source.nbytes / spent_s / 1e9)
                seconds.setdefault(op, []).append(spent_s)
        if not np.array_equal(source, target):
            raise ConfigError("a get has returned other bytes than were put")
        began_s = time.perf_counter()
        np.copyto(target, source)
        if is_timed:
            rates.setdefault("memcpy", []).append(source.nbytes / (time.perf_counter() - began_s) / 1e9)
    rows = [_rate_row(op, rates, seconds) for op in ("put", "get", "memcpy")]
    many = [_id(f"name {number}") for number in range(NAMES)]
    for op, ask in (("leading_run", store.leading_run), ("contains", store.contains)):
        samples: list[float] = []
        for _ in range(50):
            began_s = time.perf_counter()
            ask(many, DEADLINE_S)
            samples.append(round((time.perf_counter() - began_s) * 1e3, 3))
        rows.append(ObjectsRow(op, None, None, statistics.median(samples), tuple(sorted(samples))))
    return rows


def _id(text: str) -> ObjectId:
    return ObjectId(ChunkKey(hashlib.sha256(text.encode()).digest()))


def _call(call: Callable[[Sequence[ObjectBytes], float], list[Outcome]], ids: list[ObjectId], memory: Any) -> float:  # noqa: ANN401 - array
    items = [ObjectBytes(it, (pieces[0], pieces[1])) for it, pieces in zip(ids, memory, strict=True)]
    began_s = time.perf_counter()
    outcomes = call(items, DEADLINE_S)
    spent_s = time.perf_counter() - began_s
    if set(outcomes) != {Outcome.DONE}:
        counts = {each.value: outcomes.count(each) for each in set(outcomes)}
        raise ConfigError(f"{call.__name__}: {counts}; allowed: all done")
    return spent_s


def _rate_row(op: str, rates: dict[str, list[float]], seconds: dict[str, list[float]]) -> ObjectsRow:
    tops = rates.get(f"fio {op}")
    against = None if tops is None else ratio(rates[op], tops)
    return ObjectsRow(
        op,
        round(statistics.median(rates[op]), 3),
        None if against is None else against.value,
        None if against is None else against.span,
        round(1e3 * statistics.median(seconds[op]), 1) if op in seconds else 0.0,
        tuple(round(rate, 3) for rate in rates[op]),
    )


@click.command()
@click.option("--dir", "directory", type=WorkDirectory(), default=Path(), help="On the drive to measure.  [here]")
@click.option("--objects", type=click.IntRange(1, 4096), default=128, show_default=True, help="Objects of a call.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Samples per row.")
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Jobs of fio.")
@click.option("--tier-threads", type=click.IntRange(1, 64), default=8, show_default=True, help="Threads of the tier.")
@click.option("--staging", "staging_bytes", type=Bytes(), default="256MiB", show_default=True, help="Staging memory.")
@record_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def objects(directory: Path, record: Path | None, as_json: bool, **given: Any) -> None:  # noqa: ANN401, FBT001 - flags
    """The object store over a disk tier, and fio, in turn in one run."""
    with ended_by_signals(), progress("objects", given["repeats"]) as advance:
        rows = measure(directory, tick=lambda: advance(1), **given)
    results = {"results": [asdict(row) for row in rows]}
    if record is not None:
        made = make_record("objects", settings=recorded_settings(given), seed=1, results=results, directory=directory)
        write_json("--record", record, made)
        tell_written(record)
    if as_json:
        print_json(results)
        return
    lines = [
        (
            row.op,
            "" if row.gb_per_s is None else f"{row.gb_per_s:.2f}",
            ratio_text(row.ratio, row.ratio_span),
            f"{row.ms:.2f}" if row.ms else "",
        )
        for row in rows
    ]
    print_table(Table(("op", "GB/s", "of fio", "ms a call"), lines, title=f"Medians of {given['repeats']}", numeric=1))


if __name__ == "__main__":
    run_script(objects)
