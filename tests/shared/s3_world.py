"""S3 tiers on the test bed's gateway, and objects for the tiers of all servers."""

from tests.small_s3 import KEY_ID, MIB, MODEL, name_of
from tests.tier_makers import fresh_prefix, kept

from kvtier.config.value_types import PrivateText
from kvtier.tier.s3.address import Credentials
from kvtier.tier.s3.bucket import connect
from kvtier.tier.s3.tier import S3Tier

__all__ = ["KEY_ID", "MIB", "MODEL", "frame_of", "fresh_prefix", "name_of", "open_tier"]


def frame_of(number: int, byte_count: int = 4096) -> memoryview:
    return memoryview(bytearray((b"%08d" % number) * (byte_count // 8)))


def open_tier(access, prefix="kv", **settings) -> S3Tier:
    """A tier with short deadlines."""
    mine = {"key_id": KEY_ID, "model": MODEL, "deadline_s": 4.0, "probe_deadline_s": 1.0}
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
    return kept(S3Tier(connect("s3", f"s3://{access.bucket}/{prefix}", **client), **mine))
