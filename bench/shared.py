"""Runs `kvtier bench tier` on real shared stores, which it starts on loopback (`tests/shared`). Each has a record.

    python bench/shared.py [--kind s3] [--repeats 5] [--record-dir bench/records]

CephFS is mounted twice: one mount stores, and the other loads. The records are `bench/records/tier_KIND.json`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.shared.ceph import Ceph, install  # noqa: E402

KINDS = ("s3", "shared_directory")
DATA_BYTES = 8 << 30
"""Capacity of the cluster. Deleted objects count for some seconds."""
DEADLINE_S = 3600.0


def _arguments(kind: str, ceph: Ceph) -> list[str]:
    """Return the tier as `kvtier bench tier` takes it."""
    if kind == "s3":
        access = ceph.s3()
        keys = f"access_key_id={access.access_key}&secret_access_key={access.secret_key}"
        deadlines = "transfer_deadline_s=60&probe_deadline_s=10"
        return [f"s3:{access.bucket}/bench?endpoint={access.endpoint}&allow_http=true&{keys}&{deadlines}"]
    stores, loads = ceph.mounts()
    return [f"shared_directory:{stores / 'kv'}", "--load-at", str(loads / "kv")]


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(KINDS), default=KINDS, show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--record-dir", type=click.Path(path_type=Path, file_okay=False), help="Write tier_KIND.json there.")
def main(kinds: tuple[str, ...], repeats: int, record_dir: Path | None) -> None:
    """Measure shared kinds next to their raw clients."""
    install()
    for kind in kinds:
        # Each kind gets its own cluster, whose object store is in memory.
        with tempfile.TemporaryDirectory(prefix="kvtier-ceph-") as root:
            ceph = Ceph(Path(root), DATA_BYTES)
            try:
                ceph.start()
                command = [sys.executable, "-m", "kvtier.cli.main", "bench", "tier", *_arguments(kind, ceph)]
                record = [] if record_dir is None else ["--record", str(record_dir / f"tier_{kind}.json")]
                subprocess.run([*command, "--repeats", str(repeats), *record], check=True, timeout=DEADLINE_S)
            finally:
                ceph.close()


if __name__ == "__main__":
    main()
