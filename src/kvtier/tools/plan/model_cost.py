"""Compute what a model costs: bytes of its KV and of its routed experts, and the work of prefill and decoding.

The bytes come from `kvtier.tools.size`. Work is in FLOP: a multiplication and an addition count as two.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from kvtier.tools.size import KvSize
from kvtier.tools.size.caches import LayerCache

_ATTENDING = {"full", "window", "chunked", "mla"}
"""Kinds of layers whose work grows with the earlier tokens. Recurrent layers do their work with parameters."""


class Experts(NamedTuple):
    """Routed experts of one layer; none in a dense model, or if the configuration does not state them."""

    routed: int
    used: int
    """Experts that one token uses."""

    def bytes_of(self, weight_bytes: float, total: float, active: float) -> float:
        """Return the bytes of all routed experts, if `total` parameters take `weight_bytes` and a token uses `active`.

        A token skips ``total - active`` parameters. They are ``1 - used / routed`` of the experts' parameters.
        """
        if self.routed <= self.used or active >= total:
            return 0.0
        return weight_bytes * min((1 - active / total) / (1 - self.used / self.routed), 1.0)

    def read_share(self, tokens: float) -> float:
        """Return the share of the experts that a step for `tokens` tokens reads: ``1 - (1 - used / routed)^tokens``.

        This is the expectation for independent tokens that use every expert equally often. Tokens of one subject use
        fewer experts.
        """
        return 1 - (1 - self.used / self.routed) ** max(tokens, 1.0) if self.routed else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """Layers whose attention costs the same."""

    layers: int
    flop_per_pair: float
    """FLOP for one query token and one earlier token, in all heads of one layer."""
    window_tokens: int | None
    """Size of the attention window; None for full attention."""


class LayerRun(NamedTuple):
    """Bytes per token of a run of layers, and how many of the last tokens a load requires."""

    minimum: float
    """Bytes of one copy. If a window is shorter than a chunk, only the part that a chunk keeps counts."""
    stored: float
    """Bytes of all stored copies."""
    delivered: float
    """Bytes of all copies that ranks receive."""
    last_tokens: float
    """Tokens that a load reads, in whole chunks; infinite without a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """KV bytes and attention work of a model in one format on its ranks."""

    name: str
    spans: tuple[LayerRun, ...]
    state_bytes: float
    """Bytes of one snapshot of the recurrent states on all ranks. Each rank stores and loads its own."""
    gpu_bytes: Callable[[float], float]
    """Returns the bytes that an idle conversation of a number of tokens takes in the GPU memory of all ranks."""
    attention: tuple[AttentionCost, ...]
    tokens_max: int | None

    @property
    def token_bytes(self) -> float:
        """Bytes of stored KV per token, for all layers and all stored copies."""
        return sum(it.stored for it in self.spans)

    @property
    def duplication(self) -> float:
        """Bytes per token that all ranks receive, divided by the minimum; 1 if no KV grows with the tokens."""
        least = sum(it.minimum for it in self.spans)
        return sum(it.delivered for it in self.spans) / least if least else 1.0

    @property
    def delivered_ratio(self) -> float:
        """Bytes that all ranks receive, divided by the stored bytes; above 1 if several ranks share a copy."""
        return sum(it.delivered for it in self.spans) / self.token_bytes if self.token_bytes else 1.0

    def stored_bytes(self, tokens: float) -> float:
        """Return the bytes of a prefix of `tokens` in a tier: every layer of every token, and a snapshot."""
        return self.token_bytes * tokens + (self.state_bytes if tokens else 0.0)

    def loaded_bytes(self, tokens: float) -> float:
        """Return the stored bytes that a load of `tokens` reads: for a layer with a window, only the last tokens."""
        read = sum(it.stored * min(tokens, it.last_tokens) for it in self.spans)
        return read + (self.state_bytes if tokens else 0.0)

    def delivered_bytes(self, tokens: float) -> float:
        """Return the bytes that all ranks receive in a load of `tokens`. A decode step reads the same number."""
        read = sum(it.delivered * min(tokens, it.last_tokens) for it in self.spans)
        return read + (self.state_bytes if tokens else 0.0)

    def attention_flop(self, new_tokens: float, tokens: float) -> float:
        """Compute the attention work for the last `new_tokens` of a prompt of `tokens`, in FLOP.

        A token at position i attends to i earlier tokens, or to its window. All new tokens together have
        ``new (tokens - new / 2)`` pairs. Each pair costs a product with K and one with V (Kaplan et al., 2020,
        "Scaling Laws for Neural Language Models", table 1, but without the non-causal half of the pairs).
        """
        mean = tokens - new_tokens / 2
        flop = 0.0
        for run in self.attention:
            attended = mean if run.window_tokens is None else min(run.window_tokens, mean)
            flop += run.layers * run.flop_per_pair * (new_tokens * attended)
        return flop


def model_cost(kv: KvSize, copies: int = 0) -> ModelCost:
    """Compute the costs of a model from the size of its KV.

    Args:
        kv: sizes in one format on its ranks.
        copies: stored copies of KV that several ranks share; 0 means one per rank.
    """
    model = kv.model
    heads = model.attention_heads or 0
    spans: list[LayerRun] = []
    for it, count in model.runs:
        kept = count * it.tokens_in_store(kv.chunk_tokens) / kv.chunk_tokens
        on_rank, once = kept * it.rank_token_bytes(kv.form, kv.tp), kept * it.token_bytes(kv.form)
        storing = min(kv.tp, kv.storing_ranks * copies) if copies else kv.tp
        last_tokens = math.inf if it.window is None else max(it.window, kv.chunk_tokens)
        spans.append(LayerRun(once, storing * on_rank, kv.tp * on_rank, last_tokens))

    @cache
    def gpu_bytes(tokens: float) -> float:
        return kv.tp * kv.rank_session_bytes(0, tokens)

    return ModelCost(
        name=model.name,
        spans=tuple(spans),
        state_bytes=kv.state_bytes_stored,
        gpu_bytes=gpu_bytes,
        attention=tuple(
            AttentionCost(
                layers=count,
                flop_per_pair=2.0 * heads * _dimensions(cache, model.fields),
                window_tokens=cache.window,
            )
            for cache, count in model.runs
            if cache.kind in _ATTENDING
        ),
        tokens_max=model.tokens_max,
    )


def _dimensions(cache: LayerCache, fields: Mapping[str, object]) -> float:
    """Return the dimensions of K and V together, for one head and one pair of tokens.

    MLA computes prefill on the expanded heads (DeepSeek-V2, section 2.1). A key has a part without rotary embedding
    (nope) and a part with it (rope).
    """
    if cache.kind == "mla":
        parts = [fields.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        return float(sum(part if isinstance(part, int) else 128 for part in parts))
    return 2.0 * (cache.head_dim or 128)
