"""The reader interface of a trace format, and fields that several formats share."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.trace.trace_files import short
from kvtier.types import NextTurn

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Seconds of each `--time-unit`."""
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
UNIT_REQUESTS_MIN = 3
_BUSY_TOKENS_PER_S = 1e6
_BUSY_REQUESTS_PER_S = 100.0
"""Above either, the unit of timestamps is more likely a longer one."""
_IDLE_REQUESTS_PER_S = 1 / 60
"""Below it, the unit of timestamps is more likely a shorter one."""

_NO_PARENT = ("-1", "None", "")
"""Values of `parent_chat_id` in a session's first line."""

Ids = npt.NDArray[np.integer[Any]]


class TraceRequest(NamedTuple):
    """One prompt of a trace."""

    time_s: float
    """Since the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: Ids
    """Ids of the prompt's blocks. An id names the whole prefix up to its block; the last block may be partial."""
    session: str | None
    line: int
    """Line of the file, from 1."""
    next_turn: NextTurn | None = None
    """What continues the session after the response; None: unknown."""


class TraceWarning(str):
    """A note that something is wrong with the trace."""

    __slots__ = ()


class UnitDoubt(TraceWarning):
    """A warning about a unit that the user has given, which ``--strict`` does not refuse."""

    __slots__ = ()


class TraceReader:
    """Reads a trace, as often as needed, and keeps nothing of it.

    Args:
        path: the file; for some formats a directory of files.
    """

    has_blocks = True
    """Whether requests have block ids. Without them, reuse is unknown."""
    options: ClassVar[tuple[str, ...]] = ()
    """Fields of `ReadOptions` that only some formats use, and this one does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.block_tokens = 1
        self._factor = 1
        """Blocks of the trace that make one of `block_tokens`."""
        self.notes: tuple[str, ...] = ()
        """How the trace was read; complete when `requests` is exhausted."""

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, in the order of the file; formats that are merged sort by time.

        Raises:
            ConfigError: the file cannot be read or a line is malformed; names file, line and field.
        """
        raise NotImplementedError

    def _set_block_tokens(self, own_tokens: int, wanted: int | None) -> None:
        """Set `block_tokens` to `wanted`; None keeps the trace's own.

        Raises:
            ConfigError: `wanted` is not a multiple of `own_tokens`.
        """
        self.block_tokens = own_tokens if wanted is None else wanted
        if self.block_tokens < own_tokens or self.block_tokens % own_tokens:
            raise ConfigError(
                f"--block {wanted} does not fit trace {self.path}; allowed: a multiple of its {own_tokens} tokens"
            )
        self._factor = self.block_tokens // own_tokens


class Sessions:
    """Names the sessions of a trace's lines.

    A line's session is its `session_id` or `chat_id`. Where lines have a `parent_chat_id`, each request has a chat id
    of its own, and the session is the chat that the chain of parents begins with.
    """

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def of(self, line: dict[str, Any]) -> str | None:
        """The session of `line`, if any. Lines come in the order of the file, parents first."""
        session = line.get("session_id", line.get("chat_id"))
        if session is None or "session_id" in line or "parent_chat_id" not in line:
            return None if session is None else str(session)
        chat, parent = str(session), str(line["parent_chat_id"])
        # A parent from before the file's beginning names the session of its answers.
        root = chat if parent in _NO_PARENT else self._roots.get(parent, parent)
        return self._roots.setdefault(chat, root)


def next_turn_of(line: dict[str, Any]) -> NextTurn | None:
    """The line's `next_turn`, if any.

    Raises:
        ConfigError: its value is unknown.
    """
    value = line.get("next_turn")
    try:
        return None if value is None else NextTurn(value)
    except ValueError:
        allowed = ", ".join(it.value for it in NextTurn)
        raise ConfigError(f"next_turn is {short(value)}; allowed: {allowed}") from None


def time_unit_warning(
    times_s: Sequence[float], input_tokens: Sequence[int], time_unit: str, *, is_given: bool
) -> tuple[str, ...]:
    """A warning if timestamps in `time_unit` give an implausible load; else empty.

    A service may be idle, so that a low rate is a reason for doubt only where `is_given`: `time_unit` is not the
    format's.
    """
    span_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    count, tokens = len(times_s), sum(input_tokens)
    if count < UNIT_REQUESTS_MIN or span_s <= 0:
        return ()
    requests_per_s, tokens_per_s = (count - 1) / span_s, tokens / span_s
    is_busy = requests_per_s > _BUSY_REQUESTS_PER_S or tokens_per_s > _BUSY_TOKENS_PER_S
    if not is_busy and not (is_given and requests_per_s < _IDLE_REQUESTS_PER_S):
        return ()
    units = list(UNIT_NAMES)  # from the longest
    likely = units[min(max(units.index(time_unit) + (-1 if is_busy else 1), 0), len(units) - 1)]
    read, meant = UNIT_NAMES[time_unit], UNIT_NAMES[likely]
    looks, advice = (
        (f"like {meant}, not {read}", f"if they are {meant}, use --time-unit {likely}")
        if likely != time_unit
        else ("wrong", "no rate of one service is like that")
    )
    return (
        (UnitDoubt if is_given else TraceWarning)(
            f"timestamps look {looks}: read as {read}, {requests_per_s:,.4g} requests and {tokens_per_s:,.0f} tokens a "
            f"second arrive; {advice}"
        ),
    )
