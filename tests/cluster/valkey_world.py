"""Valkey tiers on the test bed's servers."""

from tests.shared.calls import SLACK_S, result, timed
from tests.shared.s3_world import KEY_ID, MIB, MODEL, frame_of, fresh_prefix, name_of
from tests.tier_makers import kept

from kvtier.tier.valkey.tier import ValkeyTier
from kvtier.types import ObjectName

__all__ = [
    "DEADLINE_S",
    "KEY_ID",
    "MIB",
    "MODEL",
    "PROBE_DEADLINE_S",
    "SLACK_S",
    "frame_of",
    "fresh_prefix",
    "key_of",
    "name_of",
    "open_tier",
    "result",
    "timed",
]

DEADLINE_S, PROBE_DEADLINE_S = 2.0, 1.0


def open_tier(*servers, prefix: str = "kv", **settings) -> ValkeyTier:
    """A tier with short deadlines, of servers that have a `port`."""
    defaults = {"key_id": KEY_ID, "model": MODEL, "deadline_s": 4.0, "probe_deadline_s": 1.0}
    addresses = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return kept(ValkeyTier(addresses, prefix=prefix, **defaults | settings))


def key_of(tier: ValkeyTier, name: ObjectName) -> str:
    """The key of the object's first part."""
    return tier._key(name)[1].decode()
