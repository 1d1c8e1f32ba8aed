"""A JSON object for each coding-agent session (kv-cache-tester): `requests`, nested sub-agents, `block_size`.

Ids mean something only within their session, and times count from its start. When sessions start is a choice of the
experiment: here, uniformly within a window, drawn from `numpy.random.default_rng(seed)`, one draw for each session in
the order of the file. A sub-agent's times begin at its parent entry's own.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.trace.files import Place, json_lines, number, whole
from kvtier.trace.ids import Numbering, blocks_of, merged
from kvtier.trace.request import Request, Wrong
from kvtier.trace.requests import larger_block

BLOCK_TOKENS_DEFAULT = 256
SESSION_MAX_S = 30 * 86_400.0
"""What takes longer is more likely in milliseconds."""
DEPTH_MAX = 32
"""Sub-agents of sub-agents."""


class _Part(NamedTuple):
    """One request of a session, its time already that of the trace, its ids those of the session."""

    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: npt.NDArray[np.int32]
    session: str
    line: int
    first_id: int


class SessionLines:
    """Reads session lines and merges them by time; what waits for its time is kept, as larger blocks.

    Args:
        path: the file.
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
        first_line, first = next(islice(json_lines(path), 1))
        with Place(path, first_line):
            own = whole(first, "block_size", least=1)
        wanted = max(BLOCK_TOKENS_DEFAULT, own) if block_tokens is None else block_tokens
        self.block_tokens, self._factor = larger_block(path, own, wanted)
        self.own_block_tokens = own
        starts = f"they start uniformly within {window_h:g} h, seed {seed}"
        self._starts = f"sessions without absolute times: {starts}; what they share is not visible"
        self._doubt: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Trace`."""
        return (self._starts, *self._doubt)

    def requests(self) -> Iterator[Request]:
        """The requests of all sessions, in the order of time."""
        parts: list[_Part] = []
        draw = np.random.default_rng(self._seed)
        first_id = times_back = 0
        longest_s = 0.0
        for line_number, session in json_lines(self._path):
            start_s = float(draw.uniform(0.0, self._window_s))
            with Place(self._path, line_number):
                if whole(session, "block_size", least=1) != self.own_block_tokens:
                    raise ConfigError(
                        f"block_size {session['block_size']}; allowed: {self.own_block_tokens}, as before"
                    )
                highest = -1
                name = str(session.get("id", line_number))
                latest_s: dict[str, float] = {}
                for time_s, agent, request in _flattened(session, start_s, name, 0):
                    times_back += time_s < latest_s.get(agent, time_s)
                    latest_s[agent] = max(time_s, latest_s.get(agent, time_s))
                    longest_s = max(longest_s, time_s - start_s)
                    own = blocks_of(request, Numbering())
                    if len(own):
                        highest = max(highest, int(own.max()))
                    parts.append(
                        _Part(
                            time_s,
                            whole(request, "in"),
                            whole(request, "out"),
                            merged(own, self._factor).astype(np.int32),
                            agent,
                            line_number,
                            first_id,
                        )
                    )
                first_id += highest + 1
        parts.sort(key=lambda it: it.time_s)
        self._doubt = _doubts(times_back, longest_s)
        for part in parts:
            yield Request(
                part.time_s,
                part.input_tokens,
                part.output_tokens,
                part.blocks.astype(np.int64) + part.first_id,
                part.session,
                part.line,
            )


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
