"""A codec that changes bytes or fails: the frame is raw, one error names the codec, and it is not used again."""

import logging
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from kvtier.codec import registry, roundtrip
from kvtier.codec.frame import (
    OPEN_SCRATCH_BYTES,
    Seals,
    frame_bytes,
    head_bytes,
    pack,
    pack_scratch_bytes,
    unpack_in_place,
)
from kvtier.codec.frame_header import Identity
from kvtier.codec.raw import Raw
from kvtier.errors import UnreadableChunkError
from kvtier.keys.seal_keys import Keyring, SealKey
from kvtier.layout import Element, GroupLayout, History
from kvtier.runtime.adaptive_coding import CodecChoice
from kvtier.types import ObjectName

SECTIONS = 100
GROUP = GroupLayout(History(), (4096,) * SECTIONS, "test")
NAME = ObjectName(bytes(range(32)))
IDENTITY = Identity(NAME, bytes(16))
HEAD = head_bytes(GROUP)
KEY = SealKey.of("me", 1, bytes(32))


class Packs:
    """An exact codec."""

    name = "packs"
    id = 50_001
    is_exact = True
    calls = 0

    def bound(self, raw_bytes: int) -> int:
        return raw_bytes + 64

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:
        type(self).calls += 1
        stored = zlib.compress(raw, 1)
        into[: len(stored)] = stored
        return len(stored)

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:
        into[:] = zlib.decompress(stored)


