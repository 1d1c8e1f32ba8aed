"""What a plan needs to know of a model: bytes of its KV, and the work of prefill and of decoding.

The bytes come from `kvtier.size`. The work is counted here, in FLOP, a multiplication and an addition as two.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier import size
from kvtier.size.caches import LayerCache

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes of a weight; fp4 with a scale of one byte for each 16 (NVFP4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A run of layers whose attention costs the same."""

    layers: int
    flop_per_pair: float
    """For one query token that attends to one earlier token, of one layer, all heads."""
    window_tokens: int | None
    """None where a token attends to all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model as a plan sees it."""

    name: str
    token_bytes: float
    """KV that is stored for a token: all layers, all ranks."""
    state_bytes: float
    """Recurrent state that is stored with a prefix."""
    duplication: float
    """Bytes over all ranks against what the model needs."""
    growing_bytes: float
    constant_bytes: float
    """What a session needs in GPU memory: for each token, and whatever its length."""
    attention: tuple[Attention, ...]
    tokens_max: int | None

    def stored_bytes(self, tokens: float) -> float:
        """Bytes of a prefix of so many tokens on a tier, over all ranks."""
        return self.token_bytes * tokens + (self.state_bytes if tokens else 0.0)

    def gpu_bytes(self, tokens: float) -> float:
        """Bytes of a session of so many tokens in GPU memory, over all ranks."""
        needed = self.growing_bytes * tokens + self.constant_bytes
        return min(needed * self.duplication, self.token_bytes * tokens + self.state_bytes)

    def attention_flop(self, new_tokens: float, tokens: float) -> float:
        """Work of the attention when the last `new_tokens` of a prompt of `tokens` are computed.

        A token at position i attends to i tokens before it, or to its window: over the new tokens that is
        ``new (tokens - new / 2)`` pairs. Each pair costs a product with K and one with V (Kaplan et al., 2020,
        "Scaling Laws for Neural Language Models", table 1, without the causal half that they leave in).
        """
        flop = 0.0
        for run in self.attention:
            if run.window_tokens is None:
                pairs = new_tokens * (tokens - new_tokens / 2)
            else:
                pairs = new_tokens * min(run.window_tokens, tokens - new_tokens / 2)
            flop += run.layers * run.flop_per_pair * pairs
        return flop


def shape_of(kv: size.KvSize) -> Shape:
    """The shape of a model whose KV has been sized."""
    model = kv.model
    heads = model.attention_heads or 0
    return Shape(
        name=model.name,
        token_bytes=kv.bytes_per_token_stored,
        state_bytes=kv.state_bytes_stored,
        duplication=kv.duplication,
        growing_bytes=kv.bytes_per_token_growing,
        constant_bytes=kv.bytes_per_session_constant,
        attention=tuple(
            Attention(
                layers=count,
                flop_per_pair=2.0 * heads * _dimensions(cache, model.fields),
                window_tokens=cache.window,
            )
            for cache, count in model.runs
            if cache.kind in _ATTENDING
        ),
        tokens_max=model.tokens_max,
    )


_ATTENDING = {"full", "window", "chunked", "mla"}
"""Kinds whose work grows with the tokens before; recurrent layers' work is in their parameters."""


def _dimensions(cache: LayerCache, fields: Mapping[str, object]) -> float:
    """Dimensions of K and V together that a head multiplies with, for each pair of tokens.

    MLA computes prefill on the expanded heads (DeepSeek-V2, section 2.1): a key of nope and rope parts, and a value.
    """
    if cache.kind == "mla":
        parts = [fields.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        return float(sum(part if isinstance(part, int) else 128 for part in parts))
    return 2.0 * (cache.head_dim or 128)
