"""Reads a JSON object for each coding-agent session (kv-cache-tester): `requests`, nested sub-agents, `block_size`.

Ids are local to a session unless its `hash_id_scope` is "global". Times count from the start of a session, but the
trace has no start times. The reader draws them in the order of the file, uniformly in a window, from
`numpy.random.default_rng(seed)`. A sub-agent's times count from the `t` of its entry.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.trace.formats.base import (
    Numbering,
    TraceReader,
    TraceRequest,
    TraceWarning,
    blocks_of,
    by_time,
    merge_blocks,
)
from kvtier.tools.trace.trace_files import json_lines, number, short, whole
from kvtier.types import NextTurn

BLOCK_TOKENS_DEFAULT = 256
SESSION_MAX_S = 30 * 86_400.0
"""Longest plausible session. Times of a longer one are probably milliseconds."""
DEPTH_MAX = 32
"""Deepest nesting of sub-agents."""
SESSION_BLOCKS_MAX = 1 << 24
"""Maximum number of merged blocks in all requests of one session."""
_IDS_MAX = (1 << 31) - 1


class SessionLines(TraceReader):
    """Reads session lines and sorts all requests by time. All requests are in memory, with merged blocks.

    Args:
        path: the file, or a directory of such files.
        block_tokens: number of tokens per block, a multiple of the trace's own.
        window_h: hours within which sessions start.
        seed: seed of the start times.
        least_tokens: least number of tokens per block, if `block_tokens` is not given.

    Raises:
        ConfigError: the file cannot be read, a line is malformed, or `block_tokens` does not fit.
    """

    options = ("window_h",)

    def __init__(
        self,
        path: Path,
        block_tokens: int | None = None,
        window_h: float = 10.0,
        seed: int = 1,
        least_tokens: int = BLOCK_TOKENS_DEFAULT,
    ) -> None:
        super().__init__(path)
        self._window_s = window_h * 3600
        self._seed = seed
        self.own_block_tokens, self._is_global = next(json_lines(path, _shape))
        own = self.own_block_tokens
        self._set_block_tokens(own, block_tokens or max(least_tokens, own))
        shared = "what they share is visible" if self._is_global else "what they share is not visible"
        self._starts = (
            f"sessions without absolute times: they start uniformly within {window_h:g} h, seed {seed}; {shared}"
        )
        self.notes = (self._starts,)

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests of all sessions, sorted by time."""
        draw = np.random.default_rng(self._seed)
        numbering = Numbering()
        first_id = times_back = 0
        longest_s = 0.0

        def requests_of(file: Path, line: int, session: dict[str, Any]) -> list[TraceRequest]:
            nonlocal first_id, longest_s, numbering, times_back
            start_s = float(draw.uniform(0.0, self._window_s))
            block_tokens, is_global = _shape(file, line, session)
            if block_tokens != self.own_block_tokens:
                raise ConfigError(f"block_size {block_tokens}; allowed: {self.own_block_tokens}, as in the first line")
            if is_global != self._is_global:
                scope = short(session.get("hash_id_scope"))
                raise ConfigError(f"hash_id_scope is {scope}; use the same scope in all lines")
            name = str(session.get("id", f"{file.name}:{line}"))
            latest_s: dict[str, float] = {}
            found: list[TraceRequest] = []
            count = 0
            for time_s, agent, fields in _flattened(session, start_s, name, 0):
                times_back += time_s < latest_s.get(agent, time_s)
                latest_s[agent] = max(time_s, latest_s.get(agent, time_s))
                longest_s = max(longest_s, time_s - start_s)
                # int32, because the blocks stay in memory.
                blocks = merge_blocks(blocks_of(fields, numbering), self._factor).astype(np.int32)
                next_turn = _next_turn(fields, is_sub_agent=agent != name)
                lengths = whole(fields, "in"), whole(fields, "out")
                model = str(fields["model"]) if "model" in fields else None
                found.append(TraceRequest(time_s, *lengths, blocks, agent, line, next_turn, model))
                count += len(blocks)
                if count > SESSION_BLOCKS_MAX:
                    raise ConfigError(f"{count} blocks in one session; allowed: at most {SESSION_BLOCKS_MAX}")
            if not self._is_global:
                numbering = Numbering()
                found, first_id = _renumbered(found, first_id)
            return found

        requests = by_time(self.path, chain.from_iterable(json_lines(self.path, requests_of)))
        self.notes = (self._starts, *_time_warnings(times_back, longest_s))
        yield from requests


def _next_turn(request: dict[str, Any], *, is_sub_agent: bool) -> NextTurn | None:
    """Return the kind of the next turn if the stop reason `tool_use` or `end_turn` shows it; None otherwise."""
    stop = request.get("stop")
    if stop == "end_turn":
        return NextTurn.NOBODY if is_sub_agent else NextTurn.USER
    return NextTurn.TOOL if stop == "tool_use" else None


def _shape(_file: Path, _line: int, session: dict[str, Any]) -> tuple[int, bool]:
    """Return the block size in tokens, and whether block ids are global to the trace."""
    scope = session.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise ConfigError(f"hash_id_scope is {short(scope)}; allowed: local, global")
    return whole(session, "block_size", least=1), scope == "global"


def _renumbered(requests: list[TraceRequest], first_id: int) -> tuple[list[TraceRequest], int]:
    """Return one session's requests with ids from `first_id` on, and the next unused id."""
    if not requests:
        return requests, first_id
    known, numbers = np.unique(np.concatenate([it.blocks for it in requests]), return_inverse=True)
    if first_id + len(known) > _IDS_MAX:
        raise ConfigError(f"the trace has more than {_IDS_MAX} distinct blocks up to here, which is the maximum")
    numbers = (numbers.reshape(-1) + first_id).astype(np.int32)
    ends = np.cumsum([len(it.blocks) for it in requests])
    parts = np.split(numbers, ends[:-1])
    return [it._replace(blocks=part) for it, part in zip(requests, parts, strict=True)], first_id + len(known)


def _time_warnings(times_back: int, longest_s: float) -> tuple[str, ...]:
    warnings: list[str] = []
    if times_back:
        warnings.append(TraceWarning(f"{times_back} requests come before the previous one; they are sorted"))
    if longest_s > SESSION_MAX_S:
        days = f"{longest_s / 86_400:,.0f} days"
        warnings.append(
            TraceWarning(f"times look like milliseconds, not seconds: read as seconds, a session takes {days}")
        )
    return tuple(warnings)


def _flattened(
    session: dict[str, Any], start_s: float, name: str, depth: int
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Yield (time, agent, fields) of each request. A sub-agent's times count from the time of its entry."""
    requests = session.get("requests")
    if not isinstance(requests, list):
        raise ConfigError("'requests' is missing or not a list")
    if depth > DEPTH_MAX:
        raise ConfigError(f"sub-agents are nested more than {DEPTH_MAX} deep")
    for place, request in enumerate(cast("list[dict[str, Any]]", requests)):
        time_s = start_s + number(request, "t")
        if "requests" in request:
            yield from _flattened(request, time_s, f"{name}/{place}", depth + 1)
        else:
            yield time_s, name, request
