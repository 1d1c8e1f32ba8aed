"""Valkey tiers on the test bed's servers."""

import hashlib
import itertools
import time

from kvtier.errors import TierError
from kvtier.tier.valkey.tier import ValkeyTier
from kvtier.types import ObjectName

KEY_ID = bytes(range(16))
FINGERPRINT = hashlib.sha256(b"model").digest()
MIB = 1 << 20
DEADLINE_S, PROBE_DEADLINE_S = 2.0, 1.0
SLACK_S = 2.0
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


def result(act):
    """What `act` returns, the only item of a list, or its error."""
    try:
        answer = act()
    except TierError as error:
        return error
    return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer


def timed(act, deadline_s):
    """`result`, within the deadline."""
    start_s = time.monotonic()
    answer = result(act)
    assert time.monotonic() - start_s < deadline_s + SLACK_S
    return answer
