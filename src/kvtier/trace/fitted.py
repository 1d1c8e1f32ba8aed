"""Sessions like those of a trace: drawn from it whole, with their lengths, pauses and sharing, and mixed anew.

A block is *shared* when it is used through at least half of the trace and many different ones follow it, or such a
block: a system prompt. Requests that have any other block in common belong to one session, as do those to which the
trace gives one name: a conversation with its branches, a document and all who ask about it. When sessions begin stays
as it was; which one begins is drawn from those that began about then, each once, so that what changes in the course of
the trace goes on changing. A trace that is longer than its model goes through it again, with the same shared blocks and
new sessions.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.trace.arrays import NEXT_TURNS, Packed
from kvtier.trace.synthesis import Run, Session, Step

FOLLOWERS_MIN: Final = 16
SPAN_MIN: Final = 0.5
NEAR: Final = 0.05
"""How far a session is moved at most, as a share of all; at least by three places."""

Numbers = npt.NDArray[np.int64]


class Fitted:
    """A `Source` of such sessions.

    Args:
        packed: the trace to be like.
        seed: of all draws.
        requests_per_s: how often requests come on average; None is as in the trace. Pauses within sessions stay.

    Raises:
        ConfigError: the trace tells no blocks or has one request only.
    """

    def __init__(self, packed: Packed, seed: int, requests_per_s: float | None = None) -> None:
        if not packed.has_blocks:
            raise ConfigError(f"--like {packed.name}: it tells no blocks; allowed: a trace that does")
        duration_s = float(packed.time_s[-1]) - float(packed.time_s[0])
        if duration_s <= 0:
            raise ConfigError(f"--like {packed.name}: all its requests come at once; allowed: a trace that takes time")
        self.block_tokens = packed.block_tokens
        is_shared = _shared(packed, duration_s)
        self.shared_blocks = int(is_shared.sum())
        self._seed = seed
        found = _sessions(packed, is_shared)
        found.sort(key=lambda it: it[0])
        self._models = [session for _, session in found]
        starts = np.array([start_s for start_s, _ in found])
        wanted_s = duration_s if requests_per_s is None else len(packed) / requests_per_s
        self._period_s = wanted_s * (1 + 1 / len(packed))
        self._starts: list[float] = (starts * (wanted_s / duration_s)).tolist()

    @property
    def session_count(self) -> int:
        """Sessions that the trace has."""
        return len(self._models)

    def sessions(self) -> Iterator[tuple[float, Session]]:
        """See `Source`."""
        draw = np.random.default_rng(self._seed)
        count = len(self._models)
        reach = max(3.0, count * NEAR)
        begin_s = 0.0
        while True:
            # Each once in a period: drawn with repetition, a few long ones would decide over a trace's hit rate.
            order = np.argsort(np.arange(count) + draw.uniform(-reach, reach, count), kind="stable")
            for start_s, place in zip(self._starts, order.tolist(), strict=True):
                yield begin_s + start_s, self._models[place]
            begin_s += self._period_s


def _shared(packed: Packed, duration_s: float) -> npt.NDArray[np.bool_]:
    """For each block, whether it belongs to what the whole trace shares."""
    parents = np.asarray(packed.parents, np.int64)
    first_s, last_s = np.full(len(parents), np.inf), np.full(len(parents), -np.inf)
    for request in range(len(packed)):
        ids = _ids(packed, request)
        time_s = float(packed.time_s[request])
        first_s[ids] = np.minimum(first_s[ids], time_s)
        last_s[ids] = time_s
    followers = np.bincount(parents[parents >= 0], minlength=len(parents))
    is_shared: npt.NDArray[np.bool_] = (followers >= FOLLOWERS_MIN) & (last_s - first_s >= SPAN_MIN * duration_s)
    for block in np.flatnonzero(is_shared).tolist():
        before = int(parents[block])
        while before >= 0 and not is_shared[before]:
            is_shared[before] = True
            before = int(parents[before])
    return is_shared


def _sessions(packed: Packed, is_shared: npt.NDArray[np.bool_]) -> list[tuple[float, Session]]:
    """Seconds from the start of the trace, and the session that begins there."""
    shared_numbers = np.cumsum(is_shared) - 1
    began_s = float(packed.time_s[0])
    found: list[tuple[float, Session]] = []
    for requests in _together(packed, is_shared):
        own: dict[int, int] = {}
        speakers: dict[int, int] = {}
        steps: list[Step] = []
        start_s = float(packed.time_s[requests[0]])
        for request in requests:
            numbers = [
                int(shared_numbers[block]) if is_shared[block] else -1 - own.setdefault(block, len(own))
                for block in _ids(packed, request).tolist()
            ]
            session = int(packed.session[request])
            next_turn = int(packed.next_turn[request])
            speaker = -1 if session < 0 else speakers.setdefault(session, len(speakers))
            steps.append(
                Step(
                    float(packed.time_s[request]) - start_s,
                    int(packed.input_tokens[request]),
                    int(packed.output_tokens[request]),
                    _runs(numbers),
                    speaker,
                    NEXT_TURNS[next_turn] if next_turn >= 0 else None,
                )
            )
        found.append((start_s - began_s, Session(tuple(steps), len(own), len(speakers))))
    return found


def _together(packed: Packed, is_shared: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Requests by session, in their order."""
    leader = list(range(len(packed)))

    def lead(request: int) -> int:
        while leader[request] != request:
            leader[request] = leader[leader[request]]
            request = leader[request]
        return request

    by_block = np.full(packed.block_count, -1, np.int64)
    by_name: dict[int, int] = {}
    for request in range(len(packed)):
        ids = _ids(packed, request)
        own = ids[~is_shared[ids]]
        known = by_block[own]
        for other in set(known[known >= 0].tolist()):
            leader[lead(request)] = lead(other)
        by_block[own] = request
        name = int(packed.session[request])
        if name >= 0:
            leader[lead(request)] = lead(by_name.setdefault(name, request))
    out: dict[int, list[int]] = {}
    for request in range(len(packed)):
        out.setdefault(lead(request), []).append(request)
    return list(out.values())


def _runs(numbers: list[int]) -> tuple[Run, ...]:
    """Neighbours as runs; a session's own number n is given as -1 - n."""
    runs: list[Run] = []
    for number in numbers:
        is_shared = number >= 0
        block = number if is_shared else -1 - number
        if runs and runs[-1].is_shared == is_shared and runs[-1].first + runs[-1].blocks == block:
            runs[-1] = runs[-1]._replace(blocks=runs[-1].blocks + 1)
        else:
            runs.append(Run(block, 1, is_shared))
    return tuple(runs)


def _ids(packed: Packed, request: int) -> Numbers:
    return np.asarray(packed.ids[int(packed.starts[request]) : int(packed.starts[request + 1])])
