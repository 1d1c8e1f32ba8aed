"""Host memory: plain copies, and the checksum and codecs that run over it."""

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.config.machine import memory_bytes
from kvtier.errors import ConfigError
from kvtier.layout import SECTION_BYTES_MAX
from kvtier.probe.result import LinkMeasures, Measure
from kvtier.probe.timing import Limits, Tick, measure
from kvtier.runtime.arena import page_aligned

SET_BYTES = 512 << 20
"""Memory that copies go over, both sides together: more than any processor's cache holds."""
MEMORY_SHARE = 16
"""Of a small machine's memory they take one part in so many."""

Bytes = npt.NDArray[np.uint8]


def copies(sizes: tuple[int, ...], depths: tuple[int, ...], limits: Limits, tick: Tick) -> LinkMeasures:
    """GB/s copied from one place in host memory to another, as the arena does; each byte is read once, written once."""
    half = max(min(SET_BYTES, memory_bytes() // MEMORY_SHARE) // 2, *sizes)
    source, target = page_aligned(half), page_aligned(half)
    source[:], target[:] = 1, 0  # touch every page
    found: list[Measure] = []
    for size in sizes:
        places = half // size
        for depth in depths:

            def copy(worker: int, number: int, size: int = size, places: int = places, depth: int = depth) -> int:
                start = (number * depth + worker) % places * size
                np.copyto(target[start : start + size], source[start : start + size])
                return size

            tick("copy")
            told = measure(copy, op="copy", size=size, depth=depth, limits=limits)
            found += [told] if told else []
    return LinkMeasures("host", tuple(found))


def checksums(limits: Limits, depths: tuple[int, ...], tick: Tick) -> LinkMeasures:
    """GB/s that XXH3-64 verifies, over sections of the largest size."""
    size = SECTION_BYTES_MAX
    data = _like_kv(SET_BYTES // 8).data
    places = len(data) // size

    def verify(_worker: int, number: int) -> int:
        start = number % places * size
        xxhash.xxh3_64_intdigest(data[start : start + size])
        return size

    found: list[Measure] = []
    for depth in depths:
        tick("hash")
        told = measure(verify, op="hash", size=size, depth=depth, limits=limits)
        found += [told] if told else []
    return LinkMeasures("checksum", tuple(found))


def codecs(limits: Limits, tick: Tick) -> tuple[list[LinkMeasures], list[str]]:
    """GB/s of raw bytes that each installed codec encodes and decodes in one thread; and why others were left out.

    The data are what they will meet: normally distributed numbers in bfloat16.
    """
    links: list[LinkMeasures] = []
    skipped: list[str] = []
    for name in registry.names():
        try:
            codec = registry.by_name(name)
        except ConfigError as error:
            skipped.append(f"codec {name}: {error}")
            continue
        links.append(LinkMeasures(f"codec {name}", _codec(codec, limits, tick)))
    return links, skipped


def _codec(codec: Codec, limits: Limits, tick: Tick) -> tuple[Measure, ...]:
    size = SECTION_BYTES_MAX
    raw = _like_kv(size).data
    stored = memoryview(bytearray(codec.bound(size)))
    back = memoryview(bytearray(size))
    stored_bytes = codec.encode(raw, stored)

    def encode(_worker: int, _number: int) -> int:
        codec.encode(raw, stored)
        return size

    def decode(_worker: int, _number: int) -> int:
        codec.decode(stored[:stored_bytes], back)
        return size

    found: list[Measure] = []
    for act in (encode, decode):
        tick(act.__name__)
        told = measure(act, op=act.__name__, size=size, depth=1, limits=limits)
        found += [told] if told else []
    return tuple(found)


def _like_kv(size: int) -> Bytes:
    values = np.random.default_rng(0).standard_normal(min(size, SECTION_BYTES_MAX) // 2, np.float32)
    section = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.tile(section, -(-size // len(section)))[:size]
