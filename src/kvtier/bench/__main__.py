"""`python -m kvtier.bench DIR`: what the disk tier at full rate costs a pure Python step beside it, as JSON."""

import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from kvtier.bench.interference import measure
from kvtier.bench.io_disk import Disk

SAMPLE_BYTES = 256 << 20


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True))
@click.option("--chunk-bytes", type=click.IntRange(4096), default=4 << 20, show_default=True, help="Of an object.")
@click.option("--threads", type=click.IntRange(1, 64), default=2, show_default=True, help="That read, and that write.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Pairs of samples.")
def main(directory: Path, chunk_bytes: int, threads: int, repeats: int) -> None:
    """Measure in a temporary directory in DIRECTORY, on the drive in question."""
    count = max(2, SAMPLE_BYTES // chunk_bytes)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place:
        disk = Disk("disk", Path(place) / "store", chunk_bytes, count, threads)
        try:
            disk.store()
            for op, act in (("store", disk.store), ("load", disk.load)):
                found = measure(partial(_again, act), repeats=repeats)
                told = {**asdict(found), "alone": found.alone._asdict(), "beside": found.beside._asdict()}
                click.echo(json.dumps({"op": op, "chunk_bytes": chunk_bytes, "threads": threads, **told}))
        finally:
            disk.close()


def _again(act: Callable[[], object], stop: threading.Event) -> None:
    while not stop.is_set():
        act()


if __name__ == "__main__":
    main()
