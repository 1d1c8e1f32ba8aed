"""Samples and summaries of `bench/multiturn.py`. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

PERCENTILES = (50, 95, 99)
LIMITS_MS = (200.0, 500.0, 1000.0, 2000.0)
"""Times to first token for which `MultiturnResult.users_within_ms` gives the number of users."""
RECOMPUTE, HOST, DISK = ARMS = ("recompute", "host", "host+disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSample:
    """One question and its answer. Times are seconds since the run began."""

    user: int
    turn: int
    arrived_s: float
    started_s: float
    """When its prefill started."""
    first_s: float
    """When the first token of the answer was ready."""
    ended_s: float
    prompt_tokens: int
    resident_tokens: int
    """Prompt tokens whose KV was still on the device."""
    restored: dict[str, int]
    """Prompt tokens restored, by tier."""
    computed_tokens: int
    """The other prompt tokens."""
    answer_tokens: int
    load_s: float
    """Time in which the model waited for KV."""
    stored_chunks: int
    equal_tokens: int | None
    """Leading tokens of the answer equal to the first arm's; None in the first arm."""

    @property
    def ttft_s(self) -> float:
        """Time to first token, from the arrival on."""
        return self.first_s - self.arrived_s

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first one."""
        return (self.ended_s - self.first_s) / (self.answer_tokens - 1) if self.answer_tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One arm with one number of users, once."""

    arm: str
    users: int
    repeat: int
    working_set_tokens: int
    """All conversations at their end."""
    evictions: int
    """Conversations evicted from the device between two turns."""
    seconds: float
    joules: float | None
    energy_source: str
    turns: list[TurnSample]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """All runs of one arm with one number of users."""

    arm: str
    users: int
    turns: int
    ttft_ms: dict[str, float]
    """Percentiles over later turns; every arm computes the first turn of a conversation."""
    first_turn_ttft_ms: float
    """Median."""
    queue_ms: float
    """Time in the queue of later turns; median."""
    load_ms: float
    """Wait for KV of later turns; mean."""
    per_token_ms: dict[str, float]
    output_tokens_per_s: float
    requests_per_s: float
    prompt_tokens: int
    resident_tokens: int
    restored_tokens: dict[str, int]
    computed_tokens: int
    restored_bytes: dict[str, int]
    stored_bytes: int
    evictions: int
    working_set_tokens: int
    watts: float | None
    joules_per_output_token: float | None
    energy_source: str
    equal_first_tokens: tuple[int, int] | None
    """(equal to the first arm's, compared); None where nothing was compared."""
    equal_tokens: tuple[int, int] | None
    """The same for all tokens up to the first difference in each answer."""

    @property
    def is_same(self) -> bool:
        """Whether all answers equal the first arm's."""
        return self.equal_tokens is None or self.equal_tokens[0] == self.equal_tokens[1]


