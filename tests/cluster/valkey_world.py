"""Valkey tiers on the test bed's servers."""

import hashlib
import itertools

from kvtier.tier.valkey import ValkeyTier
from kvtier.types import ObjectName

KEY_ID = bytes(range(16))
FINGERPRINT = hashlib.sha256(b"model").digest()
MIB = 1 << 20
_numbers = itertools.count()


def name_of(number: int) -> ObjectName:
    return ObjectName(hashlib.sha256(b"object %d" % number).digest())


def frame_of(number: int, byte_count: int = 4096) -> memoryview:
    return memoryview(bytearray((b"%08d" % number) * (byte_count // 8)))


def fresh_prefix() -> str:
    """A prefix that no other test uses."""
    return f"test-{next(_numbers)}"


def open_tier(*servers, prefix: str = "kv", **settings) -> ValkeyTier:
    """A tier with short deadlines, of servers that have a `port`."""
    defaults = {"key_id": KEY_ID, "fingerprint": FINGERPRINT, "deadline_s": 4.0, "probe_deadline_s": 1.0}
    addresses = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return ValkeyTier(addresses, prefix=prefix, **defaults | settings)


def key_of(tier: ValkeyTier, name: ObjectName) -> str:
    """The key of the object's first part."""
    return tier._key(name)[1].decode()
