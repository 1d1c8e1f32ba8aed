"""Damaged objects are healed by the next pass: what is found to be damaged and computed again is written again."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.rig import (
    CHUNK_TOKENS,
    Engine,
    load_places,
    loaded,
    local,
    looked_up,
    places_of,
    prefix_of,
    stored,
)

from kvtier.runtime.mover import Threads
from kvtier.runtime.session import Session
from kvtier.tier.base import Tier
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.segment_files import SEGMENTS_NAME
from kvtier.tier.disk.tier import DiskTier
from kvtier.types import RequestId

PROMPTS, CHUNKS = 12, 9
TOKENS = CHUNKS * CHUNK_TOKENS
Tiers = Callable[[Path], Tier]


def directory(root: Path) -> Tier:
    return DirectoryTier(root, capacity_bytes=64 << 20)


def disk(root: Path) -> Tier:
    return DiskTier(root, capacity_bytes=64 << 20, segment_bytes=1 << 20)


@contextmanager
def opened(tier: Tier, engine: Engine, threads: Threads, rules: Mapping[str, object]) -> Iterator[Session]:
    """A session whose host memory holds nothing yet; all pending writes reach the tier before it ends."""
    session, _, _ = local(engine.copier(), {"below": tier}, slots=64, rules=rules, threads=threads)
    try:
        yield session
    finally:
        closed = session.close()
        tier.close()
    assert closed.flushed, closed


def settle(session: Session) -> None:
    """Wait for the writes, so that host memory, which holds less than all prompts, drops none."""
    while session._cache.pending_count or session._cache.in_flight:
        session.poll(0.01)


def store_all(session: Session, passing: str) -> None:
    for seed in range(PROMPTS):
        done = stored(session, f"{passing} {seed}", prefix_of(CHUNKS, seed=seed), places_of(range(CHUNKS)))
        assert done.dropped == 0
        session.release(RequestId(f"{passing} {seed}"))
        settle(session)


def damage(tier: Tier, root: Path, dice: random.Random, share: float) -> Callable[[], int]:
    """What flips one bit in a share of all objects, when the tier is closed; how many."""
    names = [name for name, _ in tier.scan()]
    where: list[tuple[Path, int, int]] = []
    for name in names:
        if isinstance(tier, DiskTier):
            (extent,) = tier._pool.locate([name])
            assert extent is not None
            tier._pool.unpin([extent.segment])
            where.append((root / SEGMENTS_NAME / extent.segment.name, extent.offset, extent.size_bytes))
        else:
            path = root / "objects" / name.hex()[:2] / name.hex()
            where.append((path, 0, path.stat().st_size))

    def flip() -> int:
        chosen = [place for place in where if dice.random() < share]
        for path, offset, size_bytes in chosen:
            at = offset + dice.randrange(4096, size_bytes)  # behind the head: a payload that does not match its sums
            with path.open("r+b") as file:
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ (1 << dice.randrange(8))]))
        return len(chosen)

    return flip


@pytest.mark.parametrize("make", [directory, disk])
@pytest.mark.parametrize("promotes", [4, 16])
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_damaged_objects_are_healed_by_the_next_pass(tmp_path: Path, make: Tiers, share: float, promotes: int) -> None:
    seed = round(promotes * share * 10)
    dice, engine, root = random.Random(seed), Engine(CHUNKS * 4, seed), tmp_path / "store"
    session_over = partial(
        opened, threads=Threads(read=4, write=4), rules={"loads_in_flight": promotes, "probe_deadline_s": 30.0}
    )
    tier = make(root)
    with session_over(tier, engine) as session:
        store_all(session, "first")
        flip = damage(tier, root, dice, share)
    assert flip()

    with session_over(make(root), engine) as session:
        for prompt in range(PROMPTS):
            prefix, request = prefix_of(CHUNKS, seed=prompt), f"second {prompt}"
            lookup = looked_up(session, request, prefix)
            into = load_places(lookup.tokens)
            done = loaded(session, request, prefix, lookup.tokens, into)
            computed = range(done.tokens // CHUNK_TOKENS, CHUNKS)
            stored(session, request, prefix, places_of(computed))
            session.release(RequestId(request))
            settle(session)

    target = Engine(CHUNKS * 4, seed + 100)
    with session_over(make(root), target) as session:
        missed = 0
        for prompt in range(PROMPTS):
            prefix, request = prefix_of(CHUNKS, seed=prompt), f"third {prompt}"
            lookup = looked_up(session, request, prefix)
            done = loaded(session, request, prefix, lookup.tokens, load_places(lookup.tokens))
            missed += TOKENS - done.tokens
            assert target.same(engine, load_places(done.tokens))
            session.release(RequestId(request))
        assert missed == 0, f"{missed // CHUNK_TOKENS} of {PROMPTS * CHUNKS} chunks are still damaged or gone"
