"""The shared directory tier next to plain files, on a real CephFS mounted twice (`tests/shared`).

    python bench/cephfs.py [--mib 4,32] [--in-flight 1,4,16] [--repeats 5] [--ways] [--json FILE]

One mount stores and the other loads. `--ways` compares ways to use the files instead: the best one is the raw path.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.parts.tier_speed import SpeedPath, TierPath, measure_lookups, measure_speed  # noqa: E402
from tests.shared.ceph import Ceph, install  # noqa: E402

from kvtier.tier.shared_directory import SharedDirectoryTier  # noqa: E402

CAPACITY_BYTES = 1 << 40


class RawFiles:
    """Plain system calls: a file is written, synced and renamed on one mount, and read on another.

    Args:
        writer: directory on the first mount.
        reader: the same directory on the second one.
        flags: for `os.open`, such as O_DIRECT.
        syncs: sync before the rename. Without, a node that dies has published objects without bytes.
    """

    def __init__(self, writer: Path, reader: Path, *, flags: int = 0, syncs: bool = True) -> None:
        writer.mkdir()
        self._writer, self._reader, self._flags, self._syncs = writer, reader, flags, syncs

    def store(self, number: int, frame: memoryview) -> None:
        """See `SpeedPath`."""
        draft = self._writer / f"{number}.draft"
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags, 0o600)
        done = 0
        while done < frame.nbytes:
            done += os.pwrite(descriptor, frame[done:], done)
        if self._syncs:
            os.fsync(descriptor)
        os.close(descriptor)
        draft.rename(self._writer / str(number))

    def load(self, number: int, into: memoryview) -> None:
        """See `SpeedPath`."""
        descriptor = os.open(self._reader / str(number), os.O_RDONLY | self._flags)
        done = 0
        while done < into.nbytes:
            done += os.preadv(descriptor, [into[done:]], done)
        os.close(descriptor)

    def delete(self, number: int) -> None:
        """See `SpeedPath`."""
        (self._writer / str(number)).unlink()

    def lookup(self, numbers: Sequence[int]) -> None:
        """See `SpeedPath`."""
        for number in numbers:
            with suppress(FileNotFoundError):
                (self._reader / str(number)).stat()


class AcrossTiers(TierPath):
    """Stores with the tier of one node, loads with that of another."""

    def __init__(self, writer: SharedDirectoryTier, reader: SharedDirectoryTier) -> None:
        super().__init__(reader)
        self._stores = TierPath(writer)
        self._stores._salt = self._salt  # noqa: SLF001 - the same names

    def store(self, number: int, frame: memoryview) -> None:
        """See `SpeedPath`."""
        self._stores.store(number, frame)


def _paths(a: Path, b: Path, *, ways: bool) -> dict[str, SpeedPath]:
    paths: dict[str, SpeedPath] = {"raw": RawFiles(a / "raw", b / "raw")}
    if ways:
        paths["direct"] = RawFiles(a / "direct", b / "direct", flags=os.O_DIRECT)
        paths["no sync"] = RawFiles(a / "nosync", b / "nosync", syncs=False)
        return paths
    tiers = [
        SharedDirectoryTier(
            mount / "store", key_id=bytes(16), fingerprint=bytes(32), capacity_bytes=CAPACITY_BYTES, wait_s=10.0
        )
        for mount in (a, b)
    ]
    for fan in range(256):  # a store that was used before has them all
        (a / "store" / bytes(16).hex() / bytes(16).hex() / f"{fan:02x}").mkdir(mode=0o700)
    return paths | {"tier": AcrossTiers(*tiers)}


@click.command()
@click.option("--mib", default="4,32", help="Sizes of objects.")
@click.option("--in-flight", default="1,4,16")
@click.option("--repeats", default=5)
@click.option("--ways", is_flag=True, help="Compare ways to use the files.")
@click.option("--json", "path", type=Path, help="Where the record goes.")
def main(mib: str, in_flight: str, repeats: int, path: Path | None, *, ways: bool) -> None:
    """Measure the shared directory tier next to plain files."""
    install()
    kind, rows = "shared_directory", []
    with tempfile.TemporaryDirectory(prefix="kvtier-ceph-") as root:
        ceph = Ceph(Path(root))
        try:
            ceph.start()
            paths = _paths(*ceph.mounts(), ways=ways)
            for size in map(int, mib.split(",")):
                for count in map(int, in_flight.split(",")):
                    new = measure_speed(kind, kind, paths, chunk_bytes=size << 20, in_flight=count, repeats=repeats)
                    for row in new:
                        print(
                            f"{row.op:6} {size:3} MiB x{count:<3} {row.path:8} {row.gb_per_s:.3f} GB/s {row.ratio:.2f}",
                            flush=True,
                        )
                    rows += new
            rows += measure_lookups(kind, kind, paths, repeats=20)
            for row in rows[-len(paths) :]:
                print(f"{row.op:6} 23 names      {row.path:8} {row.ms:.2f} ms {row.ratio:.2f}")
        finally:
            ceph.close()
    if path is not None:
        path.write_text(json.dumps({"results": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
