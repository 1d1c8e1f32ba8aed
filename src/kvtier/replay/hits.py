"""Hit rates of one cache: the whole trace, no warm-up, the deepest block of a prompt touched first.

A request first asks for its longest leading run of blocks that are here; that run's tokens, at most those of the
prompt, are its hit. Then all its blocks are accessed from the last to the first: who is here is touched, who is not is
computed and inserted. Capacity is counted in whole blocks, and so is what is written.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.replay.policies.base import Policy
from kvtier.replay.policies.registry import make_policy
from kvtier.trace.arrays import TraceArrays

_REPORT_EVERY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one policy did with one capacity."""

    policy: str
    capacity_tokens: int | None
    """None: without limit."""
    hit_rate: float
    """Hit tokens over input tokens."""
    hit_tokens: int
    block_hits: int
    """Accesses to a block that was here, in a leading run or not."""
    evictions: int
    written_tokens: int
    """Of the blocks that were inserted, each counted whole."""
    peak_tokens: int
    """Most that was held when a request began."""
    mean_tokens: float
    """Held on average over time."""


def capacity_blocks(packed: TraceArrays, capacity_tokens: int | None) -> int:
    """Whole blocks in so many tokens; None is as many as there are.

    Raises:
        ConfigError: not even one fits.
    """
    if capacity_tokens is None:
        return max(packed.block_count, 1)
    if capacity_tokens < packed.block_tokens:
        raise ConfigError(
            f"--capacity-tokens {capacity_tokens}: less than a block of {packed.block_tokens} tokens; allowed: more"
        )
    return capacity_tokens // packed.block_tokens


def replay(
    packed: TraceArrays,
    policy: str,
    capacity_tokens: int | None,
    *,
    advance: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay a trace with one policy and one capacity.

    Args:
        packed: the trace.
        policy: as `make_policy` knows it.
        capacity_tokens: None is without limit.
        advance: told of requests that are done, now and then.

    Raises:
        ConfigError: the trace has no blocks, or the policy or capacity is not possible.
    """
    if not packed.has_blocks:
        raise ConfigError(
            f"trace {packed.name} has no blocks, so nothing can be said about hits; allowed: `replay describe`"
        )
    made = make_policy(policy, capacity_blocks(packed, capacity_tokens), packed)
    return _run(packed, made, policy, capacity_tokens, advance)


def _run(
    packed: TraceArrays,
    policy: Policy,
    name: str,
    capacity_tokens: int | None,
    advance: Callable[[int], None] | None,
) -> Outcome:
    block_tokens = packed.block_tokens
    present = policy.present
    hit_tokens = block_hits = written = peak = 0
    held_s = 0.0
    before_s = float(packed.time_s[0])
    for start in range(0, len(packed), _REPORT_EVERY):
        stop = min(start + _REPORT_EVERY, len(packed))
        edges = packed.starts[start : stop + 1].tolist()
        ids: list[int] = packed.ids[edges[0] : edges[-1]].tolist()
        times, inputs = packed.time_s[start:stop].tolist(), packed.input_tokens[start:stop].tolist()
        for offset in range(stop - start):
            time_s = times[offset]
            blocks = ids[edges[offset] - edges[0] : edges[offset + 1] - edges[0]]
            held_s += policy.held * (time_s - before_s)
            before_s = time_s
            policy.begin(start + offset, time_s, blocks)
            peak = max(peak, policy.held)
            run = 0
            for block in blocks:
                if not present[block]:
                    break
                run += 1
            hit_tokens += min(run * block_tokens, inputs[offset])
            here, inserted = policy.access(blocks)
            block_hits += here
            written += inserted
        if advance is not None:
            advance(stop - start)
    duration_s = before_s - float(packed.time_s[0])
    total = int(packed.input_tokens.sum(dtype="int64"))
    return Outcome(
        policy=name,
        capacity_tokens=capacity_tokens,
        hit_rate=hit_tokens / total if total else 0.0,
        hit_tokens=hit_tokens,
        block_hits=block_hits,
        evictions=policy.evictions,
        written_tokens=written * block_tokens,
        peak_tokens=max(peak, policy.held) * block_tokens,
        mean_tokens=(held_s / duration_s if duration_s > 0 else float(policy.held)) * block_tokens,
    )
