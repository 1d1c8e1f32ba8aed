"""Replays of small random traces: bounds hold, MIN is optimal, and infinite hits are counted exactly."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tests.traces import listed, replay

from kvtier.tools.replay.policies.reference import infinite_hit_tokens

BLOCK = 16


def partial(prompts):
    """A trace of prompts, most of which have a partial last block."""
    return listed([(float(n), max(len(ids) * BLOCK - n % BLOCK, 0), ids, None) for n, ids in enumerate(prompts)], BLOCK)


@st.composite
def trees(draw):
    """Prompts that are paths in a tree of prefixes, so that an id names a whole prefix."""
    names, prompts = {}, []
    for _ in range(draw(st.integers(1, 14))):
        path, ids = (), []
        for _ in range(draw(st.integers(0, 5))):
            path = (*path, draw(st.integers(0, 2)))
            ids.append(names.setdefault(path, len(names)))
        prompts.append(ids)
    return prompts


def best_prefix_closed(prompts, capacity):
    """Block hits of the best cache that keeps whole prefixes, by exhaustive search."""
    parent = {block: ids[place - 1] if place else None for ids in prompts for place, block in enumerate(ids)}

    @cache
    def best(at, held):
        if at == len(prompts):
            return 0
        ids = prompts[at]
        run = next((place for place, block in enumerate(ids) if block not in held), len(ids))
        return run + max(best(at + 1, kept) for kept in closed_subsets(held | frozenset(ids), capacity))

    @cache
    def closed_subsets(blocks, size):
        out = {frozenset()}
        for block in sorted(blocks, key=depth):
            out |= {
                kept | {block} for kept in out if len(kept) < size and (parent[block] is None or parent[block] in kept)
            }
        return tuple(out)

    def depth(block):
        return 0 if parent[block] is None else 1 + depth(parent[block])

    return best(0, frozenset())


@given(prompts=trees(), capacity=st.integers(1, 3))
def test_min_is_the_best_that_keeps_whole_prefixes(prompts, capacity):
    prompts = [ids for ids in prompts if ids][:8] or [[0]]
    trace = listed([(float(n), len(ids) * BLOCK, ids, None) for n, ids in enumerate(prompts)], BLOCK)
    outcome = replay(trace, "min", capacity * BLOCK)
    assert outcome.hit_tokens == best_prefix_closed([tuple(it) for it in prompts], capacity) * BLOCK


@given(prompts=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=20))
def test_infinite_hit_tokens_equal_a_replay(prompts):
    # Also with ids that do not name a prefix.
    prompts = [list(dict.fromkeys(it)) for it in prompts]
    packed = partial(prompts)
    assert infinite_hit_tokens(packed) == replay(packed, "infinite", None).hit_tokens


@given(prompts=trees(), capacity=st.integers(1, 8))
def test_more_capacity_never_hurts_lru_and_min_bounds_it(prompts, capacity):
    packed = partial(prompts)
    small, large = (replay(packed, "lru", it * BLOCK).hit_tokens for it in (capacity, capacity + 1))
    # LRU is a stack algorithm: a larger cache includes a smaller one.
    assert small <= large
    assert small <= replay(packed, "min", capacity * BLOCK).hit_tokens <= infinite_hit_tokens(packed)
