"""Time of a prefill: the same work for each token, and attention to the tokens before it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """Speed of a prefill. The defaults are near a 70B dense model with 80 layers and 8,192 hidden units on 8 H100."""

    tokens_per_s: float = 10_000.0
    """Speed for the first tokens of a prompt."""
    attention_tokens: float = 53_000.0
    """Position at which a token costs twice the first: 2 x parameters / (4 x layers x hidden units)."""
    windows: tuple[tuple[int, float], ...] = ()
    """(window in tokens, its own `attention_tokens`) for layers with sliding windows."""
    source: str = field(default="default: near a 70B dense model on 8 H100", compare=False)
    """Where the figures come from."""

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_s < float("inf"):
            raise ConfigError(f"prefill speed {self.tokens_per_s:g}; allowed: tokens a second, above 0")
        if not all(it > 0 for it in (self.attention_tokens, *(cost for _, cost in self.windows))):
            raise ConfigError(f"prefill attention_tokens {self.attention_tokens:g}; allowed: above 0, or inf")

    def seconds(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens from position `start` to `stop`."""
        before = (stop + start) / 2
        cost = 1.0 + before / self.attention_tokens
        for window, attention_tokens in self.windows:
            cost += min(before, window) / attention_tokens
        return (stop - start) * cost / self.tokens_per_s


def best_split(
    arrivals_s: Iterable[float], *, chunk_tokens: int, input_tokens: int, ahead_s: float, prefill: PrefillSpeed
) -> tuple[int, float]:
    """The number of leading chunks to load for the earliest end of the prefill, and that end in seconds from now.

    Args:
        arrivals_s: for each leading chunk that can be loaded, seconds until it and all before it have arrived.
        chunk_tokens: tokens of a chunk.
        input_tokens: tokens of the prompt.
        ahead_s: seconds until the engine can start this prompt.
        prefill: speed of computing.
    """
    best = (0, ahead_s + prefill.seconds(0, input_tokens))
    for chunks, arrival_s in enumerate(arrivals_s, 1):
        end_s = max(arrival_s, ahead_s) + prefill.seconds(min(chunks * chunk_tokens, input_tokens), input_tokens)
        if end_s < best[1]:
            best = (chunks, end_s)
    return best
