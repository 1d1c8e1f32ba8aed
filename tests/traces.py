"""Makes traces for tests: public ones, from a file, or from a list of requests."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from kvtier.tools.replay.sweep import CacheResult, Task, replay_task
from kvtier.tools.trace.arrays import TraceArrays, read_arrays
from kvtier.tools.trace.formats.base import ReadOptions, TraceReader, TraceRequest, open_trace

TRACES = Path(__file__).parent / "golden" / "traces"
MAGAGENT, MINISWE = (TRACES / f"lmcache_{name}_b64.jsonl.gz" for name in ("magagent", "miniswe"))

Row = tuple[float, int, Sequence[int], str | None]
"""Time, input tokens, block ids and session of a request."""


def arrays_of(path: Path, *, is_strict: bool = False, block_tokens: int | None = None) -> TraceArrays:
    return read_arrays(open_trace(path, ReadOptions(block_tokens=block_tokens)), is_strict=is_strict)


@cache
def public(name: str) -> TraceArrays:
    """Return a public trace with blocks of its own size. It is read once, so tests must not change it."""
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


def replay(trace: TraceArrays, policy: str, capacity_tokens: int | None) -> CacheResult:
    """Replay a trace with one policy and one capacity."""
    result = replay_task(trace, Task(policy, capacity_tokens), lambda _: None, lambda: False)
    assert result is not None, "it is never stopped"
    return result
