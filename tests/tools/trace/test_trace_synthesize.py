"""Synthetic traces: deterministic, with ids that name prefixes, like their model, and streamed."""

import json
import tracemalloc
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import MAGAGENT, arrays_of, public, replay

from kvtier.cli.main import run
from kvtier.tools.trace.arrays import write_lines
from kvtier.tools.trace.stats import trace_stats
from kvtier.tools.trace.synthesize import StatisticalSource, Statistics, TraceSource, synthesized


def made(tmp_path, source, count):
    path = tmp_path / "synthesised.jsonl"
    write_lines(path, synthesized(source, count))
    return arrays_of(path, is_strict=True)


CURVES = {
    "mooncake_conversation_runs": ((1_000_000, 10_000_000), 0.025),
    "mooncake_synthetic_runs": ((1_000_000, 3_000_000, 10_000_000), 0.025),
    "taubench_airline_b64": ((50_000, 300_000), 0.025),
    "lmcache_miniswe_b64": ((20_000, 60_000), 0.05),
    "lmcache_magagent_b64": ((20_000, 60_000), 0.05),
}
"""Capacities, and the tolerance of hit rates in docs/replay.md, larger with few sessions."""
QUANTILE_OFF_MAX = 0.15


def figures(packed, capacities):
    stats = trace_stats(packed)
    rates = [stats.infinite_hit_rate, *(replay(packed, "plain-lru", it).hit_rate for it in capacities)]
    return np.array(rates), np.array([stats.interval_p50_s, stats.interval_p90_s, stats.interval_p99_s]), stats


@pytest.mark.parametrize("name", CURVES)
def test_a_trace_like_another_has_its_hit_rates_and_intervals(tmp_path, name):
    model = public(name)
    capacities, off_max = CURVES[name]
    rates, intervals, stats = figures(model, capacities)
    like, like_intervals, like_told = figures(made(tmp_path, TraceSource(model, 1), len(model)), capacities)
    assert np.abs(like - rates).max() < off_max
    assert np.abs(like_intervals[:2] / intervals[:2] - 1).max() < QUANTILE_OFF_MAX
    assert like_told.input_mean == pytest.approx(stats.input_mean, rel=0.05)
    assert like_told.duration_s == pytest.approx(stats.duration_s, rel=0.12)
    # Negative control: without shared blocks nothing is hit.
    lone = Statistics(turns=1.0, shared_share=0.0, block_tokens=model.block_tokens)
    assert np.abs(figures(made(tmp_path, StatisticalSource(lone, 1), 500), ())[0] - rates[:1]).max() > off_max


def test_a_longer_trace_has_new_sessions(tmp_path):
    model = public("mooncake_synthetic_runs")
    rates, _, stats = figures(model, (3_000_000,))
    longer = made(tmp_path, TraceSource(model, 3), 3 * len(model))
    like, _, like_told = figures(longer, (3_000_000,))
    assert np.abs(like - rates).max() < 0.03
    assert longer.block_count == pytest.approx(3 * model.block_count, rel=0.05)
    assert like_told.duration_s == pytest.approx(3 * stats.duration_s, rel=0.05)
    # At another rate the same sessions start at other times.
    faster = made(tmp_path, TraceSource(model, 3, 2 * len(model) / stats.duration_s), len(model))
    assert trace_stats(faster).duration_s < 0.85 * stats.duration_s


def test_next_turns_are_as_in_the_model(tmp_path):
    path = tmp_path / "model.jsonl"
    next_turns = [["tool", "user", "nobody"], ["tool", None, "tool"], ["user", "user", None]]
    lines = [
        {"timestamp": 1000 * turn + 100 * session, "input_length": 64, "hash_ids": [[session * 9 + turn]]}
        | {"session_id": session, "next_turn": it, "block_size": 64}
        for turn in range(3)
        for session, it in enumerate(row[turn] for row in next_turns)
    ]
    path.write_text("".join(json.dumps({**it, "hash_ids": it["hash_ids"][0]}) + "\n" for it in lines))
    like = made(tmp_path, TraceSource(arrays_of(path), 1), 9)
    turns = {session: like.next_turn[like.session == session].tolist() for session in range(3)}
    assert sorted(turns.values()) == sorted([[0, 1, 2], [0, -1, 0], [1, 1, -1]])


def test_an_order_is_kept_and_sessions_stay_whole(tmp_path):
    model = public("lmcache_miniswe_b64")
    like = made(tmp_path, TraceSource(model, 5), len(model))

    def lives(packed):
        """Lengths of each session's prompts, in their order."""
        out = {}
        for session, tokens in zip(packed.session.tolist(), packed.input_tokens.tolist(), strict=True):
            out.setdefault(session, []).append(tokens)
        return sorted(out.values())

    assert lives(like) == lives(model)
    assert like.input_tokens.tolist() != model.input_tokens.tolist()


