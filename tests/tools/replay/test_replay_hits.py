"""Hit rates equal published tables to four digits, libCacheSim to the block, and no policy exceeds the bounds."""

import json
from pathlib import Path

import pytest
from tests.traces import public, replay

from kvtier.errors import ConfigError
from kvtier.tools.replay.policies.registry import REFERENCES, make_policy, policy_names
from kvtier.tools.replay.sweep import CacheResult, FinishedReplays, Task, sweep

# `no_cover`: counting lines would make these loops over whole traces five times as long; the small traces count them.
GOLDEN = Path(__file__).parents[2] / "golden"
CONVERSATION, SYNTHETIC = "mooncake_conversation_runs", "mooncake_synthetic_runs"
LIBCACHESIM = json.loads((GOLDEN / "libcachesim_hits.json").read_text())["block_hits"]


def hit_rate(name, policy, millions):
    capacity = None if millions is None else round(millions * 1e6)
    return round(replay(public(name), policy, capacity).hit_rate, 4)


TABLE = [
    # Whole trace, no warm-up, deepest block first: research/benchmarks, section 2.
    (CONVERSATION, "infinite", {None: 0.3736}),
    (CONVERSATION, "lru", {3: 0.1387}),
    (CONVERSATION, "plain-lru", {10: 0.2908, 50: 0.3707}),
    (CONVERSATION, "min", {3: 0.3601}),
    (SYNTHETIC, "infinite", {None: 0.6512}),
    (SYNTHETIC, "lru", {0.1: 0.0171, 3: 0.3151, 10: 0.5770}),
    (SYNTHETIC, "arc", {0.1: 0.0140, 3: 0.3300, 5: 0.4348}),
    (SYNTHETIC, "min", {0.1: 0.1181, 0.3: 0.2192, 1: 0.3826, 3: 0.5600, 5: 0.6273, 10: 0.6512}),
]
REST = [
    (CONVERSATION, "plain-lru", {0.1: 0.0427, 0.3: 0.0431, 1: 0.0543, 3: 0.1387, 10: 0.2908, 50: 0.3707}),
    (CONVERSATION, "arc", {3: 0.1470}),
    (CONVERSATION, "s3-fifo", {3: 0.1555}),
    (CONVERSATION, "oracle-lru", {1: 0.1459, 3: 0.3388, 10: 0.3736}),
    (SYNTHETIC, "fifo", {0.3: 0.0520, 1: 0.1441, 3: 0.3071, 10: 0.5387}),
    (SYNTHETIC, "s3-fifo", {0.1: 0.0102, 1: 0.1461, 5: 0.4176}),
    (SYNTHETIC, "oracle-lru", {0.3: 0.0824, 3: 0.4539, 10: 0.6512}),
    (CONVERSATION, "min", {0.1: 0.0915, 1: 0.2577}),
    (CONVERSATION, "lru", {1: 0.0543, 10: 0.2908, 50: 0.3707}),
    (CONVERSATION, "fifo", {0.1: 0.0427, 0.3: 0.0431, 1: 0.0535, 10: 0.2613, 30: 0.3481, 50: 0.3630}),
    (CONVERSATION, "arc", {0.1: 0.0458, 0.3: 0.0465, 1: 0.0693, 10: 0.2933, 20: 0.3299, 50: 0.3702}),
    (CONVERSATION, "s3-fifo", {0.1: 0.0458, 0.3: 0.0490, 1: 0.0781, 10: 0.2556, 20: 0.3390, 50: 0.3695}),
    (CONVERSATION, "oracle-lru", {0.1: 0.0442, 0.3: 0.0543}),
    (CONVERSATION, "min", {0.3: 0.1506, 10: 0.3736}),
]


@pytest.mark.no_cover
@pytest.mark.parametrize(("name", "policy", "cells"), TABLE, ids=lambda it: str(it)[:24])
def test_published_tables_to_four_digits(name, policy, cells):
    assert {millions: hit_rate(name, policy, millions) for millions in cells} == cells


@pytest.mark.no_cover
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "policy", "cells"), REST, ids=lambda it: str(it)[:24])
def test_the_other_cells_of_the_tables(name, policy, cells):
    assert {millions: hit_rate(name, policy, millions) for millions in cells} == cells


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=[pytest.mark.nightly] if it in (CONVERSATION, SYNTHETIC) else []) for it in LIBCACHESIM],
)
def test_block_hits_equal_libcachesim(name):
    packed = public(name)
    for policy, cells in LIBCACHESIM[name].items():
        for capacity, expected in cells.items():
            outcome = replay(packed, policy, int(capacity) * packed.block_tokens)
            assert (policy, capacity, outcome.block_hits) == (policy, capacity, expected)


@pytest.mark.parametrize(("name", "capacity"), [("lmcache_miniswe_b64", 6_400), ("lmcache_magagent_b64", 50_000)])
def test_no_policy_exceeds_the_bounds_and_both_lrus_are_equal(name, capacity):
    packed = public(name)
    rates = {policy: replay(packed, policy, capacity).hit_rate for policy in policy_names()}
    best = rates.pop("infinite")
    least = rates.pop("min")
    assert max(rates.values()) <= least <= best
    assert rates["lru"] == rates["plain-lru"]
    assert min(rates.values()) >= 0.0


def test_a_sweep_equals_single_replays_and_continues_from_its_journal(tmp_path):
    packed = public("lmcache_miniswe_b64")
    tasks = [Task(policy, capacity) for policy in ("lru", "min", "arc") for capacity in (20_000, None)]
    advanced = []
    alone = sweep(packed, tasks, jobs=1, advance=advanced.append)
    assert alone == [replay(packed, it.policy, it.capacity_tokens) for it in tasks]
    assert sum(advanced) == len(packed) * len(tasks)

    path = tmp_path / "kept"
    apart = sweep(packed, tasks, jobs=2, keep=path)
    assert apart == alone
    path.write_text(path.read_text()[:-20])  # cut while the last line was written
    assert kept(path, packed, tasks) == len(tasks) - 1
    assert sweep(packed, tasks, jobs=1, keep=path) == alone
    assert kept(path, packed, tasks) == len(tasks)
    assert not kept(path, public("lmcache_magagent_b64"), tasks)  # results of another trace are ignored
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="line 1: not made by"):
        kept(path, packed, tasks)


def kept(path, packed, tasks):
    """The number of `tasks` in the journal."""
    journal = FinishedReplays(path, packed, lambda plain: CacheResult(**plain))
    return sum(journal.find(task) is not None for task in tasks)


@pytest.mark.parametrize(
    ("policy", "capacity", "message"),
    [
        ("lfru", 10_000, "unknown policy 'lfru'; allowed: default, "),
        ("arc:3", 10_000, "unknown policy 'arc:3'"),
        ("lru", 63, "is less than a block; allowed: at least 64 tokens"),
    ],
)
def test_a_wrong_task_is_refused_before_anything_runs(policy, capacity, message):
    advanced = []
    with pytest.raises(ConfigError, match=message):
        sweep(public("lmcache_miniswe_b64"), [Task("lru", 10_000), Task(policy, capacity)], advance=advanced.append)
    assert not advanced


def test_policies_keep_their_capacity():
    packed = public("lmcache_magagent_b64")
    for name in [*REFERENCES, "lru", "fifo"]:
        if name == "infinite":
            continue
        policy = make_policy(name, 40, packed)
        for request in range(len(packed)):
            blocks = packed.blocks(request).tolist()
            policy.begin(request)
            hits, inserted = policy.access(blocks)
            assert hits + inserted <= len(blocks)
            assert policy.held <= 40, name
        assert policy.held == sum(policy.present)
