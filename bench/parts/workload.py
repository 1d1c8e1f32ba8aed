"""The conversations of `bench/multiturn.py`, drawn from a seed. No torch, no clock.

A conversation begins with a system prompt that all users share and a history of its own. Each turn adds a question and
a decoded answer, and both become part of the next prompt. Tokens are random. Lengths vary around the requested mean as
in the ShareGPT sample.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tools.bench.serve.workload import LENGTH_MAX, sharegpt_lengths

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What every user does."""

    rounds: int
    system_tokens: int
    history_tokens: int
    question_tokens: int
    """Mean."""
    answer_tokens: int
    """Mean."""
    rate_per_user: float
    """Questions per second of one user, who waits for each answer; 0: no pause."""
    real_lengths: bool
    """Lengths vary as in ShareGPT; False: all have the mean."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question."""

    gap_s: float
    """Minimum time since the previous question; of a first turn, since the start."""
    question: Tokens
    """The new tokens of the prompt; of a first turn with the history, without the system prompt."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """All turns of one user."""

    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """Prompts and answers together at the end, without the system prompt."""
        return sum(len(turn.question) + turn.answer_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Workload:
    """All conversations of one run."""

    system: Tokens
    conversations: tuple[Conversation, ...]

    @property
    def tokens(self) -> int:
        """The working set: all conversations at their end."""
        return len(self.system) + sum(it.tokens for it in self.conversations)


def draw(spec: WorkloadSpec, users: int, vocabulary: int, seed: int, number: int) -> Workload:
    """The workload of one run; the same arguments give the same workload.

    Args:
        spec: what each user does.
        users: number of users.
        vocabulary: tokens are below it, and not 0, which often means padding.
        seed: of everything.
        number: of the run; runs share no tokens, not even the system prompt, so none warms the next.
    """
    rng = np.random.default_rng([seed, number, users])

    def tokens(count: int) -> Tokens:
        return rng.integers(1, vocabulary, count, np.int64)

    system = tokens(spec.system_tokens)
    conversations: list[Conversation] = []
    for _ in range(users):
        turns: list[Turn] = []
        questions, answers = _lengths(spec, rng)
        for place in range(spec.rounds):
            mean_s = 1 / spec.rate_per_user if spec.rate_per_user else 0.0
            # First questions are spread over one interval, later ones form a Poisson process.
            gap_s = float(rng.exponential(mean_s) if place else rng.uniform(0.0, mean_s))
            history = spec.history_tokens if place == 0 else 0
            turns.append(Turn(gap_s, tokens(history + questions[place]), answers[place]))
        conversations.append(Conversation(tuple(turns)))
    return Workload(system, tuple(conversations))


def _lengths(spec: WorkloadSpec, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Tokens of the questions and of the answers of one conversation."""
    if not spec.real_lengths:
        return [spec.question_tokens] * spec.rounds, [spec.answer_tokens] * spec.rounds
    # Question and answer of one turn come from one line of the sample.
    lengths = sharegpt_lengths()
    lines = rng.integers(0, len(lengths), spec.rounds)
    shares = lengths[lines] / lengths.mean(axis=0)
    means = (spec.question_tokens, spec.answer_tokens)
    scaled = np.clip(np.rint(np.minimum(shares, LENGTH_MAX) * means), 1, None).astype(np.int64)
    return scaled[:, 0].tolist(), scaled[:, 1].tolist()
