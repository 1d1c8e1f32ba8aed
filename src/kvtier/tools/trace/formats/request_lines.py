"""Reads a JSON object for each request: `timestamp`, lengths, and `hash_ids` or `hash_runs` (Mooncake, Qwen-Bailian).

Timestamps are milliseconds, but seconds in Qwen-Bailian's traces, whose lines have a `parent_chat_id`.

AIPerf's multi-turn traces (`docs/traces` and `docs/reference/conversation-context-mode.md` of ai-dynamo/aiperf) have a
`timestamp` for the first turn of a session, and a `delay` in ms for later turns. A later line has only the tokens and
ids that the turn adds to the previous prompt and answer, unless the `context_mode` is "message_array_with_responses".
"""

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.trace.formats.base import (
    UNITS_S,
    Ids,
    Numbering,
    Sessions,
    TraceReader,
    TraceRequest,
    TraceWarning,
    blocks_of,
    by_time,
    merge_blocks,
    next_turn_of,
    time_after,
    time_unit_warning,
)
from kvtier.tools.trace.trace_files import json_lines, number, short, whole

HEAD_LINES = 2000
"""Number of lines from which block size and time unit are inferred."""
_ADDS = (
    "lines with a delay add to the prompt and answer before them (AIPerf); a delay counts from the previous request, "
    "because the time of the answer is unknown"
)
_WHOLE_PROMPTS = "message_array_with_responses"
"""`context_mode` of lines with whole prompts."""


_Parsed = TypeVar("_Parsed")


class Names(NamedTuple):
    """Names of a line's fields."""

    time: str = "timestamp"
    input_tokens: str = "input_length"
    output_tokens: str = "output_length"
    ids: str = "hash_ids"
    block_tokens: str = "block_size"
    same: tuple[str, ...] = ()
    """Further fields, which have one value in all lines that have them."""


