"""A JSON object for each request: `timestamp`, lengths, and `hash_ids` or `hash_runs` (Mooncake, Qwen-Bailian).

Timestamps are milliseconds. In traces whose lines have a `parent_chat_id`, which are Qwen-Bailian's, they are seconds.
"""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvtier.trace.formats.base import (
    UNITS_S,
    Sessions,
    TraceReader,
    TraceRequest,
    TraceWarning,
    next_turn_of,
    time_unit_warning,
)
from kvtier.trace.formats.block_ids import Numbering, blocks_of, by_time, merge_blocks
from kvtier.trace.trace_files import json_lines, number, whole

HEAD_LINES = 2000
"""Lines from which block size and time unit are inferred."""


class RequestLines(TraceReader):
    """Reads request lines.

    Args:
        path: the file, or a directory of such files, whose times count from the same moment.
        block_tokens: tokens of a block, a multiple of the trace's own; None: its own.
        time_unit: unit of `timestamp`: "s", "ms" or "us"; empty: the format's.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or `block_tokens` does not fit.
    """

    options = ("time_unit",)

    def __init__(self, path: Path, block_tokens: int | None = None, time_unit: str = "") -> None:
        super().__init__(path)
        own, has_parents = next(
            json_lines(
                path,
                lambda _file, _number, line: (
                    whole(line, "block_size", least=1) if "block_size" in line else None,
                    "parent_chat_id" in line,
                ),
            )
        )
        if not time_unit and has_parents:
            self.notes = ("timestamps are seconds, as in Qwen-Bailian's traces: the lines have a parent_chat_id",)
        unit = time_unit or ("s" if has_parents else "ms")
        self._unit_s = UNITS_S[unit]
        # Not the requests themselves: one of them may have a million blocks.
        head = [(it.time_s, it.input_tokens, len(it.blocks)) for it in islice(self._lines(), HEAD_LINES)]
        times_s, tokens, _ = zip(*head, strict=True)
        if own is None:
            own, note = _inferred_block_tokens([it[1:] for it in head])
            self.notes += (note,)
        self._set_block_tokens(own, block_tokens)
        self.notes += time_unit_warning(times_s, tokens, unit, is_given=bool(time_unit))

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, in the order of the file; those of a directory are held and sorted by time."""
        lines = by_time(self.path, self._lines()) if self.path.is_dir() else self._lines()
        for request in lines:
            yield request._replace(blocks=merge_blocks(request.blocks, self._factor)) if self._factor > 1 else request

    def _lines(self) -> Iterator[TraceRequest]:
        numbering, sessions = Numbering(), Sessions()

        def request(_file: Path, line_number: int, line: dict[str, Any]) -> TraceRequest:
            return TraceRequest(
                number(line, "timestamp") * self._unit_s,
                whole(line, "input_length"),
                whole(line, "output_length") if "output_length" in line else 0,
                blocks_of(line, numbering),
                sessions.of(line),
                line_number,
                next_turn_of(line),
            )

        return json_lines(self.path, request)


def _inferred_block_tokens(head: list[tuple[int, int]]) -> tuple[int, str]:
    """The power of two that fits all (tokens, blocks), else one that fits some; and a note."""
    blocked = [(tokens, blocks) for tokens, blocks in head if blocks]
    if not blocked:
        return 1, TraceWarning(f"none of the first {len(head)} requests has an id, so reuse is unknown")
    least = max(1.0, *(tokens / blocks for tokens, blocks in blocked))
    most = min((tokens / (blocks - 1) for tokens, blocks in blocked if blocks > 1), default=math.inf)
    block = 2 ** math.ceil(math.log2(least))
    if block < most:
        return block, f"blocks of {block} tokens, from the numbers of ids"
    # Engines give ids to whole blocks only.
    block = 2 ** int(math.log2(max(min(tokens / blocks for tokens, blocks in blocked), 1.0)))
    if block > max(tokens / (blocks + 1) for tokens, blocks in head):
        return block, f"blocks of {block} tokens, from the numbers of ids, which only whole blocks have"
    return math.ceil(least), f"blocks of about {math.ceil(least)} tokens: the numbers of ids do not agree on one"
