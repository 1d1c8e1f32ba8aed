"""What computing a token costs: the same weights for each, and attention to all before it."""

from dataclasses import dataclass

from kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Speed of a prefill. The defaults are near a 70B dense model with 80 layers and 8,192 hidden units on 8 H100."""

    tokens_per_s: float = 10_000.0
    """Of the first tokens of a prompt."""
    attention_tokens: float = 53_000.0
    """Where a token costs twice what the first costs: 2 x parameters / (4 x layers x hidden units)."""

    def __post_init__(self) -> None:
        if not 0 < self.tokens_per_s < float("inf"):
            raise ConfigError(f"prefill speed {self.tokens_per_s:g}; allowed: tokens a second, above 0")
        if not self.attention_tokens > 0:
            raise ConfigError(f"prefill attention_tokens {self.attention_tokens:g}; allowed: above 0, or inf")

    def seconds(self, start: int, stop: int) -> float:
        """Seconds to compute the tokens from position `start` to `stop`."""
        attention = (stop + start) / 2 / self.attention_tokens
        return (stop - start) * (1.0 + attention) / self.tokens_per_s
