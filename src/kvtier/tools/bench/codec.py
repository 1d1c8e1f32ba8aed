"""`kvtier bench codec`: the ratio and the speed of each installed codec, on a model's KV and on random numbers.

One thread encodes the sections of a chunk, then decodes them, without checksums. The codecs take turns, because a
machine's speed drifts. Ratios compare whole frames. Each lossy codec runs with numba and with torch.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvtier.codec import lossy, registry
from kvtier.codec.base import Codec, LossyCodec
from kvtier.codec.frame import decode_section, frame_bytes, head_bytes, pack, pack_scratch_bytes
from kvtier.codec.frame_header import Identity
from kvtier.codec.roundtrip import is_refused
from kvtier.errors import ConfigError
from kvtier.layout import (
    ELEMENT_BYTES,
    LOSSY_ELEMENTS,
    SECTION_BYTES_MAX,
    Axes,
    Cut,
    Element,
    GroupLayout,
    History,
    Run,
)
from kvtier.report.table import Table, print_table
from kvtier.tools.bench.repeats import Advance, repeated
from kvtier.types import ObjectName

CHUNK_TOKENS = 256
HEAD_DIM = 64
"""Channels of an attention head of SmolLM2."""

ELEMENTS: Mapping[Element, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8e4m3": "float8_e4m3fn",
    "fp8e5m2": "float8_e5m2",
}
"""Types to which a model's KV is rounded, with the names of these types in torch."""

