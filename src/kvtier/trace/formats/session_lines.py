"""A JSON object for each coding-agent session (kv-cache-tester): `requests`, nested sub-agents, `block_size`.

Ids mean something only within their session, unless its `hash_id_scope` is "global", and times count from its start.
When sessions start is a choice of the experiment: here, uniformly within a window, drawn from
`numpy.random.default_rng(seed)`, one draw for each session in the order of the file. A sub-agent's times begin at its
parent entry's own.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Request, Wrong
from kvtier.trace.formats.block_ids import Numbering, blocks_of, held, merged
from kvtier.trace.formats.request_lines import larger_block
from kvtier.trace.io import Place, json_lines, number, short, whole
from kvtier.types import NextTurn

BLOCK_TOKENS_DEFAULT = 256
SESSION_MAX_S = 30 * 86_400.0
"""What takes longer is more likely in milliseconds."""
DEPTH_MAX = 32
"""Sub-agents of sub-agents."""
SESSION_BLOCKS_MAX = 1 << 24
"""Blocks of all requests of one session, as large as they are replayed."""
_IDS_MAX = (1 << 31) - 1


class _Part(NamedTuple):
    """One request of a session, its time already that of the trace, its ids those of the session."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: npt.NDArray[np.int32]
    session: str
    line: int
    next_turn: NextTurn | None


class SessionLines:
    """Reads session lines and merges them by time; what waits for its time is kept, as larger blocks.

    Args:
        path: the file, or a directory of such files.
        block_tokens: tokens of a block to replay with, a multiple of the trace's own.
        window_h: over how many hours sessions start.
        seed: of the draw of their starts.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or `block_tokens` does not fit.
    """

    has_blocks = True

    def __init__(self, path: Path, block_tokens: int | None = None, window_h: float = 10.0, seed: int = 1) -> None:
        self._path = path
        self.name = str(path)
        self._window_s = window_h * 3600
        self._seed = seed
        file, first_line, first = next(islice(json_lines(path), 1))
        with Place(file, first_line):
            own = whole(first, "block_size", least=1)
            self._is_global = _is_global(first)
        wanted = max(BLOCK_TOKENS_DEFAULT, own) if block_tokens is None else block_tokens
        self.block_tokens, self._factor = larger_block(path, own, wanted)
        self.own_block_tokens = own
        shared = "what they share is visible" if self._is_global else "what they share is not visible"
        self._starts = (
            f"sessions without absolute times: they start uniformly within {window_h:g} h, seed {seed}; {shared}"
        )
        self._doubt: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Trace`."""
        return (self._starts, *self._doubt)

    def requests(self) -> Iterator[Request]:
        """The requests of all sessions, in the order of time."""
        parts: list[_Part] = []
        draw = np.random.default_rng(self._seed)
        numbering = Numbering()
        first_id = times_back = kept = 0
        longest_s = 0.0
        for file, line_number, session in json_lines(self._path):
            start_s = float(draw.uniform(0.0, self._window_s))
            with Place(file, line_number):
                if whole(session, "block_size", least=1) != self.own_block_tokens:
                    raise ConfigError(
                        f"block_size {session['block_size']}; allowed: {self.own_block_tokens}, as before"
                    )
                if _is_global(session) != self._is_global:
                    raise ConfigError(
                        f"hash_id_scope {short(session.get('hash_id_scope'))}; allowed: the same in all lines"
                    )
                name = str(session.get("id", f"{file.name}:{line_number}"))
                latest_s: dict[str, float] = {}
                own: list[_Part] = []
                in_session = 0
                for time_s, agent, request in _flattened(session, start_s, name, 0):
                    times_back += time_s < latest_s.get(agent, time_s)
                    latest_s[agent] = max(time_s, latest_s.get(agent, time_s))
                    longest_s = max(longest_s, time_s - start_s)
                    blocks = merged(blocks_of(request, numbering), self._factor).astype(np.int32)
                    lengths = whole(request, "in"), whole(request, "out")
                    next_turn = _next_turn(request, is_sub_agent=agent != name)
                    kept += len(blocks)
                    in_session += len(blocks)
                    held(kept)
                    if in_session > SESSION_BLOCKS_MAX:
                        raise ConfigError(f"{in_session} blocks in one session; allowed: at most {SESSION_BLOCKS_MAX}")
                    own.append(_Part(time_s, *lengths, blocks, agent, line_number, next_turn))
                if not self._is_global:
                    numbering = Numbering()
                    own, first_id = _apart(own, first_id)
                parts += own
        parts.sort(key=lambda it: it.time_s)
        self._doubt = _doubts(times_back, longest_s)
        for part in parts:
            yield Request(
                part.time_s,
                part.input_tokens,
                part.output_tokens,
                part.blocks.astype(np.int64),
                part.session,
                part.line,
                part.next_turn,
            )


def _next_turn(request: dict[str, Any], *, is_sub_agent: bool) -> NextTurn | None:
    """What the model stopped for tells who goes on; some requests do not say, or say what tells nothing of that."""
    stop = request.get("stop")
    if stop == "end_turn":
        return NextTurn.NOBODY if is_sub_agent else NextTurn.USER
    return NextTurn.TOOL if stop == "tool_use" else None


def _is_global(session: dict[str, Any]) -> bool:
    """Whether ids mean the same in all sessions that say so."""
    scope = session.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise ConfigError(f"hash_id_scope is {short(scope)}; allowed: local, global")
    return scope == "global"


def _apart(parts: list[_Part], first_id: int) -> tuple[list[_Part], int]:
    """The requests of one session with ids that no other session has, from `first_id` on, and the next free one."""
    if not parts:
        return parts, first_id
    ids = np.concatenate([it.blocks for it in parts])
    known, numbers = np.unique(ids, return_inverse=True)
    if first_id + len(known) > _IDS_MAX:
        raise ConfigError(f"more than {_IDS_MAX} distinct blocks up to here; allowed: at most so many")
    numbers = (numbers.reshape(-1) + first_id).astype(np.int32)
    ends = np.cumsum([len(it.blocks) for it in parts])
    apart = [it._replace(blocks=own) for it, own in zip(parts, np.split(numbers, ends[:-1]), strict=True)]
    return apart, first_id + len(known)


def _doubts(times_back: int, longest_s: float) -> tuple[str, ...]:
    """What is wrong with times."""
    doubts: list[str] = []
    if times_back:
        doubts.append(Wrong(f"{times_back} requests come before the one above them; they are put in order"))
    if longest_s > SESSION_MAX_S:
        days = longest_s / 86_400
        doubts.append(
            Wrong(f"times look like milliseconds, not seconds: read as seconds, a session takes {days:,.0f} days")
        )
    return tuple(doubts)


def _flattened(
    session: dict[str, Any], start_s: float, name: str, depth: int
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Requests with their times and the name of their agent; a sub-agent's times begin at its own start."""
    requests = session.get("requests")
    if not isinstance(requests, list):
        raise ConfigError("'requests' is missing or no list")
    if depth > DEPTH_MAX:
        raise ConfigError(f"sub-agents nested deeper than {DEPTH_MAX}")
    for place, request in enumerate(cast("list[dict[str, Any]]", requests)):
        time_s = start_s + number(request, "t")
        if "requests" in request:
            yield from _flattened(request, time_s, f"{name}/{place}", depth + 1)
        else:
            yield time_s, name, request
