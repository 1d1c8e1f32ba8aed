"""The disk tier's parts: what is refused in a segment, who survives, the write budget, sizes and settings."""

import numpy as np
import pytest
from tests.refusals import refuses

from kvtier.errors import TierError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.disk.format import (
    ENTRIES_PER_BLOCK,
    ENTRY,
    Header,
    blocks_for,
    entries_in,
    pack_blocks,
    pack_header,
    read_blocks,
    read_header,
    segment_bytes_for,
)
from kvtier.tier.disk.kind import KIND, DiskSettings
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.disk.view import DiskView
from kvtier.tier.disk.write_budget import DAY_S, WriteBudget
from kvtier.tier.registry import TierContext

HEADER = Header(b"s" * 16, 7, 1 << 20)
SEGMENT_BYTES = 64 * BLOCK_BYTES


def entries(count):
    made = np.zeros(count, ENTRY)
    made["name"] = np.arange(4 * count, dtype=np.uint64).reshape(-1, 4)
    made["block"], made["size_bytes"] = np.arange(1, count + 1), 4096
    return made


def opened(root, segments=6, **settings):
    return DiskTier(
        root,
        **{
            "capacity_bytes": segments * SEGMENT_BYTES,
            "segment_bytes": SEGMENT_BYTES,
            "sync_interval_s": 3600.0,
            **settings,
        },
    )


# ---- format ----------------------------------------------------------------------------------------------------------


def test_a_header_is_read_back():
    assert read_header(pack_header(HEADER)) == HEADER


@pytest.mark.parametrize(
    "header",
    [
        *(HEADER._replace(generation=generation) for generation in (0, 1 << 63, (1 << 64) - 1)),
        *(
            HEADER._replace(segment_bytes=size_bytes)
            for size_bytes in (0, 4096, (1 << 20) + 1, 1 << 45, (1 << 64) - 4096)
        ),
    ],
)
def test_a_header_out_of_range_is_none(header):
    assert "out of range" in read_header(pack_header(header))