Frame = Sequence[npt.NDArray[np.uint8]]
"""The sections of a chunk. Each has at most `SECTION_BYTES_MAX` bytes."""
Source = tuple[str, Element]
"""Where the numbers come from, such as the name of a model, and their element type."""
_Sample = tuple[bool, float, float]
"""Whether every byte came back unchanged, the GB/s of encoding, and the GB/s of decoding."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """The figures of one codec on one type of numbers. A GB is 10^9 raw bytes."""

    codec: str
    model: str
    """Source and type of the numbers."""
    ratio: float
    """Bytes of unencrypted frames divided by the bytes of raw frames, both with headers and padding."""
    encode_gb_per_s: float
    """Median GB/s on one core."""
    decode_gb_per_s: float
    bit_exact: bool
    is_wrong: bool
    """Whether an exact codec changed a bit, or a lossy one exceeded its bound."""
    samples: Mapping[str, Sequence[float]]
    """GB/s of each repeat, under the names of the two fields with speeds."""


@dataclass(frozen=True, slots=True)
class CodecBenchResult:
    """All rows and the conditions of the measurement."""

    results: list[CodecRow]
    repeats: int


def normal_frames(seed: int, frames: int = 2, sections: int = 4) -> list[Frame]:
    """Return normally distributed bf16 numbers, in sections of `SECTION_BYTES_MAX` bytes."""
    drawn = np.random.default_rng(seed).standard_normal((frames, sections, SECTION_BYTES_MAX // 2), np.float32)
    return [list(frame) for frame in (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)]


def kv_frames(kv: Any, model: str) -> dict[Source, list[Frame]]:  # noqa: ANN401 - torch's types are partly unknown
    """Return a model's KV in each of `ELEMENTS`. The keys of a layer are one section, and the values another.

    Args:
        kv: a torch tensor in float32, of shape (layers, 2, KV heads, tokens, head dimension). The number of tokens is
            a multiple of `CHUNK_TOKENS`.
        model: name of the model.
    """
    torch: Any = import_module("torch")
    chunks = kv.unflatten(3, (-1, CHUNK_TOKENS)).permute(3, 0, 1, 2, 4, 5).contiguous()
    found: dict[Source, list[Frame]] = {}
    for element, name in ELEMENTS.items():
        # fp8 without a scale, as vLLM writes it by default.
        numbers = chunks.to(getattr(torch, name)).view(torch.uint8).numpy()
        found[model, element] = [list(frame.reshape(2 * len(kv), -1)) for frame in numbers]
    return found


def installed(element: Element) -> dict[str, Codec | LossyCodec]:
    """Return the installed codecs for numbers of this type, by the names that they have in results.

    A lossy codec appears once for each package that implements it, as ``codec, package``.
    """
    codecs: dict[str, Codec | LossyCodec] = {}
    for name in registry.names():
        with suppress(ConfigError):
            codecs[name] = registry.by_name(name)
    for kind in (lossy.K8V4, lossy.Int4) if element in LOSSY_ELEMENTS else ():
        for package in ("numba", "torch"):
            with suppress(ConfigError):
                codecs[f"{kind.name}, {package}"] = kind(package)
    return codecs


def steps(sources: Mapping[Source, Sequence[Frame]], repeats: int) -> int:
    """Return how many times `run` calls `progress`."""
    return (repeats + 1) * sum(len(installed(element)) for _, element in sources)


def run(
    sources: Mapping[Source, Sequence[Frame]], repeats: int, progress: Advance = lambda _step: None
) -> CodecBenchResult:
    """Measure each installed codec; `progress` is called once for each source, codec and repeat, warm-up included."""
    rows = [row for source, frames in sources.items() for row in _rows(source, frames, repeats, progress)]
    return CodecBenchResult(rows, repeats)


def show(result: CodecBenchResult) -> None:
    """Print the rows."""
    rows = [
        (
            row.model,
            row.codec,
            f"{row.ratio:.4f}",
            f"{row.encode_gb_per_s:.2f}",
            f"{row.decode_gb_per_s:.2f}",
            "WRONG" if row.is_wrong else "yes" if row.bit_exact else "no",
        )
        for row in result.results
    ]
    columns = ("numbers", "codec", "of raw bytes", "encode GB/s", "decode GB/s", "bit exact")
    title = f"Codecs on one core, medians of {result.repeats}; raw is memcpy"
    print_table(Table(columns, rows, title=title, numeric=4))


def _rows(source: Source, frames: Sequence[Frame], repeats: int, progress: Advance) -> list[CodecRow]:
    model, element = source
    codecs = installed(element)
    cuts = _group(element, frames).sections
    room = memoryview(bytearray(max(sum(_bound(it, len(part)) for part in frames[0]) for it in codecs.values())))
    back = memoryview(bytearray(sum(map(len, frames[0]))))

    def once(_number: int) -> dict[str, _Sample]:
        samples: dict[str, _Sample] = {}
        for name, it in codecs.items():
            samples[name] = _sample(it, cuts, frames, room, back)
            progress(1)
        return samples

    rows: list[CodecRow] = []
    for name, samples in repeated(once, repeats, warm_up=1).items():
        exact, encode, decode = zip(*samples, strict=True)
        speeds = statistics.median(encode), statistics.median(decode)
        each = {"encode_gb_per_s": encode, "decode_gb_per_s": decode}
        ratio, is_refused = _ratio(codecs[name], element, frames)
        is_wrong = is_refused or (codecs[name].is_exact and not all(exact))
        rows.append(CodecRow(name, f"{model} {element}", ratio, *speeds, all(exact), is_wrong, each))
    return rows


def _bound(codec: Codec | LossyCodec, raw_bytes: int) -> int:
    return cast("Codec", codec).bound(raw_bytes) if codec.is_exact else raw_bytes


def _group(element: Element, frames: Sequence[Frame]) -> GroupLayout:
    """Return the layout of frames whose sections are alternately keys and values.

    Each section has the shape (heads, tokens, `HEAD_DIM`).
    """
    sizes = [len(section) for section in frames[0]]
    runs = tuple(Run("values" if number % 2 else "keys", element, size) for number, size in enumerate(sizes))
    numbers = CHUNK_TOKENS * HEAD_DIM * ELEMENT_BYTES[element]
    axes = tuple(Axes(("head", "token", "channel"), (size // numbers, CHUNK_TOKENS, HEAD_DIM)) for size in sizes)
    group = GroupLayout(History(), (sum(sizes),), "bench", runs=(runs,), chunk_tokens=CHUNK_TOKENS, axes=(axes,))
    return group.of_class("int4")  # the layout of a lossy class keeps the axes, which lossy codecs need


def _ratio(codec: Codec | LossyCodec, element: Element, frames: Sequence[Frame]) -> tuple[float, bool]:
    """Return the ratio of packed to raw bytes, and whether the codec changed bytes or failed."""
    size = sum(map(len, frames[0]))
    group = _group(element, frames)
    exact = cast("Codec", codec) if codec.is_exact else registry.by_name("split")
    coder = None if codec.is_exact else cast("LossyCodec", codec)
    slot, scratch = (memoryview(bytearray(it)) for it in (frame_bytes(group), pack_scratch_bytes(group, exact)))
    packed_bytes = 0
    identity = Identity(ObjectName(bytes(32)), depth=1)
    for frame in frames:
        slot[head_bytes(group) :][:size] = np.concatenate(frame).data
        packed_bytes += len(pack(slot, group, identity, exact, scratch, lossy=coder))
    return round(packed_bytes / len(frames) / len(slot), 4), is_refused(codec)


def _sample(
    codec: Codec | LossyCodec, cuts: Sequence[Cut], frames: Sequence[Frame], room: memoryview, back: memoryview
) -> _Sample:
    """Encode each frame into `room`, decode it into `back`, and time both."""
    encode_s, decode_s, bit_exact = 0.0, 0.0, True
    for frame in frames:
        stored: list[memoryview] = []
        free, into = room, back
        start_s = time.perf_counter()
        for section, cut in zip(frame, cuts, strict=True):
            place = free[: _bound(codec, len(section))]
            if codec.is_exact:
                used = cast("Codec", codec).encode(section.data, place, cut.element)
            else:
                used = cast("LossyCodec", codec).encode(section.data, place, cut, is_first=False)
            stored.append(free[:used])
            free = free[used:]
        encoded_s = time.perf_counter()
        for section, part, cut in zip(frame, stored, cuts, strict=True):
            decode_section(codec, part, into[: len(section)], cut)
            into = into[len(section) :]
        decode_s += time.perf_counter() - encoded_s
        encode_s += encoded_s - start_s
        bit_exact &= np.concatenate(frame).tobytes() == bytes(back)
    gigabytes = len(frames) * len(back) / 1e9
    return bit_exact, round(gigabytes / encode_s, 3), round(gigabytes / decode_s, 3)
