"""A whole session over the disk tier: settings to segments and back, a restart, damage, and what the metrics tell."""

from dataclasses import replace

from tests.rig import (
    CHUNK_TOKENS,
    FINGERPRINT,
    LAYOUT,
    Engine,
    config,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)

from kvtier.runtime.open import open_session
from kvtier.tier.disk.kind import DiskSettings

CHUNKS = 200
TOKENS = CHUNKS * CHUNK_TOKENS


def opened(path, engine):
    disk = DiskSettings(path=path, capacity_bytes=64 << 20, reserve_bytes=0)
    return open_session(replace(config(None, host_chunks=40), tiers=(disk,)), LAYOUT, FINGERPRINT, engine.copier())


def test_a_prefix_larger_than_host_memory_comes_back_from_segments_after_a_restart(tmp_path):
    source, target = Engine(4 * CHUNKS, seed=1), Engine(4 * CHUNKS, seed=2)
    first = opened(tmp_path / "kv", source)
    prefix = prefix_of(CHUNKS, first.root)
    assert stored(first.session, "a", prefix, places_of(range(CHUNKS))).dropped == 0
    assert first.session.close().flushed
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["rank-0", "secret"]

    second = opened(tmp_path / "kv", target)
    assert second.root == first.root
    assert looked_up(second.session, "b", prefix).tokens == TOKENS
    done = loaded(second.session, "b", prefix, TOKENS, load_places(TOKENS))
    assert (done.tokens, done.sources) == (TOKENS, (("disk", TOKENS),))
    assert target.same(source, load_places(TOKENS))
    second.session.close()


def test_damaged_segments_are_a_shorter_load_and_never_other_bytes(tmp_path):
    source, target = Engine(4 * CHUNKS, seed=1), Engine(4 * CHUNKS, seed=2)
    first = opened(tmp_path / "kv", source)
    prefix = prefix_of(CHUNKS, first.root)
    stored(first.session, "a", prefix, places_of(range(CHUNKS)))
    first.session.close()
    (file,) = (tmp_path / "kv" / "rank-0" / "segments").iterdir()
    with open(file, "r+b") as segment:
        segment.seek(1_000_000)
        segment.write(bytes(300_000))
    second = opened(tmp_path / "kv", target)
    delivered = 0
    for attempt in "bcdefgh":  # each finds out what is damaged on its way and drops it
        tokens = looked_up(second.session, attempt, prefix).tokens
        delivered = loaded(second.session, attempt, prefix, tokens, load_places(tokens)).tokens
        if delivered == tokens:
            break
    assert 0 < delivered < TOKENS
    assert target.same(source, load_places(delivered))
    second.session.close()
