"""Describe the workload of a plan: lengths of requests, their reuse, and how reuse depends on time.

A prompt begins with the shared system prompt and the conversation so far. It can reuse, in whole chunks, the leading
tokens that it shares with earlier prompts. First and later requests of a conversation are modeled separately. A first
request finds the system prompt at most, so an average of both kinds would describe neither.

Under LRU a tier keeps all unused KV for about the same time T, its residence time (Denning's working set, 1968; Che,
Tung, Wang, "Hierarchical Web Caching Systems", 2002: the approximation of one characteristic time). A reuse after a
pause g is a hit if g <= T. Each use occupies the tier for min(g, T), or for T if no reuse follows. Capacity determines
T, and T determines the hits, so one curve serves all tiers and any number of users.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from kvtier.errors import ConfigError
from kvtier.tools.plan.inputs import Inputs

BURST_S = 10.0
"""Seconds of a window in which arrivals are counted to find their peak."""
_OF_TRACE = ("trace", "trace_window_s", "trace_time_unit", "load")
_MEASURED = ("users", "prefix_tokens", "history_tokens", "question_tokens", "answer_tokens")
_PAUSES = ("turns", "interval_s", "interval_cv")
_STEPS = 600
_CV_LEAST = 1e-3
"""A smaller coefficient of variation counts as 0: all pauses are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseCurve:
    """Share of hits and occupied token-seconds at each residence time: a table, interpolated linearly."""

    residence_s: tuple[float, ...]
    """Residence times of the table, in rising order."""
    found: tuple[float, ...]
    """Share of reuses within each residence time, 0 to 1, never falling."""
    held_token_s: tuple[float, ...]
    """Token-seconds that one request occupies, never falling. Multiplied by the requests per second, they give the
    resident tokens."""

    def found_within(self, residence_s: float) -> float:
        """Return the share of reuses that happen within `residence_s`."""
        return _interpolate(self.residence_s, self.found, residence_s)

    def tokens_held(self, residence_s: float, requests_per_s: float) -> float:
        """Return how many tokens are in a tier that keeps everything for `residence_s`."""
        return requests_per_s * _interpolate(self.residence_s, self.held_token_s, residence_s)

    def residence(self, capacity_tokens: float, requests_per_s: float) -> float:
        """Return the seconds for which a tier of `capacity_tokens` keeps unused KV."""
        return _interpolate(self.held_token_s, self.residence_s, capacity_tokens / requests_per_s)

    def stored(self, token_bytes: float, snapshot_bytes: float) -> "ReuseCurve":
        """Return this curve in bytes instead of tokens, for requests that also store a snapshot of states.

        The next request reads the snapshot once, after the pause g, and supersedes it. The old snapshot then stays for
        another T. A snapshot that nothing reads within T stays for T.
        """
        held: list[float] = []
        read_s = before_s = before = 0.0
        for time_s, share, token_s in zip(self.residence_s, self.found, self.held_token_s, strict=True):
            read_s += (share - before) * (before_s + time_s) / 2
            before_s, before = time_s, share
            held.append(token_bytes * token_s + snapshot_bytes * (read_s + time_s))
        return replace(self, held_token_s=tuple(held))

    def of_reuse(self, reused_tokens: float, tokens: float) -> "ReuseCurve":
        """Return this curve for requests that leave `tokens`, of which later requests reuse `reused_tokens`.

        Reused tokens stay until their reuse, at most for T, and all others stay for T. The mean of min(g, T) is the
        integral from 0 to T of the share of pauses that are longer than each time.
        """
        held = [0.0]
        live_s = before_s = before = 0.0
        for time_s, share in zip(self.residence_s[1:], self.found[1:], strict=True):
            live_s += (time_s - before_s) * (1 - (before + share) / 2)
            before_s, before = time_s, share
            held.append(reused_tokens * live_s + (tokens - reused_tokens) * time_s)
        return replace(self, held_token_s=tuple(held))

    def residence_for(self, share: float) -> float:
        """Return the shortest residence time, in seconds, within which `share` of the reuses happens."""
        return _interpolate(self.found, self.residence_s, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """The figures of a trace that a plan uses."""

    path: str
    requests: int
    duration_s: float
    input_tokens: float
    """Mean tokens of a prompt. All token counts below are means as well, except `longest_tokens`."""
    output_tokens: float
    first_share: float
    """Share of requests that reuse nothing, or only their first block."""
    reusable_tokens: float
    """Tokens of a prompt that occur in earlier prompts, however long ago."""
    burst: float
    """Arrivals in the busiest window of `BURST_S`, divided by those in an average one."""
    longest_tokens: float
    """Tokens of the longest prompt with its answer."""
    kept_share: float
    """Share of distinct blocks that occur more than once."""
    curve: ReuseCurve | None
    """Reuse by residence time; None if the trace has no block ids."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The average request, and the rate of requests."""

    interval_s: float
    """Seconds between two queries of a user. It is 1 for a trace that has its own pauses. Such a trace has no users, so
    "one user" then means one query per second."""
    requests_per_s: float
    """The requested load, in requests per second."""
    has_users: bool
    first_share: float
    """Share of requests that are the first of a conversation."""
    first_tokens: float
    """Tokens in the prompt of a first request."""
    later_tokens: float
    """Tokens in the prompt of a later request."""
    prefix_tokens: float
    """Tokens that every request can reuse. They are used so often that GPU memory, or else the fastest tier into which
    they fit, always has them."""
    reusable_tokens: float
    """Tokens that a later request can reuse, including the prefix."""
    answer_tokens: float
    partial_tokens: float
    """Tokens after the last whole chunk of a prompt and its answer, which no tier stores."""
    stored_tokens: float
    """Tokens in the whole chunks of a finished conversation, which tiers store."""
    longest_tokens: float
    """Tokens of the longest prompt with its answer."""
    kept_share: float
    """Share of new KV that later requests reuse. The write policy ``selective`` writes only this share."""
    curve: ReuseCurve
    stored_curve: ReuseCurve
    """The curve in whole chunks, as tiers store them."""
    burst: float | None
    """Load at the busiest time, divided by the average; None without a trace."""
    notes: tuple[str, ...]

    @property
    def input_tokens(self) -> float:
        """Mean tokens in a prompt."""
        return self.first_share * self.first_tokens + (1 - self.first_share) * self.later_tokens

    @property
    def reuse(self) -> float:
        """Reusable share of all prompt tokens."""
        later = (1 - self.first_share) * self.reusable_tokens
        return (self.first_share * self.prefix_tokens + later) / self.input_tokens

    @property
    def has_returns(self) -> bool:
        """Whether requests reuse more than the system prompt, which GPU memory or the fastest tier always has."""
        return self.first_share < 1 and self.reusable_tokens > self.prefix_tokens

    def counted(self, load: float) -> float:
        """Round a load down to whole users. Queries per second stay unchanged."""
        return float(math.floor(load + 1e-6)) if self.has_users and math.isfinite(load) else load

    def is_any(self, users: float) -> bool:
        """Return whether a load is at least one user, or above zero if the load is in queries per second."""
        return users >= 1 or (users > 0 and not self.has_users)

    @property
    def session_tokens(self) -> float:
        """Mean tokens of a conversation after a later request and its answer."""
        return self.later_tokens + self.answer_tokens


def workload(inputs: Inputs, trace: TraceSummary | None) -> Workload:
    """Build the workload from the trace if there is one, or else from the inputs.

    Raises:
        ConfigError: the inputs contradict each other, or an option on the command line has no effect.
    """
    for key in without_effect(trace):
        origin = inputs.origin(f"traffic.{key}")
        if trace and origin.startswith("--"):
            raise ConfigError(f"{origin} has no effect, because trace {trace.path} gives the traffic; leave it out")
    measured = _from_trace(inputs, trace) if trace else _from_inputs(inputs)
    share = inputs.traffic.reuse
    if share is None:
        return measured
    if share > 1 - 1 / max(measured.input_tokens, 2):
        origin = inputs.origin("traffic.reuse")
        raise ConfigError(f"traffic.reuse = {share:g} (from {origin}): some token is always new; allowed: less than 1")
    # Only later requests reuse KV. If even all tokens of their prompts are too few, more requests become later ones.
    first_share = min(measured.first_share, max(1 - share * measured.input_tokens / measured.later_tokens, 0.0))
    later = share * measured.input_tokens / (1 - first_share) if share else 0.0
    reusable = min(later, measured.later_tokens)
    found = replace(measured, first_share=first_share, prefix_tokens=0.0, reusable_tokens=reusable)
    reused, tokens = (1 - first_share) * reusable, found.input_tokens + found.answer_tokens
    whole = max(tokens - found.partial_tokens, reused)
    curve, stored = measured.curve.of_reuse(reused, tokens), measured.curve.of_reuse(reused, whole)
    return replace(found, curve=curve, stored_curve=stored)


def without_effect(trace: TraceSummary | None) -> tuple[str, ...]:
    """Return the traffic inputs that have no effect.

    Without a trace, these are the inputs about traces. Otherwise, they are the inputs that the trace measures.
    """
    if trace is None:
        return _OF_TRACE
    return _MEASURED if trace.curve is None else (*_MEASURED, *_PAUSES)


def _from_inputs(inputs: Inputs) -> Workload:
    """Model conversations of `turns` queries. Each prompt is the previous one, its answer, and a new question."""
    traffic, chunk = inputs.traffic, inputs.software.chunk_tokens
    begin = traffic.prefix_tokens + traffic.history_tokens + traffic.question_tokens
    step = traffic.question_tokens + traffic.answer_tokens
    prompts = [begin + turn * step for turn in range(traffic.turns)]
    # A later prompt finds the previous prompt and its answer in the store, in whole chunks.
    left = [prompt + traffic.answer_tokens for prompt in prompts]
    whole = [tokens // chunk * chunk for tokens in left]
    stored = whole[:-1]
    later = prompts[1:] or prompts
    later_tokens = sum(later) / len(later)
    prefix_tokens = float(traffic.prefix_tokens // chunk * chunk)
    return Workload(
        interval_s=traffic.interval_s,
        requests_per_s=traffic.users / traffic.interval_s,
        has_users=True,
        first_share=1 / traffic.turns,
        first_tokens=float(prompts[0]),
        later_tokens=later_tokens,
        prefix_tokens=prefix_tokens,
        reusable_tokens=sum(stored) / len(stored) if stored else 0.0,
        answer_tokens=float(traffic.answer_tokens),
        partial_tokens=(sum(left) - sum(whole)) / len(left),
        stored_tokens=float(whole[-1]),
        longest_tokens=float(left[-1]),
        kept_share=1 - step / left[-1] if stored else 0.0,
        curve=_lognormal(inputs, [tokens - prefix_tokens for tokens in left]),
        stored_curve=_lognormal(inputs, [tokens - prefix_tokens for tokens in whole]),
        burst=None,
        notes=(),
    )


def _from_trace(inputs: Inputs, trace: TraceSummary) -> Workload:
    """Take requests from the trace. Take reuse from the inputs if the trace has no block ids."""
    if trace.curve is None and inputs.traffic.reuse is None:
        raise ConfigError(f"trace {trace.path} has no block ids, so its reuse is unknown; set traffic.reuse (--reuse)")
    first_share = trace.first_share if trace.curve else 1 / inputs.traffic.turns
    reusable = trace.reusable_tokens / (1 - first_share) if first_share < 1 else 0.0
    tokens = trace.input_tokens + trace.output_tokens
    partial = min((inputs.software.chunk_tokens - 1) / 2, trace.input_tokens)  # a length may end anywhere in a chunk
    curve = trace.curve or _lognormal(inputs, [tokens])
    return Workload(
        interval_s=1.0 if trace.curve else inputs.traffic.interval_s,
        requests_per_s=inputs.traffic.load * trace.requests / trace.duration_s,
        has_users=trace.curve is None,
        first_share=first_share,
        first_tokens=trace.input_tokens,
        later_tokens=trace.input_tokens,
        prefix_tokens=0.0,
        reusable_tokens=min(reusable, trace.input_tokens),
        answer_tokens=trace.output_tokens,
        partial_tokens=partial,
        stored_tokens=tokens - partial,
        longest_tokens=trace.longest_tokens,
        kept_share=trace.kept_share if trace.curve else 1 - first_share,
        curve=curve,
        stored_curve=curve.stored(1 - partial / tokens, 0.0),
        burst=trace.burst,
        notes=trace.notes,
    )


def _lognormal(inputs: Inputs, left: Sequence[float]) -> ReuseCurve:
    """Build the curve of conversations. `left` lists the tokens that each of their queries leaves, in order."""
    traffic, earlier = inputs.traffic, left[:-1] or left
    return lognormal_curve(
        traffic.interval_s,
        traffic.interval_cv,
        tokens=sum(earlier) / len(earlier),
        last_share=1 / traffic.turns,
        last_tokens=left[-1],
    )


@lru_cache(maxsize=64)
def lognormal_curve(mean_s: float, cv: float, *, tokens: float, last_share: float, last_tokens: float) -> ReuseCurve:
    """Build the curve of conversations with log-normal pauses.

    Measured pauses are log-normal: Mooncake's conversation trace has 114, 519 and 1,578 s at the 50th, 90th and 99th
    percentile. Sigma is 1.15 to 1.18, and the coefficient of variation is 1.7.

    Args:
        mean_s: mean pause between two queries of a conversation.
        cv: standard deviation over mean of the pauses; 0 means all are equal.
        tokens: tokens that a request occupies until the next one of its conversation.
        last_share: share of requests that are the last of their conversation.
        last_tokens: tokens that the last request occupies; they are never reused.
    """
    if cv < _CV_LEAST:
        times = [*_grid(mean_s * 1e-3, mean_s * (1 - 1e-9), _STEPS // 2), *_grid(mean_s, mean_s * 1e7, _STEPS // 2)]
        found = [1.0 if time >= mean_s else 0.0 for time in times]
        live = [min(time, mean_s) for time in times]
    else:
        sigma = math.sqrt(math.log1p(cv * cv))
        pauses, shifted = NormalDist(math.log(mean_s) - sigma**2 / 2, sigma), NormalDist(0.0, 1.0)
        times = _grid(mean_s * 1e-5, mean_s * 1e7, 2 * _STEPS)
        found = [pauses.cdf(math.log(time)) for time in times]
        # E[min(g, T)] of a log-normal g: the partial mean of the pauses below T, plus T times the share of longer ones.
        live = [
            mean_s * shifted.cdf((math.log(time) - pauses.mean - sigma**2) / sigma) + time * (1 - share)
            for time, share in zip(times, found, strict=True)
        ]
    held = [
        (1 - last_share) * tokens * stay + last_share * last_tokens * time
        for time, stay in zip(times, live, strict=True)
    ]
    return ReuseCurve(residence_s=(0.0, *times), found=(0.0, *found), held_token_s=(0.0, *held))


def _grid(least: float, most: float, count: int) -> list[float]:
    step = (most / least) ** (1 / (count - 1))
    return [least * step**n for n in range(count - 1)] + [most]


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly at `x`, with constant values beyond the ends. Of points with equal `xs` the first counts."""
    index = bisect_left(xs, x)
    if index == 0:
        return ys[0]
    if index == len(xs):
        return ys[-1]
    part = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + part * (ys[index] - ys[index - 1])
