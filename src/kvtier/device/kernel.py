"""The kernel that executes copy descriptors within one device. Imports Triton.

One program copies one tile of one descriptor. Addresses come from the table, so one compiled kernel serves gather and
scatter of every engine; only the word size is a compile-time constant. With ``TRITON_INTERPRET=1`` it runs on host
memory.

Triton compiles at the first launch, which needs a C compiler and Python's headers. `check` tests that before any
transfer depends on it.
"""

# pyright: basic, reportMissingImports=false
# Triton is optional, and its language cannot be typed: a kernel's names mean something else than in Python.

import subprocess
import threading
from typing import Any, cast

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from kvtier.device.copy_descriptors import BYTES, CopyDescriptors, table, word_bytes

TILE_WORDS = 1024
ALIGNMENT = 16
"""Bytes of a thread's widest load. It needs a table in which every number is a multiple of this."""
_CHECKED_BYTES = 4096
_launching = threading.Lock()
"""Triton does not document that threads may compile concurrently. A launch takes microseconds."""


def _copy_kernel(rows, word: tl.constexpr, is_aligned: tl.constexpr, tile_words: tl.constexpr) -> None:  # noqa: ANN001 - a kernel may name no type
    """Copy row `program_id(0)` of a table of (source, target, bytes), its tile `program_id(1)`."""
    if word == 8:
        kind: tl.constexpr = tl.int64
    elif word == 4:
        kind: tl.constexpr = tl.int32
    elif word == 2:
        kind: tl.constexpr = tl.int16
    else:
        kind: tl.constexpr = tl.int8
    row = rows + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(row).to(tl.pointer_type(kind))
    target = tl.load(row + 1).to(tl.pointer_type(kind))
    size = tl.load(row + 2) // word
    if is_aligned:
        # The compiler cannot infer alignment of addresses from a table; without it each thread moves single words.
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        size = tl.multiple_of(size, 2)
    at = tl.program_id(1).to(tl.int64) * tile_words + tl.arange(0, tile_words)
    mask = at < size
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


kernel = cast("Any", triton.jit(_copy_kernel))


def copy_kernel(descriptors: CopyDescriptors, on_device: torch.Tensor) -> None:
    """Queue the copies of `descriptors` on the current stream.

    Args:
        descriptors: (source, target, bytes), addresses of one device; not empty.
        on_device: the same table in device memory, int64 [descriptors, 3].
    """
    word = word_bytes(descriptors)
    tiles = -(-int(descriptors[:, BYTES].max()) // (word * TILE_WORDS))
    is_aligned = word == 8 and not bool((descriptors % ALIGNMENT).any())
    with _launching:
        kernel[len(descriptors), tiles](on_device, word, is_aligned, TILE_WORDS)


def check(device: torch.device) -> str:
    """Why the kernel cannot be used here; empty if it works. Makes one small copy and waits for it."""
    try:
        source = torch.arange(_CHECKED_BYTES, device=device).to(torch.uint8)
        target = torch.zeros_like(source)
        rows = table([source.data_ptr()], [target.data_ptr()], [_CHECKED_BYTES])
        copy_kernel(rows, torch.from_numpy(rows).to(device))
        return "" if torch.equal(source, target) else "it copied wrong bytes"
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
