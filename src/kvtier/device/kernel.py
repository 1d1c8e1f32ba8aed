"""The kernel that copies pieces between addresses of one device. Imports Triton.

One program copies one tile of one piece. The table says where, so the same compiled kernel serves gather and scatter of
every engine; only the width of a word is compiled in. With ``TRITON_INTERPRET=1`` it runs on host memory.

Triton compiles when a kernel is first launched, with a C compiler and Python's headers, which a machine may not have;
`check` finds that out before anything depends on it.
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

from kvtier.device.pieces import BYTES, Pieces, table, word_bytes

TILE_WORDS = 1024
ALIGNMENT = 16
"""Bytes that one thread can move at once, where every number of the table is a multiple of them."""
_CHECKED_BYTES = 4096
_launching = threading.Lock()
"""Triton does not promise that several threads may compile at once, and a launch takes microseconds."""


def _copy_pieces(rows, word: tl.constexpr, is_aligned: tl.constexpr, tile_words: tl.constexpr) -> None:  # noqa: ANN001 - a kernel may name no type
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
        # Not to be seen in an address that comes from a table; without it each thread moves one word at a time.
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        size = tl.multiple_of(size, 2)
    at = tl.program_id(1).to(tl.int64) * tile_words + tl.arange(0, tile_words)
    mask = at < size
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


kernel = cast("Any", triton.jit(_copy_pieces))


def copy_pieces(pieces: Pieces, on_device: torch.Tensor) -> None:
    """Begin to copy each row of `pieces` on the current stream.

    Args:
        pieces: (source, target, bytes), addresses of one device; not empty.
        on_device: the same table in that device's memory, int64 [pieces, 3].
    """
    word = word_bytes(pieces)
    tiles = -(-int(pieces[:, BYTES].max()) // (word * TILE_WORDS))
    is_aligned = word == 8 and not bool((pieces % ALIGNMENT).any())
    with _launching:
        kernel[len(pieces), tiles](on_device, word, is_aligned, TILE_WORDS)


def check(device: torch.device) -> str:
    """Copy a little; why the kernel is of no use here, or nothing. Waits for the device."""
    try:
        source = torch.arange(_CHECKED_BYTES, device=device).to(torch.uint8)
        target = torch.zeros_like(source)
        rows = table([source.data_ptr()], [target.data_ptr()], [_CHECKED_BYTES])
        copy_pieces(rows, torch.from_numpy(rows).to(device))
        return "" if torch.equal(source, target) else "it copies wrongly"
    except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
