"""Makes the texts of conversations and of recorded traces from a seed, without a clock or a network.

Texts are words such as ``t7``. The benchmark's own model has a tokenizer with these words, so a word is a token and
lengths are exact. With any other tokenizer, lengths count words.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.tools.trace.arrays import TraceArrays

FIRST_WORD = 3
"""Number of the first word. Smaller numbers are special tokens."""
VOCABULARY = 1024
_WORDS = VOCABULARY - FIRST_WORD
LENGTH_MAX = 4.0
"""Largest drawn length, as a multiple of the mean. It keeps one long answer from dominating a run."""
WARM_UP_ROUNDS = 2
TEMPLATE_TOKENS = 64
"""Most tokens that a chat template may add to a prompt."""

Tokens = npt.NDArray[np.int64]


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value}; allowed: at least {least}")


class Pace(StrEnum):
    """The rule that decides when a request is sent."""

    USERS = "users"
    """Each user asks at a fixed interval, but not before the previous answer has ended (LMBenchmark)."""
    TIMES = "times"
    """Each request is sent at its recorded time, whether or not earlier ones have ended."""
    ONE_BY_ONE = "one by one"
    """Each request is sent as soon as the previous one has ended."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its new tokens, and the answer."""

    question: Tokens
    """The new tokens of the prompt. In a first turn they include the history, but not the system prompt."""
    answer_tokens: int
    at_s: float = 0.0
    """Time since the start, used with `Pace.TIMES` only."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All turns of one user. A prompt includes all earlier questions and answers of its conversation."""

    user: int
    """Number of the user, from 0. All requests of a recorded session share it, and so do both visits of a single-shot
    prompt."""
    turns: tuple[Turn, ...]
    first_turn: int = 0
    """Number of the turn `turns[0]`. A recorded request is a conversation of its own: its prompt is complete."""
    is_warm_up: bool = False
    """Whether the conversation is sent but not counted."""

    @property
    def tokens(self) -> int:
        """Tokens of all questions and answers, without the system prompt."""
        return sum(len(turn.question) + turn.answer_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSizes:
    """The conversations of many users, in LMBenchmark's terms."""

    users: int
    """Users that are active at the same time. A new user replaces each user who has asked all questions."""
    rounds: int
    system_tokens: int
    """Length of the system prompt, which all users share."""
    history_tokens: int
    """Length of the document in each user's first question."""
    question_tokens: int = 20
    answer_tokens: int
    requests_per_s: float
    """Rate of all users together. Each user asks every users / requests_per_s seconds."""
    sub_rounds: int = 0
    """Rounds of a sub-agent; 0 means no sub-agents. After the first `users`, every second conversation is that of a
    sub-agent. It starts with the first question of the preceding conversation, and adds a task."""

    def __post_init__(self) -> None:
        least = {"users": 1, "rounds": 2, "question_tokens": 1, "answer_tokens": 1}
        for name in ("system_tokens", "history_tokens", "sub_rounds", *least):
            _check(name, getattr(self, name), least.get(name, 0))
        if not 0 < self.requests_per_s < math.inf:
            raise ConfigError(f"requests_per_s = {self.requests_per_s}; allowed: above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleShotSizes:
    """Prompts of growing length. Each is visited twice: first it is computed, later its KV is fetched."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: int = 1
    between_tokens: int = 0
    """Tokens of other prompts between the two visits: more than fit into tiers that must not serve the second visit."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens or min(self.prompt_tokens) < 1:
            raise ConfigError(f"prompt_tokens = {self.prompt_tokens}; allowed: at least one length, each at least 1")
        _check("answer_tokens", self.answer_tokens, 1)
        _check("between_tokens", self.between_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published workload in two sizes: the published one, and one scaled down for a small model on two cores."""

    source: str
    original: ConversationSizes | SingleShotSizes
    here: ConversationSizes | SingleShotSizes


PRESETS = {
    "dell": Preset(
        source="Dell's storage benchmark with LMBenchmark: 80 users x 10 rounds, at 1 to 7 requests per second",
        original=ConversationSizes(
            users=80, rounds=10, system_tokens=1000, history_tokens=4000, answer_tokens=200, requests_per_s=4.0
        ),
        here=ConversationSizes(
            users=16, rounds=10, system_tokens=1000, history_tokens=4000, answer_tokens=20, requests_per_s=1.0
        ),
    ),
    "samsung": Preset(
        source="Samsung's PM1753 paper with LMBenchmark: 240 users, each every 20 seconds",
        original=ConversationSizes(
            users=240, rounds=15, system_tokens=1000, history_tokens=20000, answer_tokens=100, requests_per_s=12.0
        ),
        here=ConversationSizes(
            users=12, rounds=15, system_tokens=250, history_tokens=5000, answer_tokens=12, requests_per_s=0.6
        ),
    ),
    "agent": Preset(
        source="17 recorded sessions of Claude Code with 14 sub-agents (tests/golden/traces): means of the requests of "
        "a session and of an answer, medians of the first prompt, its growth and the pause",
        original=ConversationSizes(
            users=17,
            rounds=38,
            system_tokens=11500,
            history_tokens=6800,
            question_tokens=800,
            answer_tokens=456,
            requests_per_s=0.94,
            sub_rounds=12,
        ),
        here=ConversationSizes(
            users=6,
            rounds=16,
            system_tokens=600,
            history_tokens=400,
            question_tokens=90,
            answer_tokens=20,
            requests_per_s=1.0,
            sub_rounds=6,
        ),
    ),
    "single-shot": Preset(
        source="one prompt of growing length, computed and then fetched",
        original=SingleShotSizes(prompt_tokens=(1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)),
        here=SingleShotSizes(prompt_tokens=(128, 256, 512, 1024, 2048, 4096), between_tokens=65536),
    ),
}
"""Presets by name. `here` is only a starting point: the right sizes depend on the tiers and the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """The requests that the generator sends in one run."""

    pace: Pace
    system: Tokens
    """The system prompt of all conversations, which may be empty."""
    conversations: tuple[Conversation, ...]
    """Conversations in the order of their starts. Warm-up conversations come first."""
    users: int = 0
    """Number of active users. Like `requests_per_s`, it is used with `Pace.USERS` only."""
    requests_per_s: float = 0.0

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt with its answer, without those that a chat template adds."""
        return len(self.system) + max(it.tokens for it in self.conversations)

    def check_context(self, context_tokens: int, origin: str) -> None:
        """Refuse a workload that the model cannot hold.

        Raises:
            ConfigError: a prompt, its answer and room for a chat template exceed `context_tokens`.
        """
        allowed = context_tokens - TEMPLATE_TOKENS
        if self.context_tokens > allowed:
            raise ConfigError(
                f"a prompt with its answer has {self.context_tokens} tokens, but {origin} holds {context_tokens}, of "
                f"which a chat template may need {TEMPLATE_TOKENS}; allowed: at most {allowed} tokens. Multiply "
                f"lengths by at most {math.floor(1000 * allowed / self.context_tokens) / 1000:g}"
            )


def text_of(tokens: Tokens) -> str:
    """Return the text of `tokens`."""
    return " ".join(f"t{token}" for token in tokens.tolist())


def draw(
    sizes: ConversationSizes | SingleShotSizes,
    *,
    seed: int,
    number: int,
    seconds: float = 60.0,
    warm_up: int = 2,
    has_real_lengths: bool = False,
) -> ServeWorkload:
    """Draw the workload of one run. The same arguments give the same workload.

    Args:
        sizes: sizes of a preset, or others.
        seed: seed for everything that is drawn.
        number: number of the run. Runs with different numbers share no text, not even the system prompt, so no run
            warms the next.
        seconds: length of the run. It determines how many users are drawn.
        warm_up: number of conversations that are sent first and not counted.
        has_real_lengths: vary questions and answers around their means as in the ShareGPT sample.
    """
    for name, value in (("seed", seed), ("number", number), ("warm_up", warm_up)):
        _check(name, value, 0)
    rng = np.random.default_rng([seed, number])
    if isinstance(sizes, SingleShotSizes):
        return _single_shots(sizes, rng, warm_up)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds = {seconds}; allowed: above 0")
    system = _tokens(rng, sizes.system_tokens)
    # A new conversation replaces each one that ends. A few more are drawn, because the first ones are short.
    replaced = math.ceil(1.1 * seconds * sizes.requests_per_s / min(sizes.rounds, sizes.sub_rounds or sizes.rounds)) + 2
    conversations: list[Conversation] = []
    for user in range(warm_up + sizes.users + replaced):
        later = user - warm_up - sizes.users  # aiperf gives the first users fewer rounds than the mean
        is_sub = sizes.sub_rounds > 0 and later >= 0 and later % 2 == 0
        rounds = WARM_UP_ROUNDS if user < warm_up else sizes.sub_rounds if is_sub else sizes.rounds
        lengths, answers = _lengths(sizes, rounds, rng, has_real_lengths=has_real_lengths)
        lengths[0] += 0 if is_sub else sizes.history_tokens
        questions = [_tokens(rng, length) for length in lengths]
        if is_sub:
            questions[0] = np.concatenate([conversations[-1].turns[0].question, questions[0]])
        conversations.append(Conversation(user, tuple(map(Turn, questions, answers)), is_warm_up=user < warm_up))
    return ServeWorkload(
        pace=Pace.USERS,
        system=system,
        conversations=tuple(conversations),
        users=sizes.users,
        requests_per_s=sizes.requests_per_s,
    )


def recorded(
    trace: TraceArrays,
    *,
    seed: int,
    number: int,
    seconds: float,
    time_factor: float = 1.0,
    length_factor: float = 1.0,
    context_tokens: int | None = None,
    is_longer_skipped: bool = False,
    warm_up: int = 2,
) -> ServeWorkload:
    """Return a recorded trace's requests at their times. Texts are equal where blocks are equal, and differ elsewhere.

    Args:
        trace: a trace of any format. Without block ids all prompts differ.
        seed: seed of all words.
        number: number of the run. Runs with different numbers share no text.
        seconds: length of the run. Requests with a later scaled time are cut off.
        time_factor: replayed times are recorded times multiplied by this; 0.1 is ten times as fast.
        length_factor: factor for the lengths of blocks, prompts and answers, so that shared parts stay shared.
        context_tokens: the model's context, including `TEMPLATE_TOKENS` for a chat template; None means no limit.
        is_longer_skipped: leave out requests that exceed the context.
        warm_up: number of requests with other words that are sent first and not counted.

    Raises:
        ConfigError: a request exceeds `context_tokens`, no request is left, or scaled blocks are too short to differ.
    """
    for name, factor in (("time_factor", time_factor), ("length_factor", length_factor), ("seconds", seconds)):
        if not 0 < factor < math.inf:
            raise ConfigError(f"{name} = {factor}; allowed: above 0")
    times = (trace.time_s - trace.time_s[0]) * time_factor
    count = int(np.searchsorted(times, seconds, "left"))
    words = _BlockWords(trace, length_factor, seed, number)
    limit = math.inf if context_tokens is None else context_tokens - TEMPLATE_TOKENS
    conversations: list[Conversation] = []
    for request in range(count):
        answer = max(1, round(int(trace.output_tokens[request]) * length_factor))
        prompt = words.prompt(request)
        if len(prompt) + answer > limit:
            if not is_longer_skipped:
                raise _too_long(trace, request, count, length_factor, int(limit))
            continue
        session = int(trace.session[request])
        user, turn = (request, 0) if session < 0 else (session, int(trace.turn[request]))
        conversations.append(Conversation(user, (Turn(prompt, answer, float(times[request])),), turn))
    if not conversations:
        raise ConfigError(f"trace {trace.name}: all {count} requests of the first {seconds:g} s are too long")
    rng = np.random.default_rng([seed, number])
    size = max(1, round(sum(len(it.turns[0].question) for it in conversations) / len(conversations)))
    warming = (Conversation(user, (Turn(_tokens(rng, size), 1),), is_warm_up=True) for user in range(warm_up))
    return ServeWorkload(
        pace=Pace.TIMES,
        system=np.zeros(0, np.int64),
        conversations=(*warming, *conversations),
    )


@cache
def sharegpt_lengths() -> npt.NDArray[np.float64]:
    """Return the lengths in tokens of questions and answers in the ShareGPT sample, as an array [lines, 2]."""
    text = (files("kvtier.tools.bench.serve") / "data" / "sharegpt_lengths.csv").read_text(encoding="utf-8")
    return np.asarray(list(csv.reader(text.splitlines()))[1:], np.float64)


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(FIRST_WORD, VOCABULARY, count, np.int64)


def _lengths(
    sizes: ConversationSizes, rounds: int, rng: np.random.Generator, *, has_real_lengths: bool
) -> tuple[list[int], list[int]]:
    """Return the lengths in tokens of the questions and of the answers of one conversation."""
    if not has_real_lengths:
        return [sizes.question_tokens] * rounds, [sizes.answer_tokens] * rounds
    # The question and the answer of a turn come from the same line of the sample.
    lengths = sharegpt_lengths()
    shares = lengths[rng.integers(0, len(lengths), rounds)] / lengths.mean(axis=0)
    means = (sizes.question_tokens, sizes.answer_tokens)
    scaled = np.clip(np.rint(np.minimum(shares, LENGTH_MAX) * means), 1, None).astype(np.int64)
    return scaled[:, 0].tolist(), scaled[:, 1].tolist()


def _single_shots(sizes: SingleShotSizes, rng: np.random.Generator, warm_up: int) -> ServeWorkload:
    def shots(lengths: Iterator[int]) -> tuple[Turn, ...]:
        return tuple(Turn(_tokens(rng, length), sizes.answer_tokens) for length in lengths)

    longest = max(sizes.prompt_tokens)
    prompts = shots(iter(sizes.prompt_tokens))
    fillers = shots(iter([longest] * math.ceil(sizes.between_tokens / longest)))
    warming = shots(iter([longest] * warm_up))
    first = tuple(Conversation(user, (turn,)) for user, turn in enumerate(prompts))
    unnamed = len(prompts)
    others = tuple(Conversation(unnamed + place, (turn,), is_warm_up=True) for place, turn in enumerate(fillers))
    return ServeWorkload(
        pace=Pace.ONE_BY_ONE,
        system=np.zeros(0, np.int64),
        conversations=(
            *(Conversation(unnamed + len(fillers) + i, (turn,), is_warm_up=True) for i, turn in enumerate(warming)),
            *first,
            *others,
            *(replace(it, first_turn=1) for it in first),
        ),
    )


class _BlockWords:
    """The words of a trace's prompts.

    A block's text starts with the block's number in digits of the vocabulary, so different blocks have different texts.
    """

    def __init__(self, trace: TraceArrays, length_factor: float, seed: int, number: int) -> None:
        self._trace, self._factor, self._seeds = trace, length_factor, (seed, number)
        self._block_tokens = max(1, round(trace.block_tokens * length_factor)) if trace.has_blocks else 0
        self._digits, self._numbers = 1, _WORDS
        while self._numbers < trace.block_count:
            self._digits += 1
            self._numbers *= _WORDS
        if trace.has_blocks and self._block_tokens < self._digits:
            raise ConfigError(
                f"trace {trace.name}: blocks of {trace.block_tokens} tokens x {length_factor:g} shrink to "
                f"{self._block_tokens}; use a factor that leaves at least {self._digits} tokens, so that blocks differ"
            )
        self._offset = int(np.random.default_rng(self._seeds).integers(self._numbers))

    def prompt(self, request: int) -> Tokens:
        """Return the words of the scaled prompt of `request`. It has at least one word."""
        trace = self._trace
        ids = trace.blocks(request)
        recorded_tokens = int(trace.input_tokens[request])
        whole, rest = divmod(recorded_tokens, trace.block_tokens) if trace.has_blocks else (0, recorded_tokens)
        wanted = max(1, whole * self._block_tokens + round(rest * self._factor))
        parts = [self._block(block) for block in ids.tolist()]
        missing = wanted - len(parts) * self._block_tokens
        if missing > 0:  # tokens without a block id belong to this request alone
            rng = np.random.default_rng([*self._seeds, 1, request])
            parts.append(_tokens(rng, missing))
        return np.concatenate(parts)[:wanted]

    def _block(self, block: int) -> Tokens:
        number, digits = (block + self._offset) % self._numbers, list[int]()
        for _ in range(self._digits):
            number, digit = divmod(number, _WORDS)
            digits.append(digit + FIRST_WORD)
        filling = _tokens(np.random.default_rng([*self._seeds, 0, block]), self._block_tokens - self._digits)
        return np.concatenate([np.asarray(digits, np.int64), filling])


def _too_long(trace: TraceArrays, request: int, count: int, length_factor: float, limit: int) -> ConfigError:
    longest = int((trace.input_tokens[:count].astype(np.int64) + trace.output_tokens[:count]).max())
    factor = (limit - 2) / longest  # prompt and answer may be rounded up
    if trace.has_blocks:  # and so may blocks
        factor = math.floor(factor * trace.block_tokens) / trace.block_tokens
    return ConfigError(
        f"trace {trace.name}, request {request + 1}: its prompt and answer x {length_factor:g} exceed the model's "
        f"context, of which {limit} tokens are usable; the longest in the trace has {longest} tokens. Multiply lengths "
        f"by at most {math.floor(10000 * factor) / 10000:g}, replay less of the trace, or skip longer requests"
    )
