r"""Names of stored objects, the same in all tiers.

    name = SHA-256( "kvtier.object\0" | u32 version | layout digest | u32 group | u32 rank | key )

The key identifies the prefix (with its fingerprint, extras and secret), the rest identifies the share of its bytes. The
key comes last so that a batch shares everything before it.
"""

import hashlib
import struct
from collections.abc import Iterable

from kvtier.types import ChunkKey, ObjectName

NAME_BYTES = 32
_DOMAIN = b"kvtier.object\0"
_VERSION = 1
_HEAD = struct.Struct("<I32sII")
_COUNT_MAX = (1 << 32) - 1


def object_name(key: ChunkKey, group: int, rank: int, layout_digest: bytes) -> ObjectName:
    """The name of one rank's share of one KV group of a chunk.

    Args:
        key: 32-byte key of the chunk.
        group: number of the KV group, in `KvLayout.groups`.
        rank: number of the rank.
        layout_digest: 32 bytes, `KvLayout.digest(group)`.

    Raises:
        ValueError: a key or digest that is not 32 bytes, or a negative number.
    """
    return object_names((key,), group, rank, layout_digest)[0]


def object_names(keys: Iterable[ChunkKey], group: int, rank: int, layout_digest: bytes) -> list[ObjectName]:
    """`object_name` of each key, in order; about half a microsecond each.

    Raises:
        ValueError: as in `object_name`.
    """
    if len(layout_digest) != NAME_BYTES:
        raise ValueError(f"layout digest must be {NAME_BYTES} bytes, got {len(layout_digest)}")
    for what, count in (("group", group), ("rank", rank)):
        if not 0 <= count <= _COUNT_MAX:
            raise ValueError(f"{what} must be in 0..{_COUNT_MAX}, got {count}")
    head = _DOMAIN + _HEAD.pack(_VERSION, layout_digest, group, rank)
    sha256 = hashlib.sha256
    names: list[ObjectName] = []
    for key in keys:
        if len(key) != NAME_BYTES:
            raise ValueError(f"a key must be {NAME_BYTES} bytes, got {len(key)}")
        names.append(ObjectName(sha256(head + key).digest()))
    return names