class RequestLines(TraceReader):
    """Reads request lines. Subclasses give the fields other names.

    Args:
        path: the file, or a directory of such files with a common start of time.
        block_tokens: number of tokens per block, a multiple of the trace's own number; None means that number.
        time_unit: unit of `timestamp`: "s", "ms" or "us"; empty means the format's own.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or `block_tokens` does not fit.
    """

    options = ("time_unit",)
    names = Names(same=("context_mode",))
    own_unit: ClassVar[str] = ""
    """Unit of time. If it is empty, the lines determine it."""
    is_sorted: ClassVar[bool] = True
    """Whether the lines of a file are in order of time."""

    def __init__(self, path: Path, block_tokens: int | None = None, time_unit: str = "") -> None:
        super().__init__(path)
        names = self.names

        def shape(_number: int, line: dict[str, Any]) -> tuple[int | None, bool, dict[str, object]]:
            own = whole(line, names.block_tokens, least=1) if names.block_tokens in line else None
            return own, "parent_chat_id" in line, {it: line.get(it) for it in (names.block_tokens, *names.same)}

        first = next(self._parsed(shape), None)
        if first is None:
            raise ConfigError(f"trace {path} has no request; allowed: at least one")
        own, has_parents, self._same = first
        if not time_unit and has_parents:
            self.notes = ("timestamps are seconds, as in Qwen-Bailian's traces: the lines have a parent_chat_id",)
        unit = time_unit or self.own_unit or ("s" if has_parents else "ms")
        self._unit_s = UNITS_S[unit]
        self._numbering = Numbering()
        self._adds: bool | None = None
        """Whether later lines of a session add to the prompt; None while the first lines are read."""
        # The requests themselves are not kept, because a request may have a million blocks.
        head = [(it.time_s, it.input_tokens, len(it.blocks)) for it in islice(self._lines(), HEAD_LINES)]
        times_s, tokens, _ = zip(*head, strict=True)
        if own is None:
            own, note = _inferred_block_tokens([it[1:] for it in head])
            self.notes += (note,)
        self._own_tokens = own
        self._set_block_tokens(own, block_tokens)
        self._adds = self._adds or False
        if self._adds:
            self.notes += (_ADDS,)
        else:
            self.notes += time_unit_warning(times_s, tokens, unit, is_given=bool(time_unit))

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of the file. Requests of a directory and of AIPerf are sorted by time."""
        lines = self._whole_prompts() if self._adds else self._lines()
        if self._adds or self.path.is_dir() or not self.is_sorted:
            lines = by_time(self.path, lines)
        for request in lines:
            yield request._replace(blocks=merge_blocks(request.blocks, self._factor)) if self._factor > 1 else request

    def _flat(self, line: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of a line, or None if it is not a request."""
        return line

    def _parsed(self, parse: Callable[[int, dict[str, Any]], _Parsed]) -> Iterator[_Parsed]:
        def parsed(_file: Path, line_number: int, line: dict[str, Any]) -> _Parsed | None:
            flat = self._flat(line)
            return None if flat is None else parse(line_number, flat)

        return (it for it in json_lines(self.path, parsed) if it is not None)

    def _lines(self) -> Iterator[TraceRequest]:
        self._numbering, sessions = Numbering(), Sessions()
        latest_s: dict[str | None, float] = {}
        names = self.names

        def request(line_number: int, line: dict[str, Any]) -> TraceRequest:
            for name, first in self._same.items():
                if line.get(name, first) != first:
                    raise ConfigError(f"{name} is {short(line[name])}; allowed: {short(first)}, as in the first line")
            session = sessions.of(line)
            time_s = time_after(line, latest_s.get(session))
            if time_s is None:
                time_s = number(line, names.time) * self._unit_s
            elif line.get("context_mode") != _WHOLE_PROMPTS and not self._adds:
                if self._adds is False:
                    raise ConfigError(
                        f"the line has a delay, but the first {HEAD_LINES} lines have none; allowed: a timestamp"
                    )
                self._adds = True
            if session is not None:
                latest_s[session] = time_s
            return TraceRequest(
                time_s,
                whole(line, names.input_tokens),
                whole(line, names.output_tokens) if names.output_tokens in line else 0,
                blocks_of(line, self._numbering, names.ids),
                session,
                line_number,
                next_turn_of(line),
            )

        return self._parsed(request)

    def _whole_prompts(self) -> Iterator[TraceRequest]:
        """Yield requests with their whole prompts.

        Blocks after a session's first prompt get ids that only this session has.
        """
        before: dict[str, tuple[Ids, int]] = {}
        for request in self._lines():
            if request.session is None:
                yield request
                continue
            own, line = self._own_tokens, request.line
            blocks, tokens = before.get(request.session, (None, 0))
            tokens += request.input_tokens
            if blocks is None:
                grown, prompt = request.blocks[: tokens // own], request.blocks
            else:
                places = range(len(blocks), tokens // own)
                names = [f"{request.session} {place}" for place in places]
                # The last block is partial, and differs in the next prompt.
                last = [f"{request.session} {line} last"] if tokens % own else list[str]()
                grown = np.append(blocks, self._numbering.numbered(names))
                prompt = np.append(grown, self._numbering.numbered(last))
            before[request.session] = grown, tokens + request.output_tokens
            yield request._replace(input_tokens=tokens, blocks=prompt)


def _inferred_block_tokens(head: list[tuple[int, int]]) -> tuple[int, str]:
    """Infer the block size from pairs of tokens and blocks. Return the size, and a note on it.

    The size is a power of two if one fits all pairs.
    """
    blocked = [(tokens, blocks) for tokens, blocks in head if blocks]
    if not blocked:
        return 1, TraceWarning(f"none of the first {len(head)} requests has an id, so reuse is unknown")
    least = max(1.0, *(tokens / blocks for tokens, blocks in blocked))
    most = min((tokens / (blocks - 1) for tokens, blocks in blocked if blocks > 1), default=math.inf)
    block = 2 ** math.ceil(math.log2(least))
    if block < most:
        return block, f"blocks of {block} tokens, derived from the numbers of ids"
    # Engines give ids only to whole blocks.
    block = 2 ** int(math.log2(max(min(tokens / blocks for tokens, blocks in blocked), 1.0)))
    if block > max(tokens / (blocks + 1) for tokens, blocks in head):
        return block, f"blocks of {block} tokens, derived from the numbers of ids, which only whole blocks have"
    return math.ceil(least), f"blocks of about {math.ceil(least)} tokens: the numbers of ids fit no single size"
