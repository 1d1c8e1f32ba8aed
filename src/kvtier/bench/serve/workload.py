"""Conversations and recorded traces as texts of words, drawn from a seed. No clock, no network.

Texts are words such as ``t7``. With a tokenizer that has these words (`kvtier.bench.serve`'s own model) one word is
one token, so the lengths here are exact; with another tokenizer they are words.
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
from kvtier.trace.arrays import TraceArrays

FIRST_WORD = 3
"""Smaller numbers are special tokens."""
VOCABULARY = 1024
_WORDS = VOCABULARY - FIRST_WORD
LENGTH_MAX = 4.0
"""The longest length that is drawn, in means: one long answer must not dominate a run."""
WARM_UP_ROUNDS = 2
TEMPLATE_TOKENS = 64
"""Tokens that a chat template may add to a prompt."""

Tokens = npt.NDArray[np.int64]


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value}; allowed: from {least} on")


class Pace(StrEnum):
    """What decides when a request is sent."""

    USERS = "users"
    """Each user asks at a fixed interval, not before the last answer has ended (LMBenchmark)."""
    TIMES = "times"
    """Each request at its recorded time, whether or not earlier ones have ended."""
    ONE_BY_ONE = "one by one"
    """Each request as soon as the one before has ended."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what it adds to the conversation, and the answer."""

    question: Tokens
    """The new tokens of the prompt; of a first turn with the history, without the system prompt."""
    answer_tokens: int
    at_s: float = 0.0
    """Time since the start; with `Pace.TIMES` alone."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All turns of one user. A prompt holds all earlier questions and answers of its conversation."""

    user: int
    """Not negative. Conversations of a recorded session, and visits of a single-shot prompt, have the same."""
    turns: tuple[Turn, ...]
    first_turn: int = 0
    """Number of `turns[0]`: a recorded request is a conversation by itself, because its prompt is whole."""
    is_warm_up: bool = False
    """Sent, and not counted."""

    @property
    def tokens(self) -> int:
        """Questions and answers together at the end, without the system prompt."""
        return sum(len(turn.question) + turn.answer_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSizes:
    """LMBenchmark's words for conversations of many users."""

    users: int
    """That talk at a time. One that has asked its last question is replaced by a new one."""
    rounds: int
    system_tokens: int
    """The system prompt, which all users share."""
    history_tokens: int
    """A document that each user's first question brings along."""
    question_tokens: int = 20
    answer_tokens: int
    requests_per_s: float
    """Of all users together: each asks every users / requests_per_s seconds."""
    sub_rounds: int = 0
    """Rounds of a sub-agent; 0: none. Every second conversation after the first `users` is one. It begins with the
    first question of the conversation before it, and a task of its own."""

    def __post_init__(self) -> None:
        for name in ("system_tokens", "history_tokens", "sub_rounds"):
            _check(name, getattr(self, name), 0)
        for name, least in (("users", 1), ("rounds", 2)):
            _check(name, getattr(self, name), least)
        for name in ("question_tokens", "answer_tokens"):
            _check(name, getattr(self, name), 1)
        if not 0 < self.requests_per_s < math.inf:
            raise ConfigError(f"requests_per_s = {self.requests_per_s}; allowed: above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleShotSizes:
    """Prompts of growing length, each computed first and fetched later."""

    prompt_tokens: tuple[int, ...]
    answer_tokens: int = 1
    between_tokens: int = 0
    """Other prompts between both visits, in tokens: more than the tiers hold that must not serve the second one."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens or min(self.prompt_tokens) < 1:
            raise ConfigError(f"prompt_tokens = {self.prompt_tokens}; allowed: one length or more, each from 1 on")
        _check("answer_tokens", self.answer_tokens, 1)
        _check("between_tokens", self.between_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published workload, and the same scaled to the small model on two cores."""

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
"""By name. `here` is a start: sizes of a tier and of a device belong to it, which the server's side knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """What the generator sends in one run."""

    pace: Pace
    system: Tokens
    """The system prompt of all conversations; may be empty."""
    conversations: tuple[Conversation, ...]
    """In the order in which they begin. Those for warming up are first."""
    users: int = 0
    """With `Pace.USERS`, as is `requests_per_s`."""
    requests_per_s: float = 0.0

    @property
    def context_tokens(self) -> int:
        """The longest prompt with its answer, without what a chat template adds."""
        return len(self.system) + max(it.tokens for it in self.conversations)

    def check_context(self, context_tokens: int, origin: str) -> None:
        """Refuse a workload that the model cannot hold.

        Raises:
            ConfigError: a prompt with its answer, and room for a chat template, exceeds `context_tokens`.
        """
        allowed = context_tokens - TEMPLATE_TOKENS
        if self.context_tokens > allowed:
            raise ConfigError(
                f"a prompt with its answer has {self.context_tokens} tokens, and {origin} holds {context_tokens}, of "
                f"which a chat template may need {TEMPLATE_TOKENS}; allowed: at most {allowed} tokens. Scale lengths "
                f"by {math.floor(1000 * allowed / self.context_tokens) / 1000:g} or less"
            )


def text_of(tokens: Tokens) -> str:
    """The words of `tokens`."""
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
    """The workload of one run; the same arguments give the same workload.

    Args:
        sizes: a preset's, or others.
        seed: of everything.
        number: of the run; runs with other numbers share no text, not even the system prompt, so none warms the next.
        seconds: length of the run, for which there are enough users.
        warm_up: conversations that are sent first and not counted.
        has_real_lengths: questions and answers vary around their means as in the ShareGPT sample.
    """
    for name, value in (("seed", seed), ("number", number), ("warm_up", warm_up)):
        _check(name, value, 0)
    rng = np.random.default_rng([seed, number])
    if isinstance(sizes, SingleShotSizes):
        return _single_shots(sizes, rng, warm_up)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"seconds = {seconds}; allowed: above 0")
    system = _tokens(rng, sizes.system_tokens)
    # Each conversation that ends is replaced; some more, because the first ones are short.
    replaced = math.ceil(1.1 * seconds * sizes.requests_per_s / min(sizes.rounds, sizes.sub_rounds or sizes.rounds)) + 2
    conversations: list[Conversation] = []
    for user in range(warm_up + sizes.users + replaced):
        later = user - warm_up - sizes.users  # aiperf gives the first ones a number of rounds below the mean
        is_sub = sizes.sub_rounds > 0 and later >= 0 and later % 2 == 0
        rounds = WARM_UP_ROUNDS if user < warm_up else sizes.sub_rounds if is_sub else sizes.rounds
        lengths, answers = _lengths(sizes, rounds, rng, has_real_lengths=has_real_lengths)
        lengths[0] += 0 if is_sub else sizes.history_tokens
        questions = [_tokens(rng, length) for length in lengths]
        if is_sub:
            questions[0] = np.concatenate([conversations[-1].turns[0].question, questions[0]])
        turns = tuple(map(Turn, questions, answers))
        conversations.append(Conversation(user, turns, is_warm_up=user < warm_up))
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
    """Requests of a recorded trace at their times. Equal blocks are equal text, and different ones differ.

    Args:
        trace: of any format; without block ids all prompts differ.
        seed: of all words.
        number: of the run; runs with other numbers share no text.
        seconds: requests that are recorded later, after scaling, are cut off.
        time_factor: replayed times are recorded times multiplied by this; 0.1 is ten times as fast.
        length_factor: of blocks, prompts and answers alike, so that equal shares stay equal shares.
        context_tokens: what the model holds, of which `TEMPLATE_TOKENS` are for a chat template; None: no limit.
        is_longer_skipped: leave out requests that exceed it.
        warm_up: requests of other words that are sent first and not counted.

    Raises:
        ConfigError: a request exceeds `context_tokens`, none is left, or scaled blocks are too short to differ.
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
    """[lines, 2] tokens of a question and of its answer, in the ShareGPT sample."""
    text = (files("kvtier.bench.serve") / "data" / "sharegpt_lengths.csv").read_text(encoding="utf-8")
    return np.asarray(list(csv.reader(text.splitlines()))[1:], np.float64)


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(FIRST_WORD, VOCABULARY, count, np.int64)


def _lengths(
    sizes: ConversationSizes, rounds: int, rng: np.random.Generator, *, has_real_lengths: bool
) -> tuple[list[int], list[int]]:
    """Tokens of the questions and of the answers of one conversation."""
    if not has_real_lengths:
        return [sizes.question_tokens] * rounds, [sizes.answer_tokens] * rounds
    # Question and answer of one turn come from one line of the sample.
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

    A block begins with its number in digits of the vocabulary, so different blocks are different texts.
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
                f"trace {trace.name}: blocks of {trace.block_tokens} tokens x {length_factor:g} are "
                f"{self._block_tokens}; allowed: a factor that leaves {self._digits} or more, so that blocks differ"
            )
        rng = np.random.default_rng(self._seeds)
        self._offset = int(rng.integers(self._numbers))

    def prompt(self, request: int) -> Tokens:
        """The words of the prompt of `request`, scaled; at least one."""
        trace = self._trace
        ids = trace.blocks(request)
        recorded_tokens = int(trace.input_tokens[request])
        whole, rest = divmod(recorded_tokens, trace.block_tokens) if trace.has_blocks else (0, recorded_tokens)
        wanted = max(1, whole * self._block_tokens + round(rest * self._factor))
        parts = [self._block(block) for block in ids.tolist()]
        missing = wanted - len(parts) * self._block_tokens
        if missing > 0:  # what no id names is of this request alone
            rng = np.random.default_rng([*self._seeds, 1, request])
            parts.append(_tokens(rng, missing))
        return np.concatenate(parts)[:wanted]

    def _block(self, block: int) -> Tokens:
        number, digits = (block + self._offset) % self._numbers, list[int]()
        for _ in range(self._digits):
            number, digit = divmod(number, _WORDS)
            digits.append(digit + FIRST_WORD)
        rng = np.random.default_rng([*self._seeds, 0, block])
        filling = _tokens(rng, self._block_tokens - self._digits)
        return np.concatenate([np.asarray(digits, np.int64), filling])


def _too_long(trace: TraceArrays, request: int, count: int, length_factor: float, limit: int) -> ConfigError:
    longest = int((trace.input_tokens[:count].astype(np.int64) + trace.output_tokens[:count]).max())
    factor = (limit - 2) / longest  # prompt and answer are rounded
    if trace.has_blocks:  # and so are blocks
        factor = math.floor(factor * trace.block_tokens) / trace.block_tokens
    return ConfigError(
        f"trace {trace.name}, request {request + 1}: its prompt and answer x {length_factor:g} exceed the model's "
        f"context, of which {limit} tokens are usable; the longest has {longest} in the trace. Allowed: lengths x "
        f"{math.floor(10000 * factor) / 10000:g} or less, a shorter cut of the trace, or longer requests left out"
    )