@dataclass(slots=True)
class MultiturnResult:
    """The result; it grows while the benchmark runs."""

    shape: str
    device: str
    bytes_per_token: int
    chunk_bytes: int
    budget_tokens: int
    """Tokens whose KV the device may hold."""
    runs: list[ArmRun] = field(default_factory=list[ArmRun])
    skipped: list[str] = field(default_factory=list[str])
    measured: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(users, repeat) of the workloads that all arms have run, or the device has no memory for."""

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take the workloads that all arms have run in `record`; a run without its counterparts is left out."""
        self.measured += [(users, repeat) for users, repeat in record["results"]["measured"]]
        self.skipped += record["results"]["skipped"]
        self.runs += [
            ArmRun(**it | {"turns": [TurnSample(**turn) for turn in it["turns"]]})
            for it in record["samples"]
            if (it["users"], it["repeat"]) in self.measured
        ]

    def summaries(self) -> list[ArmSummary]:
        """One for each number of users and arm."""
        keys = sorted({(run.users, ARMS.index(run.arm)) for run in self.runs})
        return [
            self._summary([run for run in self.runs if (run.users, run.arm) == (users, ARMS[arm])])
            for users, arm in keys
        ]

    def users_within_ms(self) -> dict[float, dict[str, float | None]]:
        """By limit and arm, the number of users whose median time to first token is within it."""
        points = {
            arm: [(it.users, it.ttft_ms["p50"]) for it in self.summaries() if it.arm == arm]
            for arm in dict.fromkeys(it.arm for it in self.summaries())
        }
        return {limit: {arm: users_within(points[arm], limit) for arm in points} for limit in LIMITS_MS}

    def _summary(self, runs: Sequence[ArmRun]) -> ArmSummary:
        turns = [turn for run in runs for turn in run.turns]
        later = [turn for turn in turns if turn.turn] or turns
        seconds = sum(run.seconds for run in runs)
        answered = sum(turn.answer_tokens for turn in turns)
        restored: dict[str, int] = {}
        for turn in turns:
            for place, tokens in turn.restored.items():
                restored[place] = restored.get(place, 0) + tokens
        joules = [run.joules for run in runs if run.joules is not None]
        is_measured = len(joules) == len(runs)
        compared = [(turn.equal_tokens, turn.answer_tokens) for turn in turns if turn.equal_tokens is not None]
        return ArmSummary(
            arm=runs[0].arm,
            users=runs[0].users,
            turns=len(turns),
            ttft_ms=percentiles_ms(turn.ttft_s for turn in later),
            first_turn_ttft_ms=percentiles_ms(turn.ttft_s for turn in turns if not turn.turn)["p50"],
            queue_ms=percentiles_ms(turn.started_s - turn.arrived_s for turn in later)["p50"],
            load_ms=1e3 * sum(turn.load_s for turn in later) / len(later),
            per_token_ms=percentiles_ms(turn.per_token_s for turn in turns if turn.per_token_s is not None),
            output_tokens_per_s=answered / seconds,
            requests_per_s=len(turns) / seconds,
            prompt_tokens=sum(turn.prompt_tokens for turn in turns),
            resident_tokens=sum(turn.resident_tokens for turn in turns),
            restored_tokens=restored,
            computed_tokens=sum(turn.computed_tokens for turn in turns),
            restored_bytes={place: tokens * self.bytes_per_token for place, tokens in restored.items()},
            stored_bytes=sum(turn.stored_chunks for turn in turns) * self.chunk_bytes,
            evictions=sum(run.evictions for run in runs),
            working_set_tokens=max(run.working_set_tokens for run in runs),
            watts=sum(joules) / seconds if is_measured else None,
            joules_per_output_token=sum(joules) / answered if is_measured else None,
            energy_source=runs[0].energy_source,
            equal_first_tokens=(sum(equal > 0 for equal, _ in compared), len(compared)) if compared else None,
            equal_tokens=(sum(equal for equal, _ in compared), sum(of for _, of in compared)) if compared else None,
        )


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float]:
    """``p50``, ``p95``, ``p99`` and ``mean`` in milliseconds; zeros where there is nothing."""
    found = np.asarray(list(seconds), np.float64)
    if not found.size:
        return dict.fromkeys([*(f"p{percent}" for percent in PERCENTILES), "mean"], 0.0)
    points = np.percentile(found, PERCENTILES)
    values = {f"p{percent}": 1e3 * float(value) for percent, value in zip(PERCENTILES, points, strict=True)}
    return {**values, "mean": 1e3 * float(found.mean())}


def users_within(points: Sequence[tuple[int, float]], limit_ms: float) -> float | None:
    """The number of users with at most `limit_ms`, interpolated; None if the fewest users exceed it.

    If no point exceeds the limit, the result is the most users that were measured: a lower bound.

    Args:
        points: (users, milliseconds), in ascending order.
        limit_ms: the limit.
    """
    if not points or points[0][1] > limit_ms:
        return None
    for (fewer, low), (more, high) in pairwise(points):
        if high > limit_ms:
            return fewer + (more - fewer) * (limit_ms - low) / (high - low)
    return float(points[-1][0])
