"""Measures LMCache's file backends, kvtier's tiers and fio, in turn in one run.

    python3 -m venv peer && peer/bin/pip install lmcache==0.5.6 torch
    python bench/peer.py --lmcache peer/bin/lmcache --dir DIR --record bench/records/peer.json

LMCache runs its own command, `lmcache bench l2`, from an environment of its own, in its best configuration: direct I/O,
aligned buffers, as many workers as kvtier has threads. It does not verify what it loads. kvtier does, inside the timed
part. kvtier's tiers are full and replace victims, while LMCache writes new files without a cap. `python
bench/tables.py` makes the table of docs/internals/measurements.md from the record.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import record_option, recorded_settings
from bench.parts.command import run as run_script

from kvtier.cli.options import tell_written
from kvtier.config.value_types import size_text
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.tier.files.direct import can_direct
from kvtier.tools.bench.io import Fio, has_fio
from kvtier.tools.bench.io_harness import FullTier
from kvtier.tools.bench.repeats import Span, ratio, ratio_text
from kvtier.tools.options import Bytes, WorkDirectory, ended_by_signals
from kvtier.tools.run_record import make_record

BACKENDS = ("fs", "fs_native")
DEADLINE_S = 600.0
QUIET = ("LMCACHE_TRACK_USAGE=false", "LMCACHE_LOG_LEVEL=ERROR", "LMCACHE_DISABLE_BANNER=1")


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Medians of one system, operation and size."""

    system: str
    """``fio``, ``kvtier disk``, ``kvtier directory``, ``lmcache fs`` or ``lmcache fs_native``."""
    op: str
    chunk_bytes: int
    gb_per_s: float
    ratio: float
    """Ratio to fio."""
    ratio_span: Span
    samples: tuple[float, ...]
    """GB/s of each repeat."""


