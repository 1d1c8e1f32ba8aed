"""Traces for tests: the public ones, those of a file, and those of a list of requests."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from kvtier.trace.arrays import TraceArrays, read_arrays
from kvtier.trace.formats.base import TraceReader, TraceRequest
from kvtier.trace.open import ReadOptions, open_trace

TRACES = Path(__file__).parent / "golden" / "traces"
MAGAGENT, MINISWE = (TRACES / f"lmcache_{name}_b64.jsonl.gz" for name in ("magagent", "miniswe"))

Row = tuple[float, int, Sequence[int], str | None]
"""Time, input tokens, block ids and session."""


def arrays_of(path: Path, *, is_strict: bool = False, block_tokens: int | None = None) -> TraceArrays:
    return read_arrays(open_trace(path, ReadOptions(block_tokens=block_tokens)), is_strict=is_strict)


@cache
def public(name: str) -> TraceArrays:
    """A public trace, with blocks of its own size; read once, and not to be changed."""
    return arrays_of(TRACES / f"{name}.jsonl.gz")


class Listed(TraceReader):
    def __init__(self, rows: Iterable[Row], block_tokens: int) -> None:
        super().__init__(Path("list"))
        self.block_tokens = block_tokens
        self._rows = list(rows)

    def requests(self) -> Iterator[TraceRequest]:
        for line, (time_s, tokens, ids, session) in enumerate(self._rows, 1):
            yield TraceRequest(time_s, tokens, 1, np.asarray(ids, np.int64), session, line)


def listed(rows: Iterable[Row], block_tokens: int = 16, *, is_strict: bool = False) -> TraceArrays:
    return read_arrays(Listed(rows, block_tokens), is_strict=is_strict)
