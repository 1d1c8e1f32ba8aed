"""What computing a token costs: the same weights for each, and attention to those before it."""

from dataclasses import dataclass, field

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Speed of a prefill. The defaults are near a 70B dense model with 80 layers and 8,192 hidden units on 8 H100."""

    tokens_per_s: float = 10_000.0
    """Of the first tokens of a prompt."""
    attention_tokens: float = 53_000.0
    """Where a token costs twice what the first costs: 2 x parameters / (4 x layers x hidden units)."""
    windows: tuple[tuple[int, float], ...] = ()
    """Layers that attend to so many tokens at most, and their own `attention_tokens`."""
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
