"""S3 tiers on the test bed's gateway."""

import hashlib
import itertools

from kvtier.config.value_types import PrivateText
from kvtier.tier.s3.bucket import Credentials, connect
from kvtier.tier.s3.tier import S3Tier
from kvtier.types import ObjectName

KEY_ID = bytes(range(16))
FINGERPRINT = hashlib.sha256(b"model").digest()
_numbers = itertools.count()


def name_of(number: int) -> ObjectName:
    return ObjectName(hashlib.sha256(b"object %d" % number).digest())


def frame_of(number: int, byte_count: int = 4096) -> memoryview:
    return memoryview(bytearray((b"%08d" % number) * (byte_count // 8)))


def open_tier(access, prefix="kv", **settings) -> S3Tier:
    """A tier with short deadlines."""
    mine = {"key_id": KEY_ID, "fingerprint": FINGERPRINT, "deadline_s": 4.0, "probe_deadline_s": 1.0}
    mine |= {key: settings.pop(key) for key in (*mine, "capacity_bytes", "sweep_interval_s") if key in settings}
    client = {
        "endpoint": access.endpoint,
        "region": access.region,
        "credentials": Credentials(PrivateText(access.access_key), PrivateText(access.secret_key)),
        "allow_http": True,
        "deadline_s": mine["deadline_s"],
        "probe_deadline_s": mine["probe_deadline_s"],
        **settings,
    }
    return S3Tier(connect("s3", f"s3://{access.bucket}/{prefix}", **client), **mine)


def fresh_prefix() -> str:
    """A prefix that no other test uses."""
    return f"test-{next(_numbers)}"


def key_of(tier: S3Tier, name: ObjectName) -> str:
    """The object's key in the bucket."""
    return tier._root + name.hex()
