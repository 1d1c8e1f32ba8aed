"""Keys, names, fingerprints and roots never change: what one version, machine or Python stores, the next one finds."""

import hashlib
import hmac
import struct

import numpy as np
import pytest
import worked_example as example

from kvtier.keys.chain import Chain, chunk_keys
from kvtier.keys.object_names import object_names
from kvtier.keys.weights import digest_files, digest_tensors
from kvtier.layout import Part

GOLDEN = {
    "fingerprint": "366ecaa2445dfb26a188325489a4ab691afed7bd340d6192168feaf506ff58b4",
    "root": "de1b3edf3fa281570a1b6f1c81863b322b90d3443338d5ef9f698567247ca193",
    "model": "b8bc62a471ea621887109d98b7aeaac7",
    "key[0]": "84c8a7a803563b014d1625ff1307c071d84c9457835912d49a5e6209b535055b",
    "key[1]": "36580cc435726278337454393061a91897013cba772d6d0c772d8ae8ecc2dd7d",
    "layout": "353c9e80dd5284a954e66bd407a34c7582e978fd01705c2b313e0e0ccae4e35f",
    "name[0]": "41a783b111f0fe57e298bbf63778d1150303d57cbd77c44dcea0402b0ecff230",
    "name[1]": "fa52123413ffa436278ac0915aa7a32147c206347600bcbfe320a67ae4be99de",
}


def made() -> dict[str, bytes]:
    return {
        "fingerprint": example.FINGERPRINT.digest,
        "root": example.ROOT,
        "model": example.MODEL,
        "key[0]": example.KEYS[0],
        "key[1]": example.KEYS[1],
        "layout": example.LAYOUT.digest(0),
        "name[0]": example.NAMES[0],
        "name[1]": example.NAMES[1],
    }


def test_the_worked_example_keeps_its_digests():
    assert {name: digest.hex() for name, digest in made().items()} == GOLDEN


def test_the_digests_follow_from_the_document_alone():
    """Recomputed with hashlib and struct only, as FORMAT.md says."""

    def encoded(text: bytes) -> bytes:
        return struct.pack("<I", len(text)) + text

    root = hmac.new(
        bytes(range(32)),
        b"kvtier.root\0" + struct.pack("<I", 2) + bytes.fromhex(GOLDEN["fingerprint"]) + struct.pack("<II", 4, 0),
        hashlib.sha256,
    ).digest()
    extras = struct.pack("<II", 1, 0) + encoded(b"adapter") + encoded(b"style/v1")
    first = hashlib.sha256(root + struct.pack("<5I", 4, 1, 2, 3, 4) + extras).digest()
    extras = struct.pack("<II", 1, 2) + encoded(b"image") + encoded(b"\x01\x02")
    second = hashlib.sha256(first + struct.pack("<5I", 4, 5, 65_536, 4_294_967_295, 0) + extras).digest()
    layout = hashlib.sha256(
        b'kvtier.layout\0[2,4,"history",[[["keys","bf16",12],["values","bf16",8]],[["bytes","bytes",5]]],"example/bytes"]'
    ).digest()
    name = hashlib.sha256(
        b"kvtier.object\0" + struct.pack("<I", 3) + layout + struct.pack("<7I", 0, 2, 4, 4, 8, 0, 1) + second
    ).digest()
    assert [root, first, second, layout, name] == [
        bytes.fromhex(GOLDEN[which]) for which in ("root", "key[0]", "key[1]", "layout", "name[1]")
    ]


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda tokens: list(np.array(tokens, "<i8")),
        lambda tokens: list(np.array(tokens, ">u4")),
    ],
)
def test_the_form_of_the_tokens_does_not_matter(form):
    assert chunk_keys(example.ROOT, form(example.TOKENS), 4, example.EXTRAS) == example.KEYS


def test_a_long_prompt_keeps_its_keys_and_names():
    chain = Chain(bytes(32), 256)
    chain.extend([(token * 2_654_435_761) % 151_936 for token in range(8192)])
    joined = b"".join(chain.keys)
    assert hashlib.sha256(joined).hexdigest() == "8f75fa5a32c6ccfe20f4d313a74d3b0926e4d6ccf46b451343d05fff52e49e2d"
    names = object_names(chain.keys, 3, Part(0, 5, rank=7, ranks=8), bytes(range(32)))
    assert (
        hashlib.sha256(b"".join(names)).hexdigest()
        == "d1fcd132860a48757f5d92112a30298afedd493d83a4b5829afd797bbbc4a5f9"
    )


def test_weights_keep_their_digests(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.safetensors").write_bytes(bytes(range(256)) * 40_000)
    (tmp_path / "sub" / "b.bin").write_bytes(b"")
    files = [tmp_path / "sub" / "b.bin", tmp_path / "a.safetensors"]
    assert digest_files(files).digest.hex() == "a519c5bbd1cbaefb4e9810a32672a90ca6fcf30e238b048121723ef8af9b0c2b"
    tensors = [("w", "float32", (2, 3), bytes(24)), ("b", "bfloat16", (0,), b""), ("s", "int8", (), b"\x07")]
    assert digest_tensors(tensors).digest.hex() == "a7f2c67910e7d7a7a894f0f6fc622a6e8cc68824619a9e145d68fab1ea2a791b"
