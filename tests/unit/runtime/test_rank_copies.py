"""Ranks that hold the same KV: one object in a common store, written and dropped by the first rank, loaded by all."""

from dataclasses import replace
from math import inf
from unittest.mock import MagicMock

import pytest
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
from tests.system import until

from kvtier.codec.frame import frame_bytes
from kvtier.core.cache import Cache
from kvtier.core.limits import TierRules
from kvtier.errors import TierError
from kvtier.keys.object_names import object_name
from kvtier.layout import ELSEWHERE, Part, engine_bytes, of_all_ranks
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import Arena, page_aligned
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.mover import Mover
from kvtier.runtime.open import open_core
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_group import RankGroup
from kvtier.runtime.rank_server import RankServer, connect
from kvtier.runtime.session import Session
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.types import Outcome, Probe

SLOTS = 8
COPIES = [
    LAYOUT.with_parts((Part(0, len(group.layer_bytes), 0, 1), rank) for group in LAYOUT.groups) for rank in range(2)
]
"""The layout on each of two ranks that both hold all KV."""


class Counted(DirectoryTier):
    """Remembers what was written and deleted; `write_many` fails while `is_broken`."""

    def __init__(self, folder, *, is_broken=False):
        super().__init__(folder, name="below", capacity_bytes=64 << 20)
        self.is_broken = is_broken
        self.written, self.deleted = [], []

    def write_many(self, writes):
        if self.is_broken:
            return [TierError(self.name, "planned") for _ in writes]
        self.written += [each.name for each in writes]
        return super().write_many(writes)

    def delete(self, name):
        self.deleted.append(name)
        super().delete(name)


def opened(folder, seeds, *, common=("below",), broken=(), is_shared=False):
    """A session on two ranks over one directory, which each has opened; the engines and the tiers of the ranks.

    With `is_shared` they share host memory, and without `common` each has then a directory of its own.
    """
    engines = [Engine(64, seed=seed) for seed in seeds]
    folders = [folder, folder if common or not is_shared else folder.with_suffix(".1")]
    tiers = [Counted(folders[rank], is_broken=rank in broken) for rank in range(2)]
    memory = {group: page_aligned(SLOTS * frame_bytes(it)) for group, it in enumerate(LAYOUT.groups)}
    movers = [
        Mover(
            CommandRunner(
                layout=COPIES[rank],
                model=FINGERPRINT[:16],
                arena=Arena(COPIES[rank], (SLOTS, SLOTS), shared=memory if is_shared else {}),
                copier=engine.copier(),
                tiers={"below": tiers[rank]},
                common=common,
            )
        )
        for rank, engine in enumerate(engines)
    ]
    cache = Cache(
        layout=LAYOUT, slots=(SLOTS, SLOTS), tiers=[TierRules(name="below")], evictor=lambda: make_evictor("lru")
    )

    def close(_seconds):
        for tier in tiers:
            tier.close()

    return Session(cache, RankGroup(movers), on_close=close), engines, tiers


def opened_by_settings(folder, seeds, *, shared):
    """The same from settings, as an engine's processes open it; the engines."""
    made = config(folder, host_chunks=16)
    made = replace(made, tiers=tuple(replace(tier, shared=shared) for tier in made.tiers))
    engines = [Engine(64, seed=seed) for seed in seeds]
    ranks = [
        open_rank(made, COPIES[rank], FINGERPRINT, engine.copier(), rank=rank, ranks=2)
        for rank, engine in enumerate(engines)
    ]
    servers = [RankServer(rank, lambda _note: None) for rank in ranks]

    def close(seconds):
        for rank, server in zip(ranks, servers, strict=True):
            rank.close(seconds)
            assert server.close()

    below = connect([server.handshake for server in servers])
    return open_core(made, LAYOUT, FINGERPRINT, below, on_close=close), engines


def objects(folder):
    return {bytes.fromhex(path.name): path for path in (folder / "objects").rglob("*") if path.is_file()}


def test_one_rank_writes_and_all_load(tmp_path):
    # Other bytes on rank 1 show whose were stored.
    first, sources, tiers = opened(tmp_path / "kv", (1, 2))
    assert stored(first, "a", prefix_of(3), places_of(range(3))).stored == 6
    assert first.close().flushed
    assert (len(tiers[0].written), tiers[1].written) == (6, [])
    assert set(objects(tmp_path / "kv")) == set(tiers[0].written)

    second, targets, _ = opened(tmp_path / "kv", (11, 12))
    assert looked_up(second, "b", prefix_of(3)).tokens == 48
    assert loaded(second, "b", prefix_of(3), 48, load_places(48)).tokens == 48
    assert all(target.same(sources[0], load_places(48)) for target in targets)
    assert not targets[1].same(sources[1], load_places(48))
    second.close()


@pytest.mark.parametrize("common", [("below",), ()])
def test_where_slots_are_shared_one_rank_gathers_writes_finds_and_reads(tmp_path, common):
    first, sources, tiers = opened(tmp_path / "kv", (1, 2), common=common, is_shared=True)
    assert stored(first, "a", prefix_of(3), places_of(range(3))).stored == 6
    assert loaded(first, "b", prefix_of(3), 48, load_places(48)).tokens == 48
    assert sources[1].same(Engine(64, seed=1), load_places(48)), "what the first rank has gathered"
    assert first.close().flushed
    assert (len(tiers[0].written), tiers[1].written) == (6, [])

    second, targets, tiers = opened(tmp_path / "kv", (11, 12), common=common, is_shared=True)
    assert looked_up(second, "a", prefix_of(4)).tokens == 48
    assert loaded(second, "a", prefix_of(3), 48, load_places(48)).tokens == 48
    assert all(target.same(Engine(64, seed=1), load_places(48)) for target in targets)
    assert second.close().flushed
    assert (tiers[1].written, tiers[1].deleted) == ([], [])


