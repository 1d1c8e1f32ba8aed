"""A JSON object for each request: `timestamp` in milliseconds, lengths, and `hash_ids` or `hash_runs` (Mooncake)."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Request, Wrong
from kvtier.trace.formats.block_ids import Numbering, blocks_of, held, merged
from kvtier.trace.io import Place, json_lines, number, short, whole
from kvtier.types import NextTurn

HEAD_LINES = 2000
"""Lines from which the size of a block and the unit of time are told."""
ADVICE = "; if they are seconds, say --time-unit s"
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
DOUBT_REQUESTS_MIN = 10
_BUSY_TOKENS_PER_S = 1e6
_BUSY_REQUESTS_PER_S = 100.0
"""Above both, a trace that is said to be in milliseconds is more likely in seconds."""


class _Size(NamedTuple):
    """What gives the size of a block and the unit of time; a request itself may have a million blocks."""

    time_s: float
    input_tokens: int
    blocks: int


class RequestLines:
    """Reads request lines.

    Args:
        path: the file, or a directory of such files, whose times count from the same moment.
        block_tokens: tokens of a block to replay with, a multiple of the trace's own; None takes its own.
        time_unit: of `timestamp`: "s", "ms" or "us".

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or `block_tokens` does not fit.
    """

    has_blocks = True

    def __init__(self, path: Path, block_tokens: int | None = None, time_unit: str = "ms") -> None:
        self._path = path
        self.name = str(path)
        self._unit_s = UNITS_S[time_unit]
        head = [_Size(it.time_s, it.input_tokens, len(it.blocks)) for it in islice(self._lines(), HEAD_LINES)]
        own, note = self._stated_block_tokens() or _own_block_tokens(head)
        self.block_tokens, self._factor = larger_block(path, own, block_tokens)
        self.notes = tuple(it for it in (note, _doubt(head, time_unit)) if it)

    def requests(self) -> Iterator[Request]:
        """The requests, in the order of the file; those of a directory, which are kept for it, in the order of time."""
        lines = self._lines(is_held=self._path.is_dir())
        for request in sorted(lines, key=lambda it: it.time_s) if self._path.is_dir() else lines:
            yield request._replace(blocks=merged(request.blocks, self._factor)) if self._factor > 1 else request

    def _stated_block_tokens(self) -> tuple[int, str] | None:
        """What the first line says, if it does."""
        file, line_number, line = next(json_lines(self._path))
        if "block_size" not in line:
            return None
        with Place(file, line_number):
            return whole(line, "block_size", least=1), ""

    def _lines(self, *, is_held: bool = False) -> Iterator[Request]:
        numbering = Numbering()
        blocks = 0
        for file, line_number, line in json_lines(self._path):
            with Place(file, line_number):
                request = Request(
                    number(line, "timestamp") * self._unit_s,
                    whole(line, "input_length"),
                    whole(line, "output_length") if "output_length" in line else 0,
                    blocks_of(line, numbering),
                    session_of(line),
                    line_number,
                    next_turn_of(line),
                )
                if is_held:
                    blocks += len(request.blocks)
                    held(blocks)
            yield request


def session_of(line: dict[str, Any]) -> str | None:
    """The line's `session_id`, or `chat_id` as some traces call it; None where it has none."""
    session = line.get("session_id", line.get("chat_id"))
    return None if session is None else str(session)


def next_turn_of(line: dict[str, Any]) -> NextTurn | None:
    """The line's `next_turn`; None where it has none.

    Raises:
        ConfigError: it has one that says nothing.
    """
    told = line.get("next_turn")
    if told is None:
        return None
    try:
        return NextTurn(told)
    except ValueError:
        allowed = ", ".join(it.value for it in NextTurn)
        raise ConfigError(f"next_turn is {short(told)}; allowed: {allowed}") from None


def larger_block(path: Path, own: int, wanted: int | None) -> tuple[int, int]:
    """Tokens of a block to replay with, and how many of the trace's own blocks make one.

    Raises:
        ConfigError: `wanted` is no multiple of `own`.
    """
    if wanted is None:
        return own, 1
    if wanted < own or wanted % own:
        raise ConfigError(f"--block {wanted} does not fit trace {path}; allowed: a multiple of its {own} tokens")
    return wanted, wanted // own


def _own_block_tokens(head: list[_Size]) -> tuple[int, str]:
    """Request lines do not say it: the power of two that explains the numbers of ids, or at least how many they are."""
    least, most = 1.0, math.inf
    above, whole_most = 0.0, math.inf
    for request in head:
        tokens, blocks = request.input_tokens, request.blocks
        above = max(above, tokens / (blocks + 1))
        if blocks:
            least = max(least, tokens / blocks)
            whole_most = min(whole_most, tokens / blocks)
        if blocks > 1:
            most = min(most, tokens / (blocks - 1))
    if math.isinf(whole_most):
        return 1, Wrong(f"none of the first {len(head)} requests has an id, so nothing can be found again")
    block = 2 ** math.ceil(math.log2(least))
    if block < most:
        return block, f"blocks of {block} tokens, from the numbers of ids"
    # Engines name whole blocks only.
    if above < (block := 2 ** int(math.log2(max(whole_most, 1.0)))):
        return block, f"blocks of {block} tokens, from the numbers of ids, which only whole blocks have"
    return math.ceil(least), f"blocks of about {math.ceil(least)} tokens: the numbers of ids do not agree on one"


def _doubt(head: list[_Size], time_unit: str) -> str:
    """A word on times that can hardly be meant."""
    if time_unit != "ms":
        return ""
    return doubt([it.time_s for it in head], [it.input_tokens for it in head], ADVICE)


def doubt(times_s: Sequence[float], input_tokens: Sequence[int], advice: str) -> str:
    """A word on times, read as milliseconds, between which far too much would arrive."""
    span_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    count, tokens = len(times_s), sum(input_tokens)
    if count < DOUBT_REQUESTS_MIN or span_s <= 0:
        return ""
    if count / span_s < _BUSY_REQUESTS_PER_S or tokens / span_s < _BUSY_TOKENS_PER_S:
        return ""
    return Wrong(
        f"timestamps look like seconds, not milliseconds: read as milliseconds, {count / span_s:,.0f} requests and "
        f"{tokens / span_s:,.0f} tokens a second arrive{advice}"
    )
