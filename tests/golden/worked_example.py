"""The worked example of FORMAT.md, from the secret to the frame. Change nothing here: stored data depends on it."""

from kvtier.codec.frame import Identity, frame_bytes, head_bytes, pack
from kvtier.codec.registry import by_name
from kvtier.keys.chain import Extra, chunk_keys
from kvtier.keys.fingerprint import Fingerprint, root_key
from kvtier.keys.object_names import object_name
from kvtier.keys.secret import model_id
from kvtier.layout import GroupLayout, History, KvLayout, Part, Run

SECRET = bytes(range(32))
CHUNK_TOKENS = 4
TOKENS = [1, 2, 3, 4, 5, 65_536, 4_294_967_295, 0, 7, 8]
EXTRAS = (Extra("image", b"\x01\x02", 6), Extra("adapter", b"style/v1"))

FINGERPRINT = Fingerprint(
    weights=bytes(range(32, 64)),
    revision="main",
    attention={"implementation": "sdpa", "scale": 0.125, "window": None},
    rope={"theta": 10000.0, "type": "default", "factors": [1, 1.5, 1e-7]},
    dtype="float32",
    epoch=2,
    other={"héllo": True},
)
ROOT = root_key(SECRET, FINGERPRINT.digest, CHUNK_TOKENS)
KEYS = chunk_keys(ROOT, TOKENS, CHUNK_TOKENS, EXTRAS)

RUNS = (Run("keys", "bf16", 12), Run("values", "bf16", 8)), (Run("bytes", "bytes", 5),)
LAYOUT = KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (20, 5), "example/bytes", Part(2, 4, 4, 8), runs=RUNS),))
GROUP = LAYOUT.groups[0]
NAMES = [object_name(key, 0, LAYOUT.part(0), LAYOUT.digest(0)) for key in KEYS]
MODEL = model_id(SECRET, FINGERPRINT.digest)
IDENTITY = Identity(NAMES[1], MODEL, parent=NAMES[0], depth=1, tokens=4, group=0, part=LAYOUT.part(0))


def filled_slot() -> bytearray:
    """A slot as a gather leaves it after another chunk was there: everything that is not payload is dirty."""
    slot = bytearray(b"\xee" * frame_bytes(GROUP))
    at = head_bytes(GROUP)
    for offset, content in zip(GROUP.layer_offsets, (bytes(range(20)), b"\xf0\xf1\xf2\xf3\xf4"), strict=True):
        slot[at + offset : at + offset + len(content)] = content
    return slot


def frame() -> bytes:
    return bytes(pack(memoryview(filled_slot()), GROUP, IDENTITY, by_name("raw")))