def test_no_bit_of_a_header_or_a_block_goes_unnoticed():
    header, (block,) = pack_header(HEADER), pack_blocks(HEADER, 3, entries(5))
    for at in range(0, 8 * BLOCK_BYTES, 7):
        for packed, read in ((header, read_header), (block, lambda block: len(read_blocks(HEADER, 3, block)))):
            flipped = bytearray(packed)
            flipped[at // 8] ^= 1 << at % 8
            assert isinstance(read(bytes(flipped)), str) or read(bytes(flipped)) == 0


@pytest.mark.parametrize("count", [1, ENTRIES_PER_BLOCK, ENTRIES_PER_BLOCK + 1, 3 * ENTRIES_PER_BLOCK])
def test_entries_are_read_back_from_their_blocks(count):
    blocks = pack_blocks(HEADER, 5, entries(count))
    assert len(blocks) == blocks_for(count)
    assert all(len(block) == BLOCK_BYTES for block in blocks)
    found = entries_in(read_blocks(HEADER, 5, b"".join(reversed(blocks))))
    assert found.tobytes() == entries(count).tobytes()


@pytest.mark.parametrize(
    ("header", "number"),
    [(HEADER._replace(generation=8), 3), (HEADER._replace(store_id=b"t" * 16), 3), (HEADER, 4)],
)
def test_a_block_counts_in_its_own_place_only(header, number):
    (block,) = pack_blocks(HEADER, 3, entries(5))
    assert entries_in(read_blocks(HEADER, 3, block)).tobytes() == entries(5).tobytes()
    assert not len(read_blocks(header, number, block))


def prepare(tier):
    """Prepare a segment here, or wait until the tier's own thread has."""
    tier._pool.prepare()
    with tier._pool._turning():
        pass


# ---- who stays -------------------------------------------------------------------------------------------------------


def test_what_was_read_more_than_the_rest_survives_the_segment(tmp_path):
    tier = opened(tmp_path / "s")
    into = empty_frame(4 * BLOCK_BYTES)
    hot = [object_name(number) for number in (2, 5)]
    for number in range(200):
        assert tier.write(object_name(number), frame_of(number, 4 * BLOCK_BYTES))
        for name in hot:
            if tier.contains([name])[0]:
                assert tier.read(name, into) == into.nbytes
        prepare(tier)
    assert tier.evictions > 50
    assert tier.contains(hot) == [True, True]
    assert tier.read(hot[0], into) == into.nbytes
    assert into == frame_of(2, 4 * BLOCK_BYTES)
    assert 0 < tier.write_bytes["upkeep"] < tier.write_bytes["frames"] / 4
    tier.close()
    tier = opened(tmp_path / "s")
    assert tier.contains(hot) == [True, True]
    tier.close()


def test_where_all_was_read_alike_nothing_is_copied(tmp_path):
    tier = opened(tmp_path / "s")
    into = empty_frame(4 * BLOCK_BYTES)
    for number in range(200):
        assert tier.write(object_name(number), frame_of(number, 4 * BLOCK_BYTES))
        assert tier.read(object_name(number), into) == into.nbytes
        prepare(tier)
    assert tier.evictions > 50
    assert tier.write_bytes["upkeep"] == 0
    tier.close()


def test_a_sync_misses_nothing_while_the_last_frame_of_a_segment_is_being_written(tmp_path):
    tier = opened(tmp_path / "s")
    extents = []
    while True:
        (extent,) = tier._pool.take_here([BLOCK_BYTES]) or [None]
        if extent is None and extents:
            break
        extents.append(extent or tier._pool.take(BLOCK_BYTES))
    for at, extent in enumerate(extents[:-1]):  # each sync writes a block with one entry, the most wasteful way
        assert tier._pool.put([(extent, object_name(at))]) == [True]
        tier.sync()
        assert not extent.segment.pending
    segment = extents[-1].segment
    assert segment.next_block <= SEGMENT_BYTES // BLOCK_BYTES - segment.index_blocks - 1
    tier._pool.abandon(extents[-1:])
    tier.close()
    tier = opened(tmp_path / "s")
    assert tier.object_count == len(extents) - 1
    tier.close()


# ---- write budget ----------------------------------------------------------------------------------------------------


def test_without_a_budget_everything_is_admitted():
    budget = WriteBudget(0, 0.0)
    assert all(budget.admits(object_name(number), 1 << 40, 0.0) for number in range(10))


def test_a_scarce_budget_is_kept_for_what_is_offered_again():
    budget = WriteBudget(24 * 100, 0.0)  # 100 bytes an hour
    first = [budget.admits(object_name(number), 10, 0.0) for number in range(20)]
    assert first == [True] * 6 + [False] * 14  # the first half freely
    again = [budget.admits(object_name(number), 10, 0.0) for number in range(6, 20)]
    assert again == [True] * 4 + [False] * 10  # the other half for these
    assert budget.admits(object_name(19), 10, 360.0)
    assert not budget.admits(object_name(18), 10, 360.0)


def test_over_a_day_no_more_is_written_than_allowed():
    budget, written = WriteBudget(1000, 0.0), 0
    for minute in range(24 * 60):
        for number in range(3):
            written += 5 * budget.admits(object_name(number), 5, 60.0 * minute)
    assert 900 <= written <= 1000 * (1 + 3600 / DAY_S)


def test_a_frame_larger_than_the_savings_leaves_a_debt():
    budget = WriteBudget(24 * 100, 0.0)
    assert budget.admits(object_name(1), 1000, 0.0)
    assert not budget.admits(object_name(2), 1, 3600.0)
    assert budget.admits(object_name(2), 1, 11 * 3600.0)


def test_a_tier_with_a_budget_refuses_and_counts_what_it_avoids(tmp_path):
    tier = opened(tmp_path / "s", write_bytes_per_day=24 * 10 * BLOCK_BYTES)
    held = [tier.write(object_name(number), frame_of(number, BLOCK_BYTES)) for number in range(20)]
    assert held == [True] * 6 + [False] * 14
    assert tier.write_bytes == {"frames": 6 * BLOCK_BYTES, "upkeep": 0, "avoided": 14 * BLOCK_BYTES}
    assert tier.write(object_name(0), frame_of(0, BLOCK_BYTES))  # what is there costs nothing
    tier.close()


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "wanted"),
    [(1 << 20, 1 << 18), (1 << 30, 64 << 20), (64 << 30, 1 << 30), (1 << 40, 1 << 30)],
)
def test_segments_are_a_share_of_the_capacity(capacity, wanted):
    segment = segment_bytes_for(capacity)
    assert segment % BLOCK_BYTES == 0
    assert 0.95 * wanted <= segment <= wanted


@pytest.mark.parametrize(
    ("first", "later", "is_kept"),
    [(8 << 40, 8 << 40, True), (64 << 30, 8 << 40, True), (10 << 30, 640 << 30, False), (10 << 30, 630 << 30, True)],
)
def test_a_store_is_kept_unless_a_later_cap_has_larger_segments(tmp_path, first, later, is_kept):
    ids = set[str | None]()
    for capacity in (first, later):
        DiskTier(tmp_path / "s", capacity_bytes=capacity).close()
        ids.add(DiskView(tmp_path / "s").usage().store_id)
    assert (len(ids) == 1) == is_kept


def test_a_bad_call_is_an_error(tmp_path):
    tier = opened(tmp_path / "s")
    with pytest.raises(TierError, match="offset"):
        tier.read(object_name(1), empty_frame(1), -1)
    tier.close()


def test_each_rank_has_a_store_and_a_share_of_its_own(tmp_path):
    settings = DiskSettings(path=tmp_path, capacity_bytes="64MiB", reserve_bytes=0)
    layout = KvLayout(16, (GroupLayout(History(), (1 << 20,), "test"),))
    tiers = [KIND.open(settings, TierContext(layout=layout, rank=rank, ranks=2)) for rank in range(2)]
    assert [tier.capacity_bytes for tier in tiers] == [32 << 20] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
    for tier in tiers:
        tier.close()
    large = KvLayout(16, (GroupLayout(History(), (32 << 20,), "test"),))
    with refuses("tiers.disk.capacity_bytes", "too small: a chunk of 16 tokens", value="67108864"):
        KIND.open(settings, TierContext(layout=large, ranks=2))
