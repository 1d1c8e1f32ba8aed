"""The conversations of `kvtier bench multiturn`: who asks what, and when. No torch, no clock; everything from a seed.

A conversation begins with a system prompt that all share and a history of its own, and goes on for some rounds. Each
asks a question and decodes an answer, which with the question becomes part of the next prompt. Tokens are random, but
lengths are those of real chats: they vary around the mean that was asked for as in the ShareGPT sample.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

LENGTHS = Path(__file__).parent / "data" / "sharegpt_lengths.csv"
MOST = 4.0
"""Times the mean that a length may have: one long answer must not make the whole run."""

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every user does."""

    rounds: int = 4
    system_tokens: int = 1000
    history_tokens: int = 4000
    question_tokens: int = 100
    """Mean."""
    answer_tokens: int = 100
    """Mean."""
    rate_per_user: float = 0.1
    """Questions a second of one user, who waits for an answer before the next; 0: asks at once."""
    real_lengths: bool = True
    """Lengths vary as in ShareGPT; False: all have the mean."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question."""

    gap_s: float
    """From the question before it, at least; a first one counts from the start."""
    question: Tokens
    """All that is new in the prompt; of a first turn with the history, but without the system prompt."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user will ask."""

    turns: tuple[Turn, ...]

    @property
    def most_tokens(self) -> int:
        """Of prompts and answers together, at the end, without the system prompt."""
        return sum(len(turn.question) + turn.answer_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Load:
    """Everything that one run will ask."""

    system: Tokens
    conversations: tuple[Conversation, ...]

    @property
    def most_tokens(self) -> int:
        """Of all conversations at their end: what would have to fit for nothing ever to be computed twice."""
        return len(self.system) + sum(it.most_tokens for it in self.conversations)


def draw(workload: Workload, users: int, vocabulary: int, seed: int, number: int) -> Load:
    """The load of one run; the same arguments give the same.

    Args:
        workload: what each user does.
        users: how many there are.
        vocabulary: tokens are below it, and not 0, which often means padding.
        seed: of everything.
        number: of the run: another one shares not even the system prompt, so that no run warms the next.
    """
    rng = np.random.default_rng([seed, number, users])

    def tokens(count: int) -> Tokens:
        return rng.integers(1, vocabulary, count, np.int64)

    system = tokens(workload.system_tokens)
    conversations: list[Conversation] = []
    for _ in range(users):
        turns: list[Turn] = []
        questions, answers = _lengths(workload, rng)
        for place in range(workload.rounds):
            mean_s = 1 / workload.rate_per_user if workload.rate_per_user else 0.0
            # First questions are spread over one interval, the later ones come by a Poisson process.
            gap_s = float(rng.exponential(mean_s) if place else rng.uniform(0.0, mean_s))
            history = workload.history_tokens if place == 0 else 0
            turns.append(Turn(gap_s, tokens(history + questions[place]), answers[place]))
        conversations.append(Conversation(tuple(turns)))
    return Load(system, tuple(conversations))


def _lengths(workload: Workload, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Tokens of the questions and of the answers of one conversation."""
    if not workload.real_lengths:
        return [workload.question_tokens] * workload.rounds, [workload.answer_tokens] * workload.rounds
    # Question and answer of one turn come from one line of the sample.
    lines = rng.integers(0, len(sharegpt()), workload.rounds)
    shares = sharegpt()[lines] / sharegpt().mean(axis=0)
    means = (workload.question_tokens, workload.answer_tokens)
    scaled = np.clip(np.rint(np.minimum(shares, MOST) * means), 1, None).astype(np.int64)
    questions: list[int] = scaled[:, 0].tolist()
    answers: list[int] = scaled[:, 1].tolist()
    return questions, answers


@cache
def sharegpt() -> npt.NDArray[np.float64]:
    """[lines, 2] tokens of a question and of its answer, in the ShareGPT sample."""
    with LENGTHS.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines))[1:]
    return np.asarray(rows, np.float64)
