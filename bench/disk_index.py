"""Measures time and memory to open a disk store of ten million objects and to look up 512 names.

    python bench/disk_index.py --dir DIR --record bench/records/index.json

The store's segments are sparse files with a full index and no frames, so ten million objects take 0.5 GB. ADR 8 quotes
the record.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtier.report.output import write_json
from kvtier.tier.disk.format import BLOCK_BYTES, ENTRY, Header, pack_blocks, pack_header
from kvtier.tier.disk.tier import DiskTier
from kvtier.tools.run_record import RecordedSetting, make_record
from kvtier.types import ObjectName

SEGMENT_BYTES = 1 << 30
OBJECTS_PER_SEGMENT = 220_000
OBJECT_BYTES = 20 << 10
"""Capacity per object. The index allows one object per 16 KiB."""
NAMES = 512
LOOKUPS = 200
NEVER_S = 3600.0


def make(root: Path, objects: int, seed: int) -> None:
    """Create a store of `objects` random names, 4 KiB each."""
    tier = DiskTier(root, capacity_bytes=4 * SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES, sync_interval_s=NEVER_S)
    store_id = tier._pool._store_id  # noqa: SLF001 - segments carry the id of their store
    tier.close()
    segments = root / "segments"
    for path in segments.iterdir():
        path.unlink()
    draw = np.random.default_rng(seed)
    for number, first in enumerate(range(0, objects, OBJECTS_PER_SEGMENT)):
        count = min(OBJECTS_PER_SEGMENT, objects - first)
        entries = np.zeros(count, ENTRY)
        entries["name"] = _names(draw, count)
        entries["block"] = np.arange(1, count + 1)
        entries["size_bytes"] = BLOCK_BYTES
        header = Header(store_id, 1 + number, SEGMENT_BYTES)
        blocks = pack_blocks(header, 0, entries)
        with (segments / f"{number:08d}.segment").open("wb") as file:
            file.truncate(SEGMENT_BYTES)
            file.write(pack_header(header))
            file.seek(SEGMENT_BYTES - len(blocks) * BLOCK_BYTES)
            file.write(b"".join(reversed(blocks)))


def measure(root: Path, objects: int, seed: int) -> dict[str, float]:
    """Open the store and look up random names."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    capacity_bytes = objects * OBJECT_BYTES + 4 * SEGMENT_BYTES
    tier = DiskTier(root, capacity_bytes=capacity_bytes, segment_bytes=SEGMENT_BYTES, sync_interval_s=NEVER_S)
    opened = {"open_s": time.perf_counter() - began_s, "open_cpu_s": time.process_time() - cpu_s}
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    draw, pick = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    known = [_names(draw, min(OBJECTS_PER_SEGMENT, objects - it)) for it in range(0, objects, OBJECTS_PER_SEGMENT)]
    times: list[float] = []
    for _ in range(LOOKUPS):
        some = [known[one] for one in pick.integers(0, len(known), NAMES)]
        names = [ObjectName(part[pick.integers(0, len(part))].tobytes()) for part in some]
        began_s = time.perf_counter()
        held = tier.contains(names)
        times.append(time.perf_counter() - began_s)
        if not all(held):
            raise RuntimeError(f"{held.count(False)} of {NAMES} names are not found")
    results = {"objects": tier.object_count, **opened, "peak_bytes": peak_bytes}
    tier.close()
    return results | {
        "lookup_ms": 1e3 * statistics.median(times),
        "lookup_p90_ms": 1e3 * sorted(times)[9 * LOOKUPS // 10],
    }


def _names(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.integers(0, 1 << 63, (count, 4), np.uint64)


def main() -> None:
    """Create the store in another process, whose memory does not count. Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the drive in question")
    parser.add_argument("--objects", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="write the JSON record to this file")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make is not None:
        make(given.make, given.objects, given.seed)
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-index-", dir=given.dir) as folder:
        root = Path(folder) / "rank-0"
        wanted = ["--make", str(root), "--objects", str(given.objects), "--seed", str(given.seed)]
        subprocess.run([sys.executable, __file__, *wanted], check=True)
        results = measure(root, given.objects, given.seed)
    print(results)
    if given.record is not None:
        settings = {"objects": RecordedSetting(given.objects, "flag"), "names": RecordedSetting(NAMES, "default")}
        write_json(
            "--record",
            given.record,
            make_record("index", settings=settings, seed=given.seed, results=results, directory=given.dir),
        )


if __name__ == "__main__":
    main()
