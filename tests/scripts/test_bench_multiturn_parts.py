"""The parts of `bench/multiturn.py` that need no engine: workload, summaries, power meter."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench.parts.power import PowerMeter, find_sensor
from bench.parts.turns import ArmRun, MultiturnResult, TurnSample, percentiles_ms, users_within
from bench.parts.workload import WorkloadSpec, draw

from kvtier.tools.bench.serve.sampler import Nvml
from kvtier.tools.bench.serve.workload import LENGTH_MAX, sharegpt_lengths

WORK = WorkloadSpec(
    rounds=5, system_tokens=10, history_tokens=50, question_tokens=20, answer_tokens=30, rate_per_user=0.5,
    real_lengths=True,
)  # fmt: skip


def test_the_same_seed_gives_the_same_load_and_another_run_shares_nothing() -> None:
    first, again, other = (draw(WORK, 3, 500, 1, number) for number in (0, 0, 1))
    assert (first.system == again.system).all()
    for one, two in zip(first.conversations, again.conversations, strict=True):
        assert [turn.gap_s for turn in one.turns] == [turn.gap_s for turn in two.turns]
        assert all((a.question == b.question).all() for a, b in zip(one.turns, two.turns, strict=True))
    assert not (first.system == other.system).all()
    assert (first.conversations[0].turns[0].question != first.conversations[1].turns[0].question[:1]).any()


def test_lengths_and_gaps_have_the_means_that_were_asked_for() -> None:
    load = draw(WORK, 400, 500, 1, 0)
    later = [turn for it in load.conversations for turn in it.turns[1:]]
    questions, answers = [len(turn.question) for turn in later], [turn.answer_tokens for turn in later]
    assert np.mean(questions) == pytest.approx(20, rel=0.1)
    assert np.mean(answers) == pytest.approx(30, rel=0.1)
    assert len(set(questions)) > 10, "they vary"
    assert max(questions) <= LENGTH_MAX * 20
    assert min(questions) >= 1
    assert np.mean([turn.gap_s for turn in later]) == pytest.approx(2.0, rel=0.1)
    assert all(0 <= it.turns[0].gap_s <= 2 and len(it.turns[0].question) > 50 for it in load.conversations)
    tokens = np.concatenate([load.system, *(turn.question for turn in later)])
    assert tokens.min() >= 1
    assert tokens.max() < 500
    same = draw(replace(WORK, real_lengths=False, rate_per_user=0.0), 2, 500, 1, 0)
    assert {(len(turn.question), turn.answer_tokens, turn.gap_s) for turn in same.conversations[0].turns[1:]} == {
        (20, 30, 0.0)
    }
    assert same.tokens == 10 + 2 * (50 + 5 * 50)


def test_the_sample_of_lengths_is_the_one_that_is_named() -> None:
    assert sharegpt_lengths().shape == (300, 2)
    assert sharegpt_lengths().mean(axis=0) == pytest.approx([857.463, 652.51], abs=0.01)


def _turn(user: int, turn: int, ttft_s: float, equal: int | None) -> TurnSample:
    return TurnSample(
        user=user, turn=turn, arrived_s=1.0, started_s=1.5, first_s=1.0 + ttft_s, ended_s=1.0 + ttft_s + 0.4,
        prompt_tokens=100, resident_tokens=40, restored={"host": 20, "directory": 10}, computed_tokens=30,
        answer_tokens=5, load_s=0.25, stored_chunks=2, equal_tokens=equal,
    )  # fmt: skip


def _run(arm: str, turns: list[TurnSample], joules: float | None = None) -> ArmRun:
    return ArmRun(
        arm=arm, users=2, repeat=0, working_set_tokens=400, evictions=1, seconds=2.0, joules=joules,
        energy_source="a sensor", turns=turns,
    )  # fmt: skip


def test_a_summary_adds_up_and_leaves_first_turns_apart() -> None:
    result = MultiturnResult("tiny", "cpu", 10, 160, 200)
    result.runs += [
        _run("host", [_turn(0, 0, 9.0, 5), _turn(0, 1, 2.0, 5)], joules=30.0),
        _run("host", [_turn(1, 0, 7.0, 5), _turn(1, 1, 4.0, 0)], joules=10.0),
        _run("recompute", [_turn(0, 0, 9.0, None)]),
    ]
    plain, host = result.summaries()
    assert (plain.arm, host.arm) == ("recompute", "host")
    assert host.ttft_ms["p50"] == pytest.approx(3000)
    assert host.first_turn_ttft_ms == pytest.approx(8000)
    assert host.queue_ms == pytest.approx(500)
    assert host.per_token_ms["p50"] == pytest.approx(100)
    assert host.output_tokens_per_s == 20 / 4
    assert host.requests_per_s == 1.0
    assert host.restored_bytes == {"host": 800, "directory": 400}
    assert host.stored_bytes == 8 * 160
    assert (host.watts, host.joules_per_output_token) == (10.0, 2.0)
    assert host.equal_first_tokens == (3, 4)
    assert host.equal_tokens == (15, 20)
    assert not host.is_same
    assert plain.is_same
    assert (plain.watts, plain.joules_per_output_token, plain.equal_tokens) == (None, None, None)


def test_a_missing_sensor_in_one_run_leaves_the_figure_out() -> None:
    result = MultiturnResult("tiny", "cpu", 10, 160, 200)
    result.runs += [_run("host", [_turn(0, 0, 1.0, 5)], 30.0), _run("host", [_turn(0, 0, 1.0, 5)], None)]
    assert result.summaries()[0].watts is None


def test_users_within_a_limit_lie_on_straight_lines() -> None:
    points = [(2, 100.0), (4, 300.0), (8, 1100.0)]
    assert users_within(points, 200.0) == 3.0
    assert users_within(points, 700.0) == 6.0
    assert users_within(points, 2000.0) == 8.0
    assert users_within(points, 50.0) is None
    assert users_within([], 50.0) is None
    assert percentiles_ms([]) == {"p50": 0.0, "p95": 0.0, "p99": 0.0, "mean": 0.0}


class FakeNvml:
    """The few calls of NVML that are used."""

    class NVMLError(Exception):
        pass

    def __init__(self, has_counter: bool = True, has_power: bool = True) -> None:
        self.millijoules = 1000
        self._has_counter, self._has_power = has_counter, has_power

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802 - its name
        assert handle == "GPU-1"
        if not self._has_counter:
            raise self.NVMLError
        return self.millijoules

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        if not self._has_power:
            raise self.NVMLError
        return 250_000


def test_the_energy_counter_is_read_at_both_ends() -> None:
    nvml = FakeNvml()
    with PowerMeter(Nvml("GPU-1", nvml), "NVML") as meter:
        nvml.millijoules += 5000
    assert meter.joules == 5.0
    assert meter.source == "NVML, energy counter"


def test_without_a_counter_the_power_is_sampled() -> None:
    with PowerMeter(Nvml("GPU-1", FakeNvml(has_counter=False)), "NVML") as meter:
        assert meter.sampled.wait(60)
    assert meter.joules > 0
    assert "samples of the power" in meter.source


@pytest.mark.parametrize(
    "sensor", [find_sensor("cpu"), (Nvml("GPU-1", FakeNvml(has_counter=False, has_power=False)), "NVML")]
)
def test_without_a_sensor_there_is_no_figure(sensor: Any) -> None:
    with PowerMeter(*sensor) as meter:
        pass
    assert (meter.joules, meter.source) == (None, sensor[1])
