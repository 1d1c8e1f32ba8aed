"""The same objects through LMCache's file backends, in turn with ours and fio in one run.

LMCache is measured by its own command, `lmcache bench l2`, from an environment of its own, in its best configuration:
direct I/O, aligned buffers, as many workers as we have threads. It does not verify what it loads; our loads are
verified inside the timed part all the same.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.bench.fio import Fio, has_fio
from kvtier.bench.io_disk import Disk
from kvtier.errors import ConfigError
from kvtier.tier.direct import can_direct

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
    """Median of the ratios to fio in the same repeat."""
    samples: tuple[float, ...]
    """GB/s of each repeat."""


def run(
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
        lmcache: the command of the environment that has LMCache.
        directory: on the drive in question; a temporary one is made in it and removed.
        sizes: bytes of an object.
        threads: of ours, and LMCache's workers, and fio's jobs.
        repeats: samples behind each row.
        sample_bytes: bytes moved by one sample.
        tick: told before each repeat.

    Raises:
        ConfigError: fio or LMCache is missing or fails.
    """
    if not has_fio():
        raise ConfigError("fio is not installed, and without it there is no ceiling; allowed: install the package fio")
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
    disks = [Disk(name, root / name, size, count, threads) for name in ("directory", "disk")]
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
                told = _lmcache(lmcache, backend, root / "peer", size, count, threads, is_direct=is_direct)
                for op, rate in told.items():
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
            ratio=round(statistics.median(it / top for it, top in zip(rates, found["fio", op], strict=True)), 3),
            samples=tuple(round(rate, 3) for rate in rates),
        )
        for (system, op), rates in found.items()
    ]


def _lmcache(
    lmcache: Path, backend: str, place: Path, size: int, count: int, threads: int, *, is_direct: bool
) -> dict[str, float]:
    """GB/s of one store and one load, after one of each that does not count."""
    adapter: dict[str, object] = {"type": backend, "base_path": str(place), "use_odirect": is_direct}
    if backend == "fs_native":
        adapter["num_workers"] = threads
    output = place.with_suffix(".json")
    command = [
        "env", *QUIET, str(lmcache), "bench", "l2",
        "--l2-adapter", json.dumps(adapter),
        "--num-keys", str(count),
        "--data-size-kb", str(size >> 10),
        "--l1-align-bytes", "4096",
        "--rounds", "1",
        "--warmup-rounds", "1",
        "--format", "json",
        "--output", str(output),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{lmcache} took longer than {DEADLINE_S:g} s") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if done.returncode or not output.exists():
        told = " ".join((done.stderr or done.stdout).split())[-300:]
        raise ConfigError(f"{lmcache} bench l2 failed: {told}")
    return rates(output.read_text(encoding="utf-8"), size)


def rates(text: str, size: int) -> dict[str, float]:
    """GB/s by ``store`` and ``load``, of what `lmcache bench l2 --format json` wrote.

    Raises:
        ConfigError: it is something else, or not every object was stored and found.
    """
    try:
        told: Any = json.loads(text)
        found = {it["operation"].lower(): it for it in told["metrics"].values() if it.get("operation")}
        for op in ("store", "load"):
            if found[op]["total_success"] != found[op]["total_keys"]:
                raise ConfigError(f"lmcache: {op} of {found[op]['total_keys']} objects did not do them all")
        return {op: found[op]["keys_per_round"] * size / found[op]["duration_p50_ms"] / 1e6 for op in ("store", "load")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"lmcache bench l2 wrote something that is not known here: {error!r}") from error