class DropsLowBytes(Packs):
    def encode(self, raw, into, element):
        into[: len(raw) // 2] = bytes(raw[1::2])
        return len(raw) // 2

    def decode(self, stored, into, element):
        into[::2], into[1::2] = bytes(len(stored)), stored


class LiesOnceInAHundred(Packs):
    def encode(self, raw, into, element):
        content = bytearray(raw)
        content[-1] ^= type(self).calls == 98
        return super().encode(memoryview(content), into, element)


class LeavesTheEndOut(Packs):
    def decode(self, stored, into, element):
        into[:-1] = zlib.decompress(stored)[:-1]


class RaisesInDecode(Packs):
    def decode(self, stored, into, element):
        raise IndexError("list index out of range")


class RaisesInEncode(Packs):
    def encode(self, raw, into, element):
        raise RuntimeError("not today")


class WritesBeyondItsRoom(Packs):
    def encode(self, raw, into, element):
        into[: len(into) + 1] = bytes(len(into) + 1)
        return 1


class DecodesBeyondItsRoom(Packs):
    def decode(self, stored, into, element):
        into[:] = zlib.decompress(stored) + b"\0"


class ChangesWhatItCodes(Packs):
    def encode(self, raw, into, element):
        np.frombuffer(raw, np.uint8)[0] ^= 1
        return super().encode(raw, into, element)


class Remembers(Packs):
    """It decodes in the process that encoded only."""

    def encode(self, raw, into, element):
        self.last = bytes(raw)
        into[:1] = b"\1"
        return 1

    def decode(self, stored, into, element):
        into[:] = self.last


SAYS = [type(f"Says_{used}", (Packs,), {"encode": lambda *_, used=used: used}) for used in (1 << 30, 0, -1, "many")]
WRONG = [
    *(DropsLowBytes, LiesOnceInAHundred, LeavesTheEndOut, RaisesInDecode, RaisesInEncode, WritesBeyondItsRoom),
    *(DecodesBeyondItsRoom, *SAYS, ChangesWhatItCodes, Remembers),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No codec is refused before or after a test."""
    monkeypatch.setattr(roundtrip, "_refused", {})
    for kind in (Packs, *WRONG):
        monkeypatch.setattr(kind, "calls", 0)


@cache
def payload() -> bytes:
    """Sections that any of these codecs makes smaller."""
    return np.random.default_rng(1).integers(0, 4, GROUP.payload_bytes, np.uint8).tobytes()


def slot_of(content: bytes) -> memoryview:
    slot = memoryview(bytearray(frame_bytes(GROUP)))
    slot[HEAD:] = content
    return slot


def sealed(codec, key=None) -> bytes:
    scratch = memoryview(bytearray(pack_scratch_bytes(GROUP, codec, is_sealed=key is not None)))
    return bytes(pack(slot_of(payload()), GROUP, IDENTITY, codec, scratch, key=key))


def opened(frame: bytes, seals: Seals | None = None) -> bytes:
    slot = memoryview(bytearray(frame_bytes(GROUP)))
    slot[: len(frame)] = frame
    unpack_in_place(slot, len(frame), GROUP, IDENTITY, memoryview(bytearray(OPEN_SCRATCH_BYTES)), seals)
    return bytes(slot[HEAD:])


def known(monkeypatch, codec):
    """The registry knows `codec`."""
    original = registry.by_id
    monkeypatch.setattr(registry, "by_id", lambda number: codec if number == codec.id else original(number))
    return codec


def errors(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_exact_codec_is_used(monkeypatch, caplog):
    frame = sealed(known(monkeypatch, Packs()))
    assert len(frame) < frame_bytes(GROUP) // 2
    assert opened(frame) == payload()
    assert not errors(caplog)


def test_without_the_proof_other_bytes_would_be_opened_as_good(monkeypatch):
    monkeypatch.setattr(roundtrip, "encoded", lambda codec, raw, into, _back, element: codec.encode(raw, into, element))
    frame = sealed(known(monkeypatch, DropsLowBytes()))
    assert opened(frame) != payload()


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_codec_is_found_before_anything_is_published(kind, caplog):
    codec = kind()
    assert sealed(codec) == sealed(Raw())
    (message,) = errors(caplog)
    assert "codec 'packs' has changed bytes or failed, and is no longer used" in message
    calls = kind.calls
    assert sealed(codec) == sealed(Raw())
    assert kind.calls == calls
    assert len(errors(caplog)) == 1


@pytest.mark.parametrize("kind", [Packs, DropsLowBytes, LiesOnceInAHundred])
def test_sealed_objects_have_the_same_bytes(kind, monkeypatch):
    pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")
    frame = sealed(known(monkeypatch, kind()), KEY)
    assert opened(frame, Seals(Keyring([KEY]), "me", is_demanded=True)) == payload()
    assert (len(frame) < frame_bytes(GROUP)) is (kind is Packs)


def test_threads_that_find_it_at_once_log_one_error(caplog):
    codec = DropsLowBytes()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _number: sealed(codec), range(16))) == {sealed(Raw())}
    assert len(errors(caplog)) == 1


def test_what_a_refused_codec_wrote_earlier_is_unreadable(monkeypatch):
    codec = known(monkeypatch, Packs())
    frame = sealed(codec)
    sealed(RaisesInDecode())  # has the same name
    with pytest.raises(UnreadableChunkError, match="changed bytes or failed"):
        opened(frame)


def test_want_of_memory_is_not_the_codecs_fault(monkeypatch):
    codec = Packs()

    def fail(*_given):
        raise MemoryError

    monkeypatch.setattr(codec, "encode", fail)
    with pytest.raises(MemoryError):
        sealed(codec)
    assert not roundtrip.is_refused(codec)


ZSTD_WITHOUT_MEMORY = """
import resource
from pathlib import Path
from kvtier.codec import roundtrip
from kvtier.codec.zstd import Zstd

codec, raw, rooms = Zstd(), memoryview(bytes(1 << 16)), [memoryview(bytearray(1 << 17)) for _ in range(2)]
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
try:
    roundtrip.encoded(codec, raw, rooms[0], rooms[1][: len(raw)], "bf16")
except Exception as error:
    print(type(error).__name__, roundtrip.is_refused(codec))
"""


def test_want_of_memory_within_zstd_is_not_its_fault():
    pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
    command = [sys.executable, "-c", ZSTD_WITHOUT_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "MemoryError False\n"


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_codec_is_never_chosen(kind):
    choice = CodecChoice(kind(), 4, 2)
    choice.reads.add(1 << 20, 1.0)
    scratch = memoryview(bytearray(pack_scratch_bytes(GROUP, kind())))
    coded = [choice.codes(0, GROUP, slot_of(payload()), scratch) for _ in range(2000)]
    if kind is not LiesOnceInAHundred:
        assert not any(coded)
    assert roundtrip.is_refused(kind())
