r"""Names of stored objects, which are equal in all tiers.

    name = SHA-256( "kvtier.object\0" | u32 version | layout digest | u32 group | part as six u32 | key )

The key identifies the prefix (with its fingerprint, extras and secret), and the rest identifies the part of its bytes:
the first layer and the one after the last, likewise for the KV heads, then rank and ranks (`layout.Part`). Equal parts
have equal names on all ranks. The key comes last so that the names of a batch share everything before it.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from itertools import repeat

from kvtier.layout import Part
from kvtier.types import ChunkKey, ObjectName

NAME_BYTES = 32
_DOMAIN = b"kvtier.object\0"
_VERSION = 3
_HEAD = struct.Struct("<I32sI6I")


def object_name(key: ChunkKey, group: int, part: Part, layout_digest: bytes) -> ObjectName:
    """Return the name of a part of one KV group of a chunk.

    Args:
        key: 32-byte key of the chunk.
        group: index of the KV group in `KvLayout.groups`.
        part: the rank's part, `KvLayout.part(group)`.
        layout_digest: 32 bytes, `KvLayout.digest(group)`.

    Raises:
        ValueError: a key or digest is not 32 bytes.
        struct.error: a number does not fit in four bytes.
    """
    return object_names((key,), group, part, layout_digest)[0]


def object_names(keys: Iterable[ChunkKey], group: int, part: Part, layout_digest: bytes) -> list[ObjectName]:
    """Return the `object_name` of each key, in order.

    Raises:
        ValueError: as in `object_name`.
    """
    return names_of(zip(keys, repeat(0)), [name_head(group, part, layout_digest)])


def name_head(group: int, part: Part, layout_digest: bytes) -> bytes:
    """Return the bytes that are hashed before the key. All objects of a part share them.

    Raises:
        ValueError: the digest is not 32 bytes.
        struct.error: a number does not fit in four bytes.
    """
    if len(layout_digest) != NAME_BYTES:
        raise ValueError(f"layout digest must be {NAME_BYTES} bytes, got {len(layout_digest)}")
    return _DOMAIN + _HEAD.pack(_VERSION, layout_digest, group, *part)


def names_of(objects: Iterable[tuple[ChunkKey, int]], heads: Sequence[bytes]) -> list[ObjectName]:
    """Return the name of each (key, group), in order. Each name takes about half a microsecond.

    Args:
        objects: the keys and groups.
        heads: `name_head` of each group.

    Raises:
        ValueError: a key is not 32 bytes.
    """
    sha256 = hashlib.sha256
    names: list[ObjectName] = []
    for key, group in objects:
        if len(key) != NAME_BYTES:
            raise ValueError(f"a key must be {NAME_BYTES} bytes, got {len(key)}")
        names.append(ObjectName(sha256(heads[group] + key).digest()))
    return names
