"""What a run of `kvtier bench multiturn` has measured, and what is said of it. No torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSample:
    """One question and its answer. Times are seconds since the run began."""

    user: int
    turn: int
    arrived_s: float
    started_s: float
    """When its prompt's turn came."""
    first_s: float
    """When the first token of the answer was there."""
    ended_s: float
    prompt_tokens: int
    resident_tokens: int
    """Of the prompt: KV was on the device still."""
    restored: dict[str, int]
    """Of the prompt: KV came from there."""
    computed_tokens: int
    """Of the prompt: the rest."""
    answer_tokens: int
    load_s: float
    """Seconds in which nothing could be computed because KV had not come."""
    stored_chunks: int
    equal_tokens: int | None
    """Leading tokens of the answer that are those of the arm that went first; None for that arm itself."""

    @property
    def ttft_s(self) -> float:
        """Time to first token, with the time it waited for its turn."""
        return self.first_s - self.arrived_s

    @property
    def per_token_s(self) -> float | None:
        """Time per output token after the first one."""
        return (self.ended_s - self.first_s) / (self.answer_tokens - 1) if self.answer_tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm with one number of users, once."""

    arm: str
    users: int
    repeat: int
    working_set_tokens: int
    """All conversations at their end."""
    evictions: int
    """Conversations whose KV had to leave the device between two turns."""
    seconds: float
    joules: float | None
    energy_source: str
    turns: list[TurnSample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All runs of one arm with one number of users."""

    arm: str
    users: int
    turns: int
    ttft_ms: dict[str, float]
    """Percentiles over all turns but the first of each conversation, which is computed in every arm."""
    first_turn_ttft_ms: float
    """Median."""
    queue_ms: float
    """Of the later turns' time to first token, waiting for their turn; median."""
    load_ms: float
    """Of it, waiting for KV; mean."""
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
    """(equal to those of the arm that went first, compared); None where nothing was compared."""
    equal_tokens: tuple[int, int] | None
    """Likewise of all tokens up to the first that differs, of each answer."""

    @property
    def is_same(self) -> bool:
        """Whether every token of every answer was that of the arm that went first."""
        return self.equal_tokens is None or self.equal_tokens[0] == self.equal_tokens[1]


@dataclass(slots=True)
class MultiturnResult:
    """All of a benchmark; it grows as it goes on."""

    shape: str
    device: str
    bytes_per_token: int
    chunk_bytes: int
    budget_tokens: int
    """Tokens whose KV the device may hold."""
    runs: list[Run] = field(default_factory=list[Run])
    skipped: list[str] = field(default_factory=list[str])

    def summaries(self) -> list[Summary]:
        """One for each number of users and arm, in the order in which they were run."""
        keys = dict.fromkeys((run.users, run.arm) for run in self.runs)
        return [
            self._summary([run for run in self.runs if (run.users, run.arm) == key]) for key in sorted(keys, key=_order)
        ]

    def _summary(self, runs: Sequence[Run]) -> Summary:
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
        return Summary(
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


def _order(key: tuple[int, str]) -> tuple[int, int]:
    return key[0], ("recompute", "host", "host+disk").index(key[1])


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float]:
    """``p50`` and so on with ``mean``, in milliseconds; NaN-free: zeros where there is nothing."""
    found = np.asarray(list(seconds), np.float64)
    if not found.size:
        return dict.fromkeys([*(f"p{percent}" for percent in PERCENTILES), "mean"], 0.0)
    told = np.percentile(found, PERCENTILES)
    values = {f"p{percent}": 1e3 * float(value) for percent, value in zip(PERCENTILES, told, strict=True)}
    return {**values, "mean": 1e3 * float(found.mean())}


def users_within(points: Sequence[tuple[int, float]], limit_ms: float) -> float | None:
    """How many users have at most `limit_ms`, by straight lines between points; None when even the fewest have more.

    Where all have less it is the most that were tried: at least so many.

    Args:
        points: (users, milliseconds), from the fewest users on.
        limit_ms: the limit.
    """
    if not points or points[0][1] > limit_ms:
        return None
    for (fewer, low), (more, high) in pairwise(points):
        if high > limit_ms:
            return fewer + (more - fewer) * (limit_ms - low) / (high - low)
    return float(points[-1][0])
