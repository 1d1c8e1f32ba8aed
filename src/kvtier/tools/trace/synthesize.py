"""Makes synthetic traces in the form of request lines. Their sessions are drawn from statistics or another trace.

A source yields sessions in the order of their starts. `synthesized` merges their requests by time and gives them block
ids. Only open sessions take memory, not the whole synthetic trace.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.tools.trace.arrays import NEXT_TURNS, TraceArrays, id_runs
from kvtier.tools.trace.formats.base import RUN_IDS_MAX
from kvtier.types import NextTurn

REQUESTS_MAX = 10**9
FOLLOWERS_MIN: Final = 16
SPAN_MIN: Final = 0.5
SHIFT_MAX: Final = 0.05
"""Largest random shift of a session in the order of starts, as a share of the number of sessions. If that is less than
three places, the shift is up to three places."""
_BATCH = 1024
"""Number of sessions per draw. A different number would give different sessions for a seed."""
_TURNS_MAX = 10_000
_TOKENS_MAX = 1 << 24


class IdRun(NamedTuple):
    """Consecutive block ids of a prompt."""

    first: int
    """First id, counted among the trace's shared blocks or among the session's own blocks."""
    blocks: int
    is_shared: bool


class SyntheticRequest(NamedTuple):
    """One request of a session."""

    after_s: float
    """Seconds since the start of the session. They never decrease."""
    input_tokens: int
    output_tokens: int
    runs: tuple[IdRun, ...]
    conversation: int
    """Index of the request's conversation in this synthetic session, which may have several; -1 if it has none."""
    next_turn: NextTurn | None = None


class SyntheticSession(NamedTuple):
    """Requests that share blocks: a conversation, an agent with sub-agents, or questions about one document."""

    requests: tuple[SyntheticRequest, ...]
    """At least one request, in order of time."""
    own_blocks: int
    """Number of blocks that no other session has."""
    conversations: int


def synthesized(source: "StatisticalSource | TraceSource", requests: int) -> Iterator[str]:
    """Yield the lines of a trace.

    Raises:
        ConfigError: there are too many requests, or more blocks than a trace can have.
    """
    if not 1 <= requests <= REQUESTS_MAX:
        raise ConfigError(f"--requests {requests}; allowed: 1 to {REQUESTS_MAX}")
    next_block, next_name = source.shared_blocks, 0
    open_sessions: list[tuple[float, int, int, int, int, SyntheticSession, float]] = []
    """Tuples (time of next request, number, index of that request, first block, first name, session, start)."""
    sessions = source.sessions()
    start_s, session = next(sessions)
    began_s, number = start_s, 0
    head = f'{{"block_size":{source.block_tokens},'
    for _ in range(requests):
        while not open_sessions or start_s <= open_sessions[0][0]:
            time_s = start_s + session.requests[0].after_s
            heapq.heappush(open_sessions, (time_s, number, 0, next_block, next_name, session, start_s))
            next_block += session.own_blocks
            next_name += session.conversations
            number += 1
            if next_block > RUN_IDS_MAX:
                raise ConfigError(
                    f"--requests {requests} needs more than {RUN_IDS_MAX} blocks; use fewer requests or larger blocks"
                )
            start_s, session = next(sessions)
        time_s, order, place, block, name, first, since_s = open_sessions[0]
        yield head + _line(first.requests[place], time_s - began_s, block, name)
        head = "{"
        if place + 1 < len(first.requests):
            after = since_s + first.requests[place + 1].after_s
            heapq.heapreplace(open_sessions, (after, order, place + 1, block, name, first, since_s))
        else:
            heapq.heappop(open_sessions)