@pytest.mark.parametrize(
    "source",
    [
        lambda seed: StatisticalSource(Statistics(), seed),
        lambda seed: TraceSource(public("taubench_airline_b64"), seed),
    ],
    ids=["statistics", "like"],
)
def test_a_seed_decides_everything(source):
    first, again, other = (list(synthesized(source(seed), 3000)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@given(
    turns=st.floats(1, 8),
    first=st.floats(1, 500),
    grown=st.floats(1, 300),
    shared=st.integers(0, 90),
    share=st.floats(0, 1),
    block=st.integers(1, 64),
    seed=st.integers(0, 9),
)
def test_ids_name_whole_prefixes_whatever_the_statistics(
    tmp_path_factory, turns, first, grown, shared, share, block, seed
):
    stats = Statistics(
        turns=turns,
        first_tokens=first,
        turn_tokens=grown,
        shared_tokens=shared,
        shared_share=share,
        shared_prompts=3,
        block_tokens=block,
        requests_per_s=5.0,
    )
    packed = made(tmp_path_factory.mktemp("made"), StatisticalSource(stats, seed), 120)
    assert packed.prefix_violations == 0
    assert packed.block_tokens == block
    counts = np.diff(packed.starts)
    assert (counts == -(-packed.input_tokens // block)).all()
    assert (np.diff(packed.time_s) >= 0).all()


def test_statistics_are_met(tmp_path):
    stats = Statistics(requests_per_s=3.0, turns=5.0, first_tokens=700, turn_tokens=300, output_tokens=90, spread=0.5)
    packed = made(tmp_path, StatisticalSource(stats, 2), 20_000)
    late = slice(5000, None)  # in steady state
    assert 15_000 / float(packed.time_s[-1] - packed.time_s[5000]) == pytest.approx(3.0, rel=0.1)
    assert packed.output_tokens[late].mean() == pytest.approx(90, rel=0.03)
    first = packed.input_tokens[packed.turn == 0]
    assert first.mean() == pytest.approx(700 + 0.8 * 1024, rel=0.03)
    grown = [
        packed.input_tokens[packed.turn == turn + 1].mean() - packed.input_tokens[packed.turn == turn].mean()
        for turn in range(2)
    ]
    assert grown == pytest.approx([300, 300], rel=0.15)
    assert 20_000 / (int(packed.session.max()) + 1) == pytest.approx(5.0, rel=0.1)


def test_writing_takes_memory_for_open_sessions_only():
    lines = synthesized(StatisticalSource(Statistics(think_s=10.0), 1), 10**9)
    for _ in islice(lines, 5_000):
        pass
    tracemalloc.start()
    for _ in islice(lines, 8_000):
        pass
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 512 << 10  # 8,000 lines are 1 MB


def test_the_command(tmp_path, capsys):
    target = tmp_path / "out.jsonl.gz"
    assert run(["trace", "synthesize", str(target), "--requests", "1k", "--turns", "2", "--block", "64"]) == 0
    assert "1,000 requests, blocks of 64 tokens" in capsys.readouterr().out
    assert len(arrays_of(target)) == 1000
    assert run(["trace", "synthesize", str(target), "--like", str(MAGAGENT)]) == 0
    assert len(arrays_of(target)) == 693


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--turns", "0.5"), "--turns 0.5; allowed: 1 to 1000"),
        (("--requests", "none"), "'none' is not a whole number"),
        (("--requests", "0"), "--requests 0; allowed: 1 to"),
        (("--block", "0"), "--block 0; allowed: 1 to"),
        (("--like", "LIKE", "--turns", "3"), "--turns and --like are both given"),
        (("--like", "CSV"), "has no blocks; use a trace with blocks"),
        (("--like", "ONE"), "all its requests have the same time"),
        (("--like", "LIKE", "--requests-per-s", "0"), "--requests-per-s 0; allowed: 1e-06 to 1e+06"),
        (("--like", "LIKE", "--requests-per-s", "nan"), "'--requests-per-s': 'nan' is not finite"),
        (("--seed", "-1"), "-1 is not in the range x>=0"),
    ],
)
def test_impossible_options_are_refused(tmp_path, capsys, options, message):
    (tmp_path / "csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    (tmp_path / "one").write_text(json.dumps({"timestamp": 0, "input_length": 9, "hash_ids": [1]}))
    files = {"LIKE": MAGAGENT, "CSV": tmp_path / "csv", "ONE": tmp_path / "one"}
    options = [str(files.get(it, it)) for it in options]
    assert run(["trace", "synthesize", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