@pytest.mark.parametrize("groups", [{0}, {0, 1}])
def test_a_probe_of_nothing_asks_the_store_of_a_rank_that_has_something_in_it(tmp_path, groups):
    memory = {group: page_aligned(SLOTS * frame_bytes(LAYOUT.groups[group])) for group in groups}
    tier = Counted(tmp_path / "kv")
    tier.contains = MagicMock(side_effect=TierError("below", "planned"))
    mover = Mover(
        CommandRunner(
            layout=COPIES[1],
            model=FINGERPRINT[:16],
            arena=Arena(COPIES[1], (SLOTS, SLOTS), shared=memory),
            copier=Engine(4).copier(),
            tiers={"below": tier},
        )
    )
    found = []
    mover.complete_to(found.append)
    mover.submit(Probe(1, "below", (), inf))
    mover.flush()
    until(lambda: found)
    assert mover.close(5.0)
    assert (found[0].outcome is Outcome.FAILED) == bool(tier.contains.mock_calls) == (groups == {0})


@pytest.mark.parametrize("is_shared", [True, False])
def test_figures_count_a_copy_in_slots_of_its_own_and_nothing_that_a_rank_lacks(is_shared):
    parts = [Part(0, len(group.layer_bytes), 0, 1) for group in LAYOUT.groups]
    layout, made = LAYOUT.with_parts(zip(parts, (1, ELSEWHERE), strict=True)), config(None)
    shared = {0: page_aligned(made.host.capacity_bytes)} if is_shared else {}
    rank = open_rank(made, layout, FINGERPRINT, Engine(4).copier(), rank=1, ranks=2, shared=shared)
    assert [it.copy for it in rank.counted.groups] == [int(is_shared), ELSEWHERE]
    assert of_all_ranks([rank.counted], engine_bytes) == [sum(LAYOUT.groups[0].layer_bytes), 0]
    rank.close(5.0)


def test_in_stores_of_their_own_all_ranks_write(tmp_path):
    session, _, tiers = opened(tmp_path / "kv", (1, 1), common=())
    stored(session, "a", prefix_of(3), places_of(range(3)))
    assert session.close().flushed
    assert sorted(tiers[0].written) == sorted(tiers[1].written)
    assert len(tiers[1].written) == 6


@pytest.mark.parametrize("shared", [True, False])
def test_all_ranks_find_what_is_stored_with_or_without_an_index_of_their_own(tmp_path, shared):
    """A rank that trusts its own index would not find what another has written, so all write."""
    first, sources = opened_by_settings(tmp_path / "kv", (1, 2), shared=shared)
    prefix = prefix_of(12, first.root)
    assert stored(first.session, "a", prefix, places_of(range(12))).stored == 24
    for seed in range(1, 6):  # to evict the first from host memory
        stored(first.session, f"a{seed}", prefix_of(12, first.root, seed), places_of(range(12)))
    answer = looked_up(first.session, "b", prefix)
    assert answer.ready_tokens < answer.tokens == 12 * CHUNK_TOKENS
    assert first.session.close().flushed
    assert len(objects(tmp_path / "kv")) == 6 * 24
    second, targets = opened_by_settings(tmp_path / "kv", (11, 12), shared=shared)
    tokens = looked_up(second.session, "b", prefix).tokens
    assert tokens == 12 * CHUNK_TOKENS
    assert loaded(second.session, "b", prefix, tokens, load_places(tokens)).tokens == tokens
    assert targets[0].same(targets[1], load_places(tokens))
    assert targets[0].same(sources[0], load_places(tokens)) or not shared
    second.session.close()


@pytest.mark.parametrize(("broken", "found"), [(0, 0), (1, 48)])
def test_the_outcome_of_a_write_is_that_of_the_rank_that_writes(tmp_path, broken, found):
    session, _, tiers = opened(tmp_path / "kv", (1, 1), broken=(broken,))
    stored(session, "a", prefix_of(3), places_of(range(3)))
    session.close()
    assert (session._cache.counters.demotions_dropped == 0) == (found > 0)
    assert len(tiers[0].written) == 2 * found // CHUNK_TOKENS
    second, _, _ = opened(tmp_path / "kv", (11, 12))
    assert looked_up(second, "b", prefix_of(3)).tokens == found
    second.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_rank_that_writes_an_object_drops_it(tmp_path, is_shared):
    """Another rank's drop could come after the next write and delete that."""
    first, _, _ = opened(tmp_path / "kv", (1, 1), is_shared=is_shared)
    stored(first, "a", prefix_of(1), places_of(range(1)))
    assert first.close().flushed
    name = object_name(prefix_of(1).keys[0], 0, COPIES[1].part(0), LAYOUT.digest(0))
    path = objects(tmp_path / "kv")[name]
    frame = bytearray(path.read_bytes())
    frame[-1] ^= 1
    path.write_bytes(frame)

    second, _, tiers = opened(tmp_path / "kv", (11, 12), is_shared=is_shared)
    assert looked_up(second, "b", prefix_of(1)).tokens == CHUNK_TOKENS
    assert loaded(second, "b", prefix_of(1), CHUNK_TOKENS, load_places(CHUNK_TOKENS)).tokens == 0
    until(lambda: not path.exists())
    second.close()
    assert tiers[0].deleted == [name]
    assert tiers[1].deleted == []
