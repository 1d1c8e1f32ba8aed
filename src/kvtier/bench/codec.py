"""`kvtier bench codec`: what each installed codec saves and how fast it is, on KV of a model and on random numbers.

One thread encodes the sections of a chunk, then decodes them. There are no checksums. The codecs take turns, because
machines drift. Ratios are those of whole frames.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.bench.repeats import Advance, repeated
from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.codec.frame import frame_bytes, head_bytes, seal, seal_scratch_bytes
from kvtier.codec.head import Identity
from kvtier.errors import ConfigError
from kvtier.layout import SECTION_BYTES_MAX, Element, GroupLayout, History, Run
from kvtier.report.table import Table
from kvtier.types import ObjectName

CHUNK_TOKENS = 256

ELEMENTS: Mapping[Element, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8e4m3": "float8_e4m3fn",
    "fp8e5m2": "float8_e5m2",
}
"""Types to which the KV of a model is rounded, with torch's names."""

Frame = Sequence[npt.NDArray[np.uint8]]
"""The sections of a chunk, of at most `SECTION_BYTES_MAX` bytes each."""
Source = tuple[str, Element]
"""Where numbers come from, such as a model, and their type."""
_Sample = tuple[bool, float, float]
"""Whether all is bit-exact, GB/s of encoding and of decoding."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec and one type of numbers. GB is 10^9 raw bytes."""

    codec: str
    model: str
    """Source and type of the numbers."""
    ratio: float
    """Bytes of frames without a seal, divided by those of raw frames; headers and padding included."""
    encode_gb_per_s: float
    """Median, on one core."""
    decode_gb_per_s: float
    bit_exact: bool
    samples: Mapping[str, Sequence[float]]
    """GB/s of each repeat."""


@dataclass(frozen=True, slots=True)
class CodecBenchResult:
    """All rows and their conditions."""

    results: list[CodecRow]
    repeats: int


def normal_frames(seed: int, frames: int = 2, sections: int = 4) -> list[Frame]:
    """Normally distributed bf16, in sections of `SECTION_BYTES_MAX` bytes."""
    shape = (frames, sections, SECTION_BYTES_MAX // 2)
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return [list(frame) for frame in (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)]


def kv_frames(kv: Any, model: str) -> dict[Source, list[Frame]]:  # noqa: ANN401 - torch's types are partly unknown
    """The KV of a model in each of `ELEMENTS`; the keys or the values of a layer are a section.

    Args:
        kv: a torch tensor in float32, of shape (layers, 2, KV heads, tokens, head dimension). The tokens are a multiple
            of `CHUNK_TOKENS`.
        model: its name.
    """
    torch: Any = import_module("torch")
    chunks = kv.unflatten(3, (-1, CHUNK_TOKENS)).permute(3, 0, 1, 2, 4, 5).contiguous()
    found: dict[Source, list[Frame]] = {}
    for element, name in ELEMENTS.items():
        # fp8 without a scale, as vLLM writes it by default.
        numbers = chunks.to(getattr(torch, name)).view(torch.uint8).numpy()
        found[model, element] = [list(frame.reshape(2 * len(kv), -1)) for frame in numbers]
    return found


def installed() -> list[Codec]:
    """The codecs that can be used here."""
    codecs: list[Codec] = []
    for name in registry.names():
        with suppress(ConfigError):
            codecs.append(registry.by_name(name))
    return codecs


def run(
    sources: Mapping[Source, Sequence[Frame]], repeats: int, progress: Advance = lambda _step: None
) -> CodecBenchResult:
    """Measure each installed codec; `progress` is called once for each source, codec and repeat, and to warm up."""
    codecs = installed()
    rows = [row for source, frames in sources.items() for row in _rows(source, frames, codecs, repeats, progress)]
    return CodecBenchResult(rows, repeats)


def table(result: CodecBenchResult) -> Table:
    """The rows for a terminal."""
    rows = [
        (
            row.model,
            row.codec,
            f"{row.ratio:.4f}",
            f"{row.encode_gb_per_s:.2f}",
            f"{row.decode_gb_per_s:.2f}",
            "yes" if row.bit_exact else "NO",
        )
        for row in result.results
    ]
    columns = ("numbers", "codec", "of raw bytes", "encode GB/s", "decode GB/s", "bit exact")
    title = f"Codecs on one core, medians of {result.repeats}; raw is memcpy"
    return Table(columns, rows, title=title, numeric=4)


def _rows(
    source: Source, frames: Sequence[Frame], codecs: Sequence[Codec], repeats: int, progress: Advance
) -> list[CodecRow]:
    model, element = source
    room = memoryview(bytearray(max(sum(it.bound(len(part)) for part in frames[0]) for it in codecs)))
    back = memoryview(bytearray(sum(map(len, frames[0]))))

    def once(_number: int) -> dict[str, _Sample]:
        samples: dict[str, _Sample] = {}
        for it in codecs:
            samples[it.name] = _sample(it, element, frames, room, back)
            progress(1)
        return samples

    rows: list[CodecRow] = []
    for name, samples in repeated(once, repeats, warm_up=1).items():
        exact, encode, decode = zip(*samples, strict=True)
        speeds = statistics.median(encode), statistics.median(decode)
        each = {"encode_gb_per_s": encode, "decode_gb_per_s": decode}
        ratio = _ratio(registry.by_name(name), element, frames)
        rows.append(CodecRow(name, f"{model} {element}", ratio, *speeds, all(exact), each))
    return rows


def _ratio(codec: Codec, element: Element, frames: Sequence[Frame]) -> float:
    """Bytes of the frames that `seal` makes, divided by those of raw ones."""
    runs = tuple(Run("bytes", element, len(section)) for section in frames[0])
    size = sum(map(len, frames[0]))
    group = GroupLayout(History(), (size,), "bench", runs=(runs,), chunk_tokens=CHUNK_TOKENS)
    slot, scratch = (memoryview(bytearray(it)) for it in (frame_bytes(group), seal_scratch_bytes(group, codec)))
    packed_bytes = 0
    for frame in frames:
        slot[head_bytes(group) :][:size] = np.concatenate(frame).data
        packed_bytes += len(seal(slot, group, Identity(ObjectName(bytes(32))), codec, scratch))
    return round(packed_bytes / len(frames) / len(slot), 4)


def _sample(codec: Codec, element: Element, frames: Sequence[Frame], room: memoryview, back: memoryview) -> _Sample:
    """Encode and decode each frame; `room` holds it encoded, `back` decoded."""
    encode_s, decode_s, bit_exact = 0.0, 0.0, True
    for frame in frames:
        stored: list[memoryview] = []
        free, into = room, back
        start_s = time.perf_counter()
        for section in frame:
            used = codec.encode(section.data, free[: codec.bound(len(section))], element)
            stored.append(free[:used])
            free = free[used:]
        encoded_s = time.perf_counter()
        for section, part in zip(frame, stored, strict=True):
            codec.decode(part, into[: len(section)], element)
            into = into[len(section) :]
        decode_s += time.perf_counter() - encoded_s
        encode_s += encoded_s - start_s
        bit_exact &= np.concatenate(frame).tobytes() == bytes(back)
    gigabytes = len(frames) * len(back) / 1e9
    return bit_exact, round(gigabytes / encode_s, 3), round(gigabytes / decode_s, 3)
