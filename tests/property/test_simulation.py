"""Thousands of seeded worlds around the real core: no wrong byte, no stall, no leak, whatever goes wrong below.

`python -m tests.sim --seeds FIRST:END` runs more of them; a seed that fails is named, and reproduces exactly.
"""

import os
import subprocess
import sys
from collections import Counter

import pytest
from tests import sim
from tests.sim.__main__ import main
from tests.sim.scenario import Mode, draw

from kvtier.core import traffic
from kvtier.types import Outcome

BLOCK = 100


def run_block(first: int, count: int, **overrides: object) -> Counter[str]:
    """Run seeds; fails with the first bad one, and returns what they went through."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        report = sim.run(seed, **overrides)
        assert report.is_good, f"seed {seed} step {report.steps}: {report.failure}\n{report.where}"
        seen.update(report.incidents)
    return seen


@pytest.mark.parametrize("first", range(0, 900, BLOCK))
def test_every_promise_is_kept_in_seeds_from(first: int) -> None:
    run_block(first, BLOCK)


def test_without_faults_and_one_at_a_time_what_was_stored_is_what_is_restored() -> None:
    seen = run_block(10_000, BLOCK, mode=Mode.QUIET)
    assert seen["evicted"] > BLOCK, "prefixes larger than host memory are part of it"
    assert set(seen) <= {"evicted", "absent"}


def test_without_faults_but_all_at_once_what_is_present_is_delivered() -> None:
    run_block(20_000, BLOCK, mode=Mode.CALM)


def test_several_ranks_count_only_together() -> None:
    run_block(30_000, BLOCK // 2, ranks=3)


def test_the_seeds_reach_every_kind_of_trouble() -> None:
    seen = run_block(40_000, BLOCK, mode=Mode.STORM, steps=400)
    for trouble in (
        "absent",
        "cancelled",
        "corrupt",
        "damaged",
        "read down",
        "write down",
        "evicted",
        "failed",
        "flipped",
        "hangs",
        "late",
    ):
        assert seen[trouble], trouble
    assert seen["removed"]
    assert seen["read up"]
    assert seen["write up"]


def test_a_seed_reproduces_exactly_even_in_another_process() -> None:
    here = [sim.run(seed).digest for seed in range(8)]
    assert here == [sim.run(seed).digest for seed in range(8)]
    told = "from tests import sim; print(*[sim.run(seed).digest for seed in range(8)])"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", told], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        assert done.stdout.split() == here


def test_different_seeds_differ() -> None:
    assert len({sim.run(seed).digest for seed in range(20)}) == 20
    assert len({draw(seed).limits for seed in range(20)}) > 15


def test_overrides_replace_what_the_seed_drew() -> None:
    assert draw(3, 50, ranks=2).ranks == 2
    assert draw(3, 50).steps == 50
    assert draw(3, mode=Mode.QUIET).faults == draw(3, mode=Mode.CALM).faults
    with pytest.raises(TypeError, match="colour"):
        draw(3, colour="red")


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sim", *arguments])
    return main()


def test_the_runner_says_how_many_seeds_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--seeds", "0:3") == 0
    assert capsys.readouterr().out.startswith("3 seeds in ")
    assert run_main(monkeypatch, "--seeds", "7", "--steps", "30") == 0
    assert capsys.readouterr().out.startswith("1 seeds in ")


def test_the_runner_names_the_seed_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic, "SEVERITY", dict.fromkeys(Outcome, 0))
    monkeypatch.setattr("tests.sim.__main__.PROGRESS_S", 0.0)
    assert run_main(monkeypatch, "--seeds", "0:50", "--failures", "1", "--trace") == 1
    told = capsys.readouterr()
    assert "seed " in told.out.splitlines()[0]
    assert "Traceback" in told.out
    assert "1 failed" in told.out
