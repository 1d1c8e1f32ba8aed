"""The S3 tier next to its client library, on a real gateway on loopback (`tests/shared`).

    python bench/s3.py [--mib 4,32] [--in-flight 1,4,16] [--repeats 5] [--ways] [--json FILE]

`--ways` compares ways to use the client instead: what the raw path of the comparison should be.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.parts.raw_s3 import RawS3  # noqa: E402
from bench.parts.tier_speed import SpeedPath, TierPath, measure_lookups, measure_speed  # noqa: E402
from obstore.store import S3Store  # noqa: E402
from tests.shared.ceph import Ceph, S3Access, install  # noqa: E402

from kvtier.config.value_types import PrivateText  # noqa: E402
from kvtier.tier.s3 import S3Tier  # noqa: E402
from kvtier.tier.s3_bucket import Credentials  # noqa: E402


def _client(access: S3Access, *, is_signed: bool = False) -> S3Store:
    return S3Store(
        access.bucket,
        endpoint=access.endpoint,
        access_key_id=access.access_key,
        secret_access_key=access.secret_key,
        region=access.region,
        unsigned_payload=not is_signed,
        client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
    )


def _ways(access: S3Access) -> dict[str, SpeedPath]:
    return {
        "raw": RawS3(_client(access), "bench"),
        "bytes": RawS3(_client(access), "bench", loads="bytes", is_conditional=False),
        "no copy": RawS3(_client(access), "bench", loads="none"),
        "signed": RawS3(_client(access, is_signed=True), "bench"),
    }


def _tier(access: S3Access) -> S3Tier:
    return S3Tier(
        f"{access.bucket}/bench",
        key_id=bytes(16),
        fingerprint=bytes(32),
        endpoint=access.endpoint,
        region=access.region,
        credentials=Credentials(PrivateText(access.access_key), PrivateText(access.secret_key)),
        allow_http=True,
        deadline_s=60.0,
        probe_deadline_s=10.0,
    )


@click.command()
@click.option("--mib", default="4,32", help="Sizes of objects.")
@click.option("--in-flight", default="1,4,16")
@click.option("--repeats", default=8)
@click.option("--ways", is_flag=True, help="Compare ways to use the client.")
@click.option("--json", "path", type=Path, help="Where the record goes.")
def main(mib: str, in_flight: str, repeats: int, path: Path | None, *, ways: bool) -> None:
    """Measure the S3 tier next to its client library."""
    install()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-ceph-") as root:
        ceph = Ceph(Path(root))
        try:
            ceph.start()
            access = ceph.s3()
            tier = _tier(access)
            paths = _ways(access) if ways else {"raw": RawS3(_client(access), "bench"), "tier": TierPath(tier)}
            for size in map(int, mib.split(",")):
                for count in map(int, in_flight.split(",")):
                    new = measure_speed("s3", "s3", paths, chunk_bytes=size << 20, in_flight=count, repeats=repeats)
                    for row in new:
                        print(
                            f"{row.op:6} {size:3} MiB x{count:<3} {row.path:8} {row.gb_per_s:.3f} GB/s {row.ratio:.2f}"
                        )
                    rows += new
            rows += measure_lookups("s3", "s3", paths, repeats=20)
            for row in rows[-len(paths) :]:
                print(f"{row.op:6} 23 names      {row.path:8} {row.ms:.2f} ms {row.ratio:.2f}")
            tier.close()
        finally:
            ceph.close()
    if path is not None:
        path.write_text(json.dumps({"results": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