def _line(request: SyntheticRequest, time_s: float, block: int, name: int) -> str:
    runs = ",".join([f"[{first if shared else first + block},{blocks}]" for first, blocks, shared in request.runs])
    session = f'"session_id":{name + request.conversation},' if request.conversation >= 0 else ""
    session += f'"next_turn":"{request.next_turn.value}",' if request.next_turn is not None else ""
    return (
        f'"timestamp":{time_s * 1000:.3f},"input_length":{request.input_tokens},'
        f'"output_length":{request.output_tokens},{session}"hash_runs":[{runs}]}}\n'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Parameters of synthetic sessions. Lengths and pauses are log-normal with these means."""

    requests_per_s: float = 2.0
    """Mean rate of requests. The starts of sessions are a Poisson process."""
    turns: float = 4.0
    """Mean number of requests of a session, which is geometrically distributed."""
    first_tokens: float = 1500.0
    """Length of the first prompt after its shared part."""
    turn_tokens: float = 600.0
    """Growth of the prompt from turn to turn: the response and the next question."""
    output_tokens: float = 300.0
    think_s: float = 60.0
    """Pause from one request of a session to the next."""
    spread: float = 1.0
    """Standard deviation of the logarithm of lengths and pauses."""
    shared_prompts: int = 16
    """Number of distinct shared prompts."""
    shared_tokens: int = 1024
    """Length of each shared prompt, in whole blocks."""
    shared_share: float = 0.8
    """Share of the sessions that start with a shared prompt."""
    popularity: float = 1.0
    """Zipf exponent of the shared prompts."""
    block_tokens: int = 512

    def __post_init__(self) -> None:
        limits = {
            "requests_per_s": (1e-6, 1e6),
            "turns": (1.0, 1000.0),
            "first_tokens": (1.0, 1e7),
            "turn_tokens": (1.0, 1e7),
            "output_tokens": (1.0, 1e7),
            "think_s": (1e-3, 1e7),
            "spread": (0.0, 4.0),
            "shared_prompts": (1, 1 << 20),
            "shared_tokens": (0, 1 << 24),
            "shared_share": (0.0, 1.0),
            "popularity": (0.0, 10.0),
            "block_tokens": (1, 1 << 20),
        }
        for field in fields(self):
            least, most = limits[field.name]
            value = getattr(self, field.name)
            if not least <= value <= most:
                raise ConfigError(f"--{option_of(field.name)} {value:g}; allowed: {least:g} to {most:g}")


def option_of(name: str) -> str:
    """Return the command-line option of a statistic."""
    return "block" if name == "block_tokens" else name.replace("_", "-")


class StatisticalSource:
    """Draws conversations from statistics. Conversations grow turn by turn, and many start with a shared prompt.

    Args:
        statistics: statistics of the sessions.
        seed: seed of all draws.
    """

    def __init__(self, statistics: Statistics, seed: int) -> None:
        self._statistics = statistics
        self._seed = seed
        self.block_tokens = statistics.block_tokens
        self._prompt_blocks = statistics.shared_tokens // statistics.block_tokens
        self.shared_blocks = self._prompt_blocks * statistics.shared_prompts
        """Number of blocks that sessions share."""

    def sessions(self) -> Iterator[tuple[float, SyntheticSession]]:
        """Yield sessions without end, in order of start, each with its start in seconds.

        Each call yields the same sessions.
        """
        of, draw = self._statistics, np.random.default_rng(self._seed)
        weights = np.arange(1, of.shared_prompts + 1, dtype=np.float64) ** -of.popularity
        edges = np.cumsum(weights / weights.sum())
        start_s = 0.0
        while True:
            turns = np.minimum(draw.geometric(1.0 / of.turns, _BATCH), _TURNS_MAX)
            total = int(turns.sum())
            starts = (start_s + np.cumsum(draw.exponential(of.turns / of.requests_per_s, _BATCH))).tolist()
            start_s = starts[-1]
            prompts = np.searchsorted(edges, draw.random(_BATCH)).tolist()
            is_shared = (draw.random(_BATCH) < of.shared_share).tolist()
            firsts = self._lengths(draw, of.first_tokens, _BATCH)
            grown = self._lengths(draw, of.turn_tokens, total)
            outputs = self._lengths(draw, of.output_tokens, total)
            pauses = self._drawn(draw, of.think_s, total).tolist()
            place = 0
            for number, count in enumerate(turns.tolist()):
                prompt = min(prompts[number], of.shared_prompts - 1) if is_shared[number] else -1
                lengths = [firsts[number], *grown[place : place + count - 1]]
                part = slice(place, place + count)
                yield starts[number], self._session(prompt, lengths, outputs[part], pauses[part])
                place += count

    def _session(self, prompt: int, lengths: list[int], outputs: list[int], pauses: list[float]) -> SyntheticSession:
        size = self.block_tokens
        shared = self._prompt_blocks if prompt >= 0 else 0
        begin = (IdRun(prompt * shared, shared, is_shared=True),) if shared else ()
        # Whole blocks stay when the prompt grows. The partial last block is new in each turn.
        whole_at_last = sum(lengths) // size
        requests: list[SyntheticRequest] = []
        tokens, after_s, tails = 0, 0.0, 0
        for turn, (length, output, pause) in enumerate(zip(lengths, outputs, pauses, strict=True)):
            tokens += length
            runs = begin
            if tokens >= size:
                runs = (*runs, IdRun(0, tokens // size, is_shared=False))
            if tokens % size:
                runs = (*runs, IdRun(whole_at_last + tails, 1, is_shared=False))
                tails += 1
            after_s += pause if turn else 0.0
            requests.append(SyntheticRequest(after_s, shared * size + tokens, output, runs, 0))
        return SyntheticSession(tuple(requests), whole_at_last + tails, 1)

    def _lengths(self, draw: np.random.Generator, mean: float, count: int) -> list[int]:
        return np.clip(np.rint(self._drawn(draw, mean, count)), 1, _TOKENS_MAX).astype(np.int64).tolist()

    def _drawn(self, draw: np.random.Generator, mean: float, count: int) -> npt.NDArray[np.float64]:
        spread = self._statistics.spread
        return draw.lognormal(math.log(mean) - spread * spread / 2, spread, count)


class TraceSource:
    """Draws whole sessions of a trace in another order, with their lengths, pauses and shared blocks.

    A block is *shared*, like a system prompt, if it is used throughout at least half of the trace and many distinct
    blocks follow it. The ancestors of a shared block are shared as well. Requests with any other block in common belong
    to one session, as do the requests of a named session. The start times of sessions stay. Each start gets a session
    that began at about that time, and each session is used once. So changes in the course of the trace are preserved.
    If more requests are wanted, the model is repeated with the same shared blocks, but new blocks for each session.

    Args:
        trace: the model.
        seed: seed of all draws.
        requests_per_s: mean rate; None means the trace's rate. Pauses within sessions stay.

    Raises:
        ConfigError: the trace has no blocks, all its requests arrive at one time, or the rate is not allowed.
    """

    def __init__(self, trace: TraceArrays, seed: int, requests_per_s: float | None = None) -> None:
        if requests_per_s is not None:
            Statistics(requests_per_s=requests_per_s)  # checks the limits of the rate
        if not trace.has_blocks:
            raise ConfigError(f"--like {trace.name}: it has no blocks; use a trace with blocks")
        duration_s = float(trace.time_s[-1]) - float(trace.time_s[0])
        if duration_s <= 0:
            raise ConfigError(
                f"--like {trace.name}: all its requests have the same time; use a trace with different times"
            )
        self.block_tokens = trace.block_tokens
        is_shared = _shared(trace, duration_s)
        self.shared_blocks = int(is_shared.sum())
        self._seed = seed
        found = sorted(_sessions(trace, is_shared), key=lambda it: it[0])
        self._models = [session for _, session in found]
        starts = np.array([start_s for start_s, _ in found])
        wanted_s = duration_s if requests_per_s is None else len(trace) / requests_per_s
        self._period_s = wanted_s * (1 + 1 / len(trace))
        self._starts: list[float] = (starts * (wanted_s / duration_s)).tolist()

    def sessions(self) -> Iterator[tuple[float, SyntheticSession]]:
        """Yield sessions without end, in order of start, each with its start in seconds.

        Each call yields the same sessions.
        """
        draw = np.random.default_rng(self._seed)
        count = len(self._models)
        reach = max(3.0, count * SHIFT_MAX)
        begin_s = 0.0
        while True:
            # Each session occurs once per period. With repetition, a few long sessions would decide the hit rate.
            order = np.argsort(np.arange(count) + draw.uniform(-reach, reach, count), kind="stable")
            for start_s, place in zip(self._starts, order.tolist(), strict=True):
                yield begin_s + start_s, self._models[place]
            begin_s += self._period_s


def _shared(trace: TraceArrays, duration_s: float) -> npt.NDArray[np.bool_]:
    """Return for each block whether it is shared (see `TraceSource`)."""
    parents = np.asarray(trace.parents, np.int64)
    first_s, last_s = np.full(len(parents), np.inf), np.full(len(parents), -np.inf)
    used_s = np.repeat(trace.time_s, np.diff(trace.starts))
    # The last assignment to an index wins, so reversed order keeps the first use.
    first_s[trace.ids[::-1]], last_s[trace.ids] = used_s[::-1], used_s
    followers = np.bincount(parents[parents >= 0], minlength=len(parents))
    is_shared: npt.NDArray[np.bool_] = (followers >= FOLLOWERS_MIN) & (last_s - first_s >= SPAN_MIN * duration_s)
    for block in np.flatnonzero(is_shared).tolist():
        before = int(parents[block])
        while before >= 0 and not is_shared[before]:
            is_shared[before] = True
            before = int(parents[before])
    return is_shared


def _sessions(trace: TraceArrays, is_shared: npt.NDArray[np.bool_]) -> list[tuple[float, SyntheticSession]]:
    """Return the trace's sessions, each with its start in seconds."""
    shared_numbers = np.cumsum(is_shared) - 1
    first_own = len(is_shared) + 1
    """First number of a session's own blocks. No such number directly follows that of a shared block."""
    began_s = float(trace.time_s[0])
    found: list[tuple[float, SyntheticSession]] = []
    for members in _grouped(trace, is_shared):
        own: dict[int, int] = {}
        names: dict[int, int] = {}
        requests: list[SyntheticRequest] = []
        start_s = float(trace.time_s[members[0]])
        for request in members:
            numbers = [
                int(shared_numbers[block]) if is_shared[block] else first_own + own.setdefault(block, len(own))
                for block in trace.blocks(request).tolist()
            ]
            name, next_turn = int(trace.session[request]), int(trace.next_turn[request])
            requests.append(
                SyntheticRequest(
                    float(trace.time_s[request]) - start_s,
                    int(trace.input_tokens[request]),
                    int(trace.output_tokens[request]),
                    tuple(
                        IdRun(first % first_own, blocks, is_shared=first < first_own)
                        for first, blocks in id_runs(np.asarray(numbers, np.int64))
                    ),
                    -1 if name < 0 else names.setdefault(name, len(names)),
                    NEXT_TURNS[next_turn] if next_turn >= 0 else None,
                )
            )
        found.append((start_s - began_s, SyntheticSession(tuple(requests), len(own), len(names))))
    return found


def _grouped(trace: TraceArrays, is_shared: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Group requests by session in the order of the trace, with union-find over blocks and session names."""
    leader = list(range(len(trace)))

    def find(request: int) -> int:
        while leader[request] != request:
            leader[request] = leader[leader[request]]
            request = leader[request]
        return request

    by_block = np.full(trace.block_count, -1, np.int64)
    by_name: dict[int, int] = {}
    for request in range(len(trace)):
        ids = trace.blocks(request)
        own = ids[~is_shared[ids]]
        known = by_block[own]
        for other in set(known[known >= 0].tolist()):
            leader[find(request)] = find(other)
        by_block[own] = request
        name = int(trace.session[request])
        if name >= 0:
            leader[find(request)] = find(by_name.setdefault(name, request))
    out: dict[int, list[int]] = {}
    for request in range(len(trace)):
        out.setdefault(find(request), []).append(request)
    return list(out.values())
