"""Sessions by statistics: conversations that grow turn by turn, many of them behind a prompt that others have, too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.synthesis import Run, Session, Step

_BATCH = 1024
"""Sessions that are drawn at a time. Part of what a seed means."""
_TURNS_MAX = 10_000
_TOKENS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of sessions. Lengths and pauses are drawn from log-normal distributions with these means."""

    requests_per_s: float = 2.0
    """Sessions begin at random, at so many requests a second on average."""
    turns: float = 4.0
    """Requests of a session, geometrically distributed."""
    first_tokens: float = 1500.0
    """Of the first prompt, behind what it shares."""
    turn_tokens: float = 600.0
    """By which the prompt grows from turn to turn: the answer and the next question."""
    output_tokens: float = 300.0
    think_s: float = 60.0
    """From one request to the next of its session."""
    spread: float = 1.0
    """Standard deviation of the logarithm of lengths and pauses."""
    shared_prompts: int = 16
    """Prompts that sessions begin with."""
    shared_tokens: int = 1024
    """Of each, in whole blocks."""
    shared_share: float = 0.8
    """Of sessions that begin with one of them."""
    popularity: float = 1.0
    """The n-th shared prompt is used in proportion to n to the power of minus this."""
    block_tokens: int = 512

    def __post_init__(self) -> None:
        limits = {
            "requests_per_s": (1e-6, 1e6),
            "turns": (1.0, 1000.0),
            "first_tokens": (1.0, 1e7),
            "turn_tokens": (1.0, 1e7),
            "output_tokens": (1.0, 1e7),
            "think_s": (1e-3, 1e7),
            "spread": (0.0, 4.0),
            "shared_prompts": (1, 1 << 20),
            "shared_tokens": (0, 1 << 24),
            "shared_share": (0.0, 1.0),
            "popularity": (0.0, 10.0),
            "block_tokens": (1, 1 << 20),
        }
        for field in fields(self):
            least, most = limits[field.name]
            value = getattr(self, field.name)
            if not least <= value <= most:
                raise ConfigError(f"--{option_of(field.name)} {value:g}; allowed: {least:g} to {most:g}")


def option_of(name: str) -> str:
    """What the command line calls a statistic."""
    return "block" if name == "block_tokens" else name.replace("_", "-")


class Stated:
    """A `Source` of such sessions.

    Args:
        statistics: of them.
        seed: of all draws.
    """

    def __init__(self, statistics: Statistics, seed: int) -> None:
        self._told = statistics
        self._seed = seed
        self.block_tokens = statistics.block_tokens
        self._prompt_blocks = statistics.shared_tokens // statistics.block_tokens
        self.shared_blocks = self._prompt_blocks * statistics.shared_prompts

    def sessions(self) -> Iterator[tuple[float, Session]]:
        """See `Source`."""
        told, draw = self._told, np.random.default_rng(self._seed)
        weights = np.arange(1, told.shared_prompts + 1, dtype=np.float64) ** -told.popularity
        edges = np.cumsum(weights / weights.sum())
        gap_s = told.turns / told.requests_per_s
        start_s = 0.0
        while True:
            turns = np.minimum(draw.geometric(1.0 / told.turns, _BATCH), _TURNS_MAX)
            total = int(turns.sum())
            starts = (start_s + np.cumsum(draw.exponential(gap_s, _BATCH))).tolist()
            start_s = starts[-1]
            prompts = np.searchsorted(edges, draw.random(_BATCH)).tolist()
            is_shared = (draw.random(_BATCH) < told.shared_share).tolist()
            firsts = self._lengths(draw, told.first_tokens, _BATCH)
            grown = self._lengths(draw, told.turn_tokens, total)
            outputs = self._lengths(draw, told.output_tokens, total)
            pauses = self._drawn(draw, told.think_s, total).tolist()
            place = 0
            for number, count in enumerate(turns.tolist()):
                prompt = min(prompts[number], told.shared_prompts - 1) if is_shared[number] else -1
                lengths = [firsts[number], *grown[place : place + count - 1]]
                yield (
                    starts[number],
                    self._session(prompt, lengths, outputs[place : place + count], pauses[place : place + count]),
                )
                place += count

    def _session(self, prompt: int, lengths: list[int], outputs: list[int], pauses: list[float]) -> Session:
        size = self.block_tokens
        shared = self._prompt_blocks if prompt >= 0 else 0
        begin = (Run(prompt * shared, shared, is_shared=True),) if shared else ()
        # Whole blocks stay as the prompt grows; the last one, which is not whole, is another one each time.
        whole_at_last = sum(lengths) // size
        steps: list[Step] = []
        tokens, after_s, tails = 0, 0.0, 0
        for turn, (length, output, pause) in enumerate(zip(lengths, outputs, pauses, strict=True)):
            tokens += length
            runs = begin
            if tokens >= size:
                runs = (*runs, Run(0, tokens // size, is_shared=False))
            if tokens % size:
                runs = (*runs, Run(whole_at_last + tails, 1, is_shared=False))
                tails += 1
            after_s += pause if turn else 0.0
            steps.append(Step(after_s, shared * size + tokens, output, runs, 0))
        return Session(tuple(steps), whole_at_last + tails, 1)

    def _lengths(self, draw: np.random.Generator, mean: float, count: int) -> list[int]:
        return np.clip(np.rint(self._drawn(draw, mean, count)), 1, _TOKENS_MAX).astype(np.int64).tolist()

    def _drawn(self, draw: np.random.Generator, mean: float, count: int) -> "np.typing.NDArray[np.float64]":
        spread = self._told.spread
        return draw.lognormal(math.log(mean) - spread * spread / 2, spread, count)
