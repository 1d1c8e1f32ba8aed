"""Replay of a trace through one cache: the whole trace, no warm-up.

The hit of a request is its longest leading run of cached blocks, in tokens, at most those of the prompt. Then all
blocks of the request are accessed from the last to the first: hits are touched, misses are inserted. Capacity and
written tokens count whole blocks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.replay.policies.registry import make_policy
from kvtier.trace.arrays import TraceArrays

_STEP, _STEP_BLOCKS = 1024, 1 << 15
"""Most requests, and about as many accesses, between two calls of `should_stop`: 0.3 s of the slowest policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """Counts of one policy and capacity."""

    policy: str
    capacity_tokens: int | None
    """Capacity of the cache; None: unlimited."""
    hit_rate: float
    """Hit tokens over input tokens."""
    hit_tokens: int
    block_hits: int
    """Accesses to cached blocks, in a leading run or not."""
    evictions: int
    written_tokens: int
    """Tokens of inserted blocks, each counted whole."""
    peak_tokens: int
    """Most tokens cached at the start of a request."""
    mean_tokens: float
    """Tokens cached, mean over time."""
    cpu_s: float = field(default=0.0, compare=False)
    """Processor time of the replay, in seconds."""
    hit_rates: tuple[float, ...] = field(default=(), compare=False)
    """Hit rate of each draw of start times, where this is the mean of several replays."""


def mean_of(results: Sequence[CacheResult]) -> CacheResult:
    """The mean of replays of one task, each of another draw of the start times; counts are rounded."""
    if len(results) == 1:
        return results[0]
    names = (*_COUNTS, "hit_rate", "mean_tokens", "cpu_s")
    means = {name: fmean(getattr(it, name) for it in results) for name in names}
    means |= {name: round(means[name]) for name in _COUNTS}
    values: dict[str, Any] = {**asdict(results[0]), **means, "hit_rates": tuple(it.hit_rate for it in results)}
    return CacheResult(**values)


_COUNTS = ("hit_tokens", "block_hits", "evictions", "written_tokens", "peak_tokens")


class Task(NamedTuple):
    """One replay."""

    policy: str
    """Name of the policy, as in `make_policy`."""
    capacity_tokens: int | None
    """Capacity of the cache; None: unlimited."""


def capacity_blocks(trace: TraceArrays, capacity_tokens: int | None) -> int:
    """Whole blocks in a capacity; None: all of the trace.

    Raises:
        ConfigError: no block fits.
    """
    if capacity_tokens is None:
        return max(trace.block_count, 1)
    if capacity_tokens < trace.block_tokens:
        raise ConfigError(
            f"--capacity-tokens {capacity_tokens}: less than a block of {trace.block_tokens} tokens; allowed: more"
        )
    return capacity_tokens // trace.block_tokens


def replay(trace: TraceArrays, policy: str, capacity_tokens: int | None) -> CacheResult:
    """Replay a trace with one policy and one capacity.

    Raises:
        ConfigError: the trace has no blocks, or the policy or capacity is not possible.
    """
    result = replay_task(trace, Task(policy, capacity_tokens), lambda _: None, lambda: False)
    assert result is not None, "it is never stopped"
    return result


def replay_task(
    trace: TraceArrays, task: Task, advance: Callable[[int], None], should_stop: Callable[[], bool]
) -> CacheResult | None:
    """Replay a trace; None if it was stopped.

    Args:
        trace: the trace.
        task: policy and capacity.
        advance: called with the number of requests done since the last call.
        should_stop: polled.

    Raises:
        ConfigError: the trace has no blocks, or the policy or capacity is not possible.
    """
    if not trace.has_blocks:
        raise ConfigError(f"trace {trace.name} has no blocks, so it has no hits; allowed: `replay describe`")
    begun_s = time.process_time()
    policy = make_policy(task.policy, capacity_blocks(trace, task.capacity_tokens), trace)
    present, block_tokens, before_s = policy.present, trace.block_tokens, float(trace.time_s[0])
    hit_tokens = block_hits = written = peak = 0
    held_s = 0.0
    step = min(_STEP, max(1, _STEP_BLOCKS * len(trace) // max(1, len(trace.ids))))
    for start in range(0, len(trace), step):
        if should_stop():
            return None
        for request, (time_s, input_tokens, blocks) in enumerate(_requests(trace, start, start + step), start):
            held_s += policy.held * (time_s - before_s)
            before_s = time_s
            policy.begin(request)
            peak = max(peak, policy.held)
            run = 0
            for block in blocks:
                if not present[block]:
                    break
                run += 1
            hit_tokens += min(run * block_tokens, input_tokens)
            hits, inserted = policy.access(blocks)
            block_hits += hits
            written += inserted
        advance(min(step, len(trace) - start))
    duration_s = float(trace.time_s[-1]) - float(trace.time_s[0])
    total = int(trace.input_tokens.sum(dtype="int64"))
    return CacheResult(
        policy=task.policy,
        capacity_tokens=task.capacity_tokens,
        hit_rate=hit_tokens / total if total else 0.0,
        hit_tokens=hit_tokens,
        block_hits=block_hits,
        evictions=policy.evictions,
        written_tokens=written * block_tokens,
        peak_tokens=max(peak, policy.held) * block_tokens,
        mean_tokens=(held_s / duration_s if duration_s > 0 else float(policy.held)) * block_tokens,
        cpu_s=time.process_time() - begun_s,
    )


def _requests(trace: TraceArrays, start: int, stop: int) -> Iterator[tuple[float, int, list[int]]]:
    """Time, input tokens and blocks of the requests from `start` to `stop`."""
    edges = trace.starts[start : stop + 1].tolist()
    ids: list[int] = trace.ids[edges[0] : edges[-1]].tolist()
    times, inputs = trace.time_s[start:stop].tolist(), trace.input_tokens[start:stop].tolist()
    for first, last, time_s, input_tokens in zip(edges, edges[1:], times, inputs, strict=False):
        yield time_s, input_tokens, ids[first - edges[0] : last - edges[0]]
