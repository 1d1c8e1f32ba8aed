"""Hundreds of seeded worlds around the real core: no wrong byte, no stall, no leak, whatever fails below.

`python -m tests.sim --seeds FIRST:END` runs more of them; a seed that fails is named, and reproduces exactly. The
golden digests run seeds 0 to 200, and `test_mutants` seeds 0 to 400 with bugs.
"""

import sys
from collections import Counter

import pytest
from tests import sim
from tests.sim import objects
from tests.sim.__main__ import main
from tests.sim.scenario import Mode, draw

from kvtier.core import tier_state


def run_seeds(first: int, count: int, **overrides: object) -> Counter[str]:
    """Run seeds; fails with the first bad one, and returns the faults and events that they met."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        report = sim.run(seed, **overrides)
        assert report.is_good, f"seed {seed} step {report.steps}: {report.failure}\n{report.where}"
        seen.update(report.incidents)
    return seen


def test_every_promise_is_kept_in_seeds_with_every_kind_of_fault() -> None:
    seen = run_seeds(200, 200)
    faults = ["absent", "cancelled", "corrupt", "damaged", "evicted", "failed", "flipped", "hangs", "late", "removed"]
    faults += ["read down", "read up", "write down", "write up"]
    assert [name for name in faults if not seen[name]] == []


def test_objects_that_pass_through_keep_every_promise() -> None:
    seen: Counter[str] = Counter()
    for seed in range(200, 400):
        report = objects.run(seed)
        assert report.is_good, f"seed {seed} step {report.steps}: {report.failure}\n{report.where}"
        seen.update({**report.incidents, "relays": report.counts.relays, "released": report.counts.released})
    faults = ["absent", "cancelled", "corrupt", "damaged", "dropped", "failed", "hangs", "late", "relays", "released"]
    assert [name for name in faults if not seen[name]] == []


def test_without_faults_and_one_at_a_time_everything_stored_is_restored() -> None:
    seen = run_seeds(10_000, 60, mode=Mode.QUIET)
    assert seen["evicted"] > 60, "prefixes larger than host memory are part of it"
    assert set(seen) <= {"evicted", "absent"}


def test_without_faults_but_all_at_once_everything_present_is_delivered() -> None:
    run_seeds(20_000, 50, mode=Mode.CALM)


def test_requests_wait_for_announced_chunks_for_a_bounded_time() -> None:
    seeds = [seed for seed in range(50_000, 50_300) if draw(seed).has_remote]
    waits = 0
    for seed in seeds:
        report = sim.run(seed, announced=0.7, mode=Mode.STORM if seed % 3 else Mode.CALM)
        assert report.is_good, f"seed {seed} step {report.steps}: {report.failure}\n{report.where}"
        waits += report.counts.announced_waits
    assert waits > len(seeds)


@pytest.mark.parametrize("mode", [Mode.QUIET, Mode.CALM, Mode.STORM])
def test_hints_break_no_promise(mode: Mode) -> None:
    prefetches = 0
    for seed in range(60_000, 60_080):
        report = sim.run(seed, hinted=0.7, mode=mode)
        assert report.is_good, f"seed {seed} step {report.steps}: {report.failure}\n{report.where}"
        prefetches += report.counts.prefetches
    assert prefetches > 80


def test_a_chunk_counts_when_all_of_several_unequal_ranks_have_it() -> None:
    seen = run_seeds(80_000, 120, most_ranks=4)
    faults = ["absent", "cancelled", "corrupt", "damaged", "evicted", "failed", "flipped", "hangs", "late", "removed"]
    assert [name for name in faults if not seen[name]] == []
    drawn = [draw(seed, most_ranks=4) for seed in range(80_000, 80_120)]
    assert {len(it.ranks) for it in drawn} == {2, 3, 4}
    assert {rank.filled_by for it in drawn for rank in it.ranks} == {None, 0, 1, 2}
    lacking = [it for it in drawn if any(rank.lacks for rank in it.ranks)]
    assert len(drawn) / 4 < len(lacking) < len(drawn) / 2
    for it in lacking:  # each group is somewhere, and each rank holds something
        lacks = [rank.lacks for rank in it.ranks]
        assert not frozenset.intersection(*lacks)
        assert max(map(len, lacks)) < len(it.layout.groups)


def test_places_may_be_asked_for_and_host_memory_cleared_at_any_moment() -> None:
    assert run_seeds(60_000, 80, operators=0.05)["evicted"]


def test_copies_whose_reads_fail_or_hang_until_they_are_written_anew_are_left_alone_and_replaced() -> None:
    seen = run_seeds(70_000, 80, deaths=0.1)
    assert seen["failed"]
    assert seen["hangs"]
    for seed in range(70_000, 70_080):
        report = objects.run(seed, deaths=0.1)
        assert report.is_good, f"seed {seed} step {report.steps}: {report.failure}\n{report.where}"


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sim", *arguments])
    return main()


def test_the_runner_counts_the_seeds_that_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--seeds", "0:3") == 0
    assert capsys.readouterr().out.startswith("3 seeds in ")


def test_the_runner_names_the_seed_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tier_state.TierState, "has_room", lambda self, link, size_bytes: True)
    assert run_main(monkeypatch, "--seeds", "0:50", "--failures", "1", "--trace") == 1
    out = capsys.readouterr().out
    assert "seed " in out.splitlines()[0]
    assert "Traceback" in out
    assert "1 failed" in out
