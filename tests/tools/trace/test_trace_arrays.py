"""Traces as arrays: columns equal the reader's requests, in memory and in files; errors are counted and reported."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import listed, public

import kvtier.tools.trace.arrays as packing
from kvtier.errors import ConfigError
from kvtier.tools.trace.stats import trace_stats

rows = st.lists(
    st.tuples(
        st.floats(0, 100),
        st.integers(0, 200),
        st.lists(st.integers(-3, 40), max_size=12),
        st.sampled_from([None, "a", "b"]),
    ),
    min_size=1,
    max_size=30,
)


@given(rows=rows, step=st.sampled_from([1, 7, 1 << 16]), in_file=st.booleans())
def test_columns_equal_a_naive_reading(rows, step, in_file):
    before = packing._STEP, packing.MEMORY_BYTES_MAX
    packing._STEP, packing.MEMORY_BYTES_MAX = step, 0 if in_file else 1 << 20
    try:
        packed = listed(rows)
    finally:
        packing._STEP, packing.MEMORY_BYTES_MAX = before
    known = sorted({block for row in rows for block in row[2]})
    latest, turns, parents, violations = rows[0][0], {}, {}, 0
    for place, (time_s, tokens, ids, session) in enumerate(rows):
        latest = max(latest, time_s)
        part = packed.ids[packed.starts[place] : packed.starts[place + 1]].tolist()
        assert [known[it] for it in part] == ids
        assert (packed.time_s[place], packed.input_tokens[place]) == (latest, tokens)
        assert packed.turn[place] == (-1 if session is None else turns.get(session, 0))
        turns[session] = turns.get(session, 0) + 1
        for parent, block in zip([-1, *part], part, strict=False):
            violations += parents.setdefault(block, parent) != parent
    assert packed.prefix_violations == violations
    assert packed.parents.tolist() == [parents[it] for it in range(packed.block_count)]


def test_warnings_and_strict():
    good = [(0.0, 32, [1, 2], None), (1.0, 32, [1, 3], None)]
    assert listed(good, is_strict=True).warnings == ()
    back = listed([*good, (0.5, 16, [1], None)])
    assert "1 timestamps go back, first in line 3" in back.warnings[0]
    assert back.time_s.tolist() == [0.0, 1.0, 1.0]
    torn = [*good, (2.0, 32, [5, 3], None)]
    assert listed(torn).prefix_violations == 2 - 1
    assert "1 blocks follow a different parent than before, first in request 3" in listed(torn).warnings[0]
    with pytest.raises(ConfigError, match=r"follow a different parent.*because of --strict"):
        listed(torn, is_strict=True)
    with pytest.raises(ConfigError, match="has no request"):
        listed([])


@pytest.mark.parametrize(
    ("file", "requests", "tokens", "unique", "hit", "late", "once", "top", "intervals", "first", "written"),
    [
        (
            "mooncake_conversation_runs",
            12_031, 144_793_823, 93_588_480, 0.3736, 0.3981, 0.76, 0.32, (114, 519, 1578), 0.61, 1.68,
        ),
        (
            "mooncake_synthetic_runs",
            3_993, 61_194_628, 22_489_088, 0.6512, 0.8627, 0.58, 0.10, (59, 282, 583), 0.56, 0.54,
        ),
        ("lmcache_miniswe_b64", 402, 2_539_560, 188_928, 0.9304, 0.9327, 0.18, 0.02, (1.1, 1.7, 2.5), 0.05, 0.075),
        ("lmcache_magagent_b64", 693, 1_574_007, 253_568, 0.8421, 0.8623, 0.39, 0.08, (11, 20, 143), 0.07, 0.19),
    ],
)  # fmt: skip
def test_statistics_of_public_traces(file, requests, tokens, unique, hit, late, once, top, intervals, first, written):
    stats = trace_stats(public(file))
    assert (stats.requests, stats.input_tokens, stats.unique_tokens) == (requests, tokens, unique)
    assert (round(stats.infinite_hit_rate, 4), round(stats.infinite_hit_rate_second_half, 4)) == (hit, late)
    assert stats.used_once == pytest.approx(once, abs=0.005)
    assert stats.top_reuse == pytest.approx(top, abs=0.005)
    found = (stats.interval_p50_s, stats.interval_p90_s, stats.interval_p99_s)
    assert found == pytest.approx(intervals, rel=0.03)
    assert stats.first_turns == pytest.approx(first, abs=0.005)
    assert stats.written_per_read == pytest.approx(written, rel=0.02)
    assert stats.over_time.input_tokens.sum() == tokens
    assert stats.over_time.unique_tokens[-1] == unique


def test_working_sets_equal_a_naive_count():
    rows = [(0.0, 32, [1, 2], None), (10.0, 32, [1, 3], None), (100.0, 16, [1], None)]
    stats = trace_stats(listed(rows))
    # Block 1: 10 s, then 60 of 90, none at the end; 2: 60 of 100; 3: 60 of 90.
    assert stats.working_set_tokens[60.0] == pytest.approx((10 + 60 + 60 + 60) / 100 * 16, rel=0.01)
    assert stats.working_set_tokens[3600.0] == pytest.approx((100 + 100 + 90) / 100 * 16, rel=0.01)
    json.dumps(stats.over_time.input_tokens.tolist())
