"""Draws the workload of a run of `kvtier bench serve`, and drives the generator that sends it to the server."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.bench.serve import generator
from kvtier.tools.bench.serve.generator import GeneratorResult, GeneratorSettings, served_model
from kvtier.tools.bench.serve.server import ServerError, VllmPython, python_output, session_pids
from kvtier.tools.bench.serve.workload import (
    FIRST_WORD,
    TEMPLATE_TOKENS,
    VOCABULARY,
    ConversationSizes,
    ServeWorkload,
    SingleShotSizes,
    draw,
    recorded,
    text_of,
)
from kvtier.tools.trace.arrays import TraceArrays

CONTEXT_STEP = 1024
_COUNT_S = 300.0
_COUNT_TOKENS = """
import sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
print(len(tokenizer(sys.argv[2]).input_ids))
"""
ROUND_TOKENS = 8
"""Most tokens that a chat template may add to a question and its answer, such as words for the two roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The settings of the workload of all runs, and of the generator."""

    sizes: ConversationSizes | SingleShotSizes | None
    """Sizes of the conversations; None if a trace is replayed."""
    trace: str = ""
    """Name of the trace, for the record."""
    seconds: float
    """Length of the measured part."""
    seed: int
    warm_up: int
    has_real_lengths: bool = False
    time_factor: float = 1.0
    length_factor: float = 1.0
    is_longer_skipped: bool = False
    context_tokens: int
    """The model's longest context, in tokens."""
    generator: str
    cores: str
    """Cores on which the generator runs, such as ``0,1``. Empty means all."""


@dataclass(slots=True, kw_only=True)
class GeneratedLoad:
    """Generates the load of each run and sends it to the server.

    All arms of a repetition get the same workload, and each repetition gets a different one.

    Raises:
        ConfigError: the workload is longer than the model's context.
    """

    settings: LoadSettings
    recording: TraceArrays | None = None
    tokens_per_word: float = 1.0
    """Mean tokens per word of the workload in the model's tokenizer, from the function `tokens_per_word`."""
    _pid: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        per_word = self.tokens_per_word
        origin = "the model" if per_word == 1 else f"the model, with {per_word:.2f} tokens a word,"
        self.workload(0, None).check_context(self._context_words, origin)

    @property
    def prompt_tokens(self) -> int:
        """Mean length of the counted prompts in the model's tokens. A prompt includes all earlier turns."""
        drawn = self.workload(0, None)
        lengths: list[int] = []
        for talk in drawn.conversations:
            so_far = len(drawn.system)
            for turn in talk.turns:
                so_far += len(turn.question)
                if not talk.is_warm_up:
                    lengths.append(so_far)
                so_far += turn.answer_tokens
        return round(sum(lengths) / len(lengths) * self.tokens_per_word)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt with answer and chat template, rounded up, but at most the model's context."""
        drawn = self.workload(0, None)
        rounds = max(len(it.turns) for it in drawn.conversations)
        words = drawn.context_tokens + max(TEMPLATE_TOKENS, ROUND_TOKENS * rounds)
        needed = math.ceil(words * self.tokens_per_word)
        if self.settings.has_real_lengths:
            needed += needed // 2
        return min(-(-needed // CONTEXT_STEP) * CONTEXT_STEP, self.settings.context_tokens)

    def workload(self, repetition: int, requests_per_s: float | None) -> ServeWorkload:
        """Return the workload of a run."""
        it = self.settings
        if it.sizes is None:
            assert self.recording is not None
            return recorded(
                self.recording,
                seed=it.seed,
                number=repetition,
                seconds=it.seconds,
                time_factor=it.time_factor,
                length_factor=it.length_factor,
                context_tokens=self._context_words,
                is_longer_skipped=it.is_longer_skipped,
                warm_up=it.warm_up,
            )
        sizes = it.sizes
        if requests_per_s is not None:
            if isinstance(sizes, SingleShotSizes):
                raise ConfigError(f"--rate {requests_per_s:g}: single shots are sent one by one; leave out --rate")
            sizes = replace(sizes, requests_per_s=requests_per_s)
        return draw(
            sizes,
            seed=it.seed,
            number=repetition,
            seconds=it.seconds,
            warm_up=it.warm_up,
            has_real_lengths=it.has_real_lengths,
        )

    def drive(
        self, url: str, directory: Path, *, repetition: int, requests_per_s: float | None, is_over: Callable[[], str]
    ) -> GeneratorResult:
        """Send the warm-up and the measured requests within a deadline, and write ``requests.jsonl`` in `directory`.

        Raises:
            KvError: nothing can be sent to the server.
        """
        settings = GeneratorSettings(
            url=url,
            model=served_model(url)[0],
            command=self.settings.generator,
            cores=tuple(map(int, filter(None, self.settings.cores.split(",")))),
            seconds=self.settings.seconds,
        )
        workload = self.workload(repetition, requests_per_s)
        return generator.run(workload, settings, directory, started=self._started, is_over=is_over)

    @property
    def _context_words(self) -> int:
        return int(self.settings.context_tokens / self.tokens_per_word)

    def pids(self) -> Sequence[int]:
        """Return the generator's current processes."""
        return session_pids(self._pid) if self._pid else ()

    def _started(self, pid: int) -> None:
        self._pid = pid


def tokens_per_word(python: VllmPython, model: Path) -> float:
    """Return the mean number of tokens that a checkpoint's tokenizer makes from a word of the workload.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    words = np.arange(FIRST_WORD, VOCABULARY)
    arguments = ("-c", _COUNT_TOKENS, str(model.absolute()), text_of(words))
    try:
        # Do not count a special token (BOS) that the tokenizer may prepend.
        return max(1.0, (int(python_output(python.python, *arguments, limit_s=_COUNT_S).split()[-1]) - 1) / len(words))
    except (ServerError, ValueError, IndexError) as error:
        raise ConfigError(
            f"--model {model}: its tokenizer cannot be read: {error}; allowed: one that Transformers reads"
        ) from error