def measure(
    lmcache: Path,
    directory: Path,
    *,
    sizes: Sequence[int],
    threads: int,
    repeats: int,
    sample_bytes: int,
    tick: Callable[[str], None] = lambda _what: None,
) -> list[PeerRow]:
    """Measure every size.

    Args:
        lmcache: the `lmcache` command.
        directory: a directory on the drive to measure; all files go to a temporary directory in it.
        sizes: bytes of an object.
        threads: number of kvtier's threads, of LMCache's workers and of fio's jobs.
        repeats: samples per row.
        sample_bytes: bytes moved by one sample.
        tick: called before each repeat.

    Raises:
        ConfigError: fio or LMCache is missing or fails.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and its rate is the reference; allowed: install the package fio")
    rows: list[PeerRow] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        root = Path(place)
        for size in sizes:
            count = max(2, sample_bytes // size)
            rows += _rows(lmcache, root, size, count, threads, repeats, tick)
    return rows


def _rows(
    lmcache: Path, root: Path, size: int, count: int, threads: int, repeats: int, tick: Callable[[str], None]
) -> list[PeerRow]:
    found: dict[tuple[str, str], list[float]] = {}
    gigabytes = count * size / 1e9
    is_direct = can_direct(str(root))
    ceiling = Fio(root, block_bytes=size, threads=threads, total_bytes=count * size, is_direct=is_direct)
    disks = [FullTier(name, root / name, size, count, threads) for name in ("directory", "disk")]
    try:
        ceiling.measure("store")
        for disk in disks:
            disk.store()
            disk.store()
        for _ in range(repeats):
            tick(f"{size}")
            for op in ("store", "load"):
                found.setdefault(("fio", op), []).append(ceiling.measure(op).gb_per_s)
                for disk in disks:
                    spent = disk.store() if op == "store" else disk.load()
                    found.setdefault((f"kvtier {disk.name}", op), []).append(gigabytes / spent.seconds)
            for backend in BACKENDS:
                adapter: dict[str, object] = {
                    "type": backend,
                    "base_path": str(root / "peer"),
                    "use_odirect": is_direct,
                }
                if backend == "fs_native":
                    adapter["num_workers"] = threads
                try:
                    taken = rates(bench_l2(lmcache, adapter, root / "peer.json", size, count), size)
                finally:
                    shutil.rmtree(root / "peer", ignore_errors=True)
                for op, rate in taken.items():
                    found.setdefault((f"lmcache {backend}", op), []).append(rate)
    finally:
        ceiling.close()
        for disk in disks:
            disk.close()
            shutil.rmtree(disk.tier.root)
    return [
        PeerRow(
            system=system,
            op=op,
            chunk_bytes=size,
            gb_per_s=round(statistics.median(rates), 3),
            ratio=ratio(rates, found["fio", op]).value,
            ratio_span=ratio(rates, found["fio", op]).span,
            samples=tuple(round(rate, 3) for rate in rates),
        )
        for (system, op), rates in found.items()
    ]


def bench_l2(lmcache: Path, adapter: Mapping[str, object], output: Path, size: int, count: int, *further: str) -> str:
    """Run LMCache's own benchmark: one round of `count` objects after a warm-up round. Return its output.

    Args:
        lmcache: the `lmcache` command.
        adapter: LMCache's backend.
        output: a file that it writes.
        size: bytes of an object.
        count: objects of a round, which are one call of the backend.
        further: more arguments.

    Raises:
        ConfigError: it fails.
    """
    command = [
        *(str(lmcache), "bench", "l2", "--l2-adapter", json.dumps(adapter)),
        *("--num-keys", str(count), "--data-size-kb", str(size >> 10), "--l1-align-bytes", "4096"),
        *("--rounds", "1", "--warmup-rounds", "1", "--format", "json", "--output", str(output)),
        *further,
    ]
    return run_lmcache(command, output)


def run_lmcache(command: Sequence[str], output: Path) -> str:
    """Run LMCache with `command`. Return what it writes to `output`.

    Raises:
        ConfigError: it fails.
    """
    output.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            ["env", *QUIET, *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{command[0]} took longer than {DEADLINE_S:g} s") from None
    if done.returncode or not output.exists():
        output_end = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ConfigError(f"{command[0]} failed: {output_end}")
    return output.read_text(encoding="utf-8")


def rates(text: str, size: int) -> dict[str, float]:
    """Parse the GB/s of ``store`` and ``load`` in the output of `lmcache bench l2 --format json`.

    Raises:
        ConfigError: the format is unknown, or an object was not stored or not found.
    """
    found = durations_ms(text, ("store", "load"))
    return {op: count * size / ms / 1e6 for op, (count, ms) in found.items()}


def durations_ms(text: str, ops: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Parse objects and milliseconds of a round of each operation, in the output of `lmcache bench l2 --format json`.

    Raises:
        ConfigError: the format is unknown, or an object was not stored or not found.
    """
    try:
        output: Any = json.loads(text)
        found = {it["operation"].lower(): it for it in output["metrics"].values() if it.get("operation")}
        for op in ops:
            if found[op]["total_success"] != found[op]["total_keys"]:
                raise ConfigError(f"lmcache: {op} of {found[op]['total_keys']} objects failed for some of them")
        return {op: (found[op]["keys_per_round"], 1.0 * found[op]["duration_p50_ms"]) for op in ops}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the output of lmcache bench l2 has an unknown format: {error!r}") from error


@click.command()
@click.option("--lmcache", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True,
              help="The `lmcache` command.")  # fmt: skip
@click.option("--dir", "directory", type=WorkDirectory(), default=Path(), help="On the drive to measure.  [here]")
@click.option("--size", "sizes", type=Bytes(), multiple=True, default=("32MiB", "4MiB", "512KiB"), show_default=True,
              help="Bytes of an object, repeatable.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1, 64), default=4, show_default=True, help="Threads, workers, jobs.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Samples per row.")
@click.option("--sample", "sample_bytes", type=Bytes(), default="512MiB", show_default=True, help="Bytes per sample.")
@record_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def peer(directory: Path, record: Path | None, as_json: bool, **given: Any) -> None:  # noqa: ANN401, FBT001 - flags
    """LMCache's file backends, the directory and disk tiers and fio, in turn in one run."""
    with ended_by_signals(), progress("peer", len(given["sizes"]) * given["repeats"]) as advance:
        rows = measure(directory=directory, tick=lambda _what: advance(1), **given)
    results = {"results": [asdict(row) for row in rows]}
    if record is not None:
        made = make_record("peer", settings=recorded_settings(given), seed=1, results=results, directory=directory)
        write_json("--record", record, made)
        tell_written(record)
    if as_json:
        print_json(results)
        return
    lines = [
        (row.system, row.op, size_text(row.chunk_bytes), f"{row.gb_per_s:.2f}", ratio_text(row.ratio, row.ratio_span))
        for row in rows
    ]
    print_table(
        Table(("system", "op", "object", "GB/s", "of fio"), lines, title=f"Medians of {given['repeats']}", numeric=3)
    )


if __name__ == "__main__":
    run_script(peer)
