"""What a layer caches, one kind at a time: its formula, the source of the formula, and how ranks share it.

Most layers have one `LayerCache`. Some have two: an attention and a Mamba side by side, or a latent and an indexer's
keys. A cache has a part that grows with the tokens, a state that does not, or neither (it reads another layer's).
"""

import math
from dataclasses import dataclass, replace

from kvtier.size.dtype import Format, Role

SIXTEEN_BITS, THIRTY_TWO_BITS = 2, 4

BLOCK_TOKENS = 16
"""Tokens of a block in vLLM, by default."""

_SLIDING = "Beltagy et al. 2020, Jiang et al. 2023 (Mistral 7B): only the last tokens are seen"


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Vectors stored for every entry."""

    role: Role
    count: int
    """Vectors an entry: the KV heads, or 1."""
    size: int
    """Elements in a vector."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """Elements stored once for a sequence of any length."""

    name: str
    elements: int
    element_bytes: int
    heads: int
    """Pieces into which tensor parallelism can split it."""
    may_copy: bool = False
    """Whether more ranks than heads may hold copies; otherwise that many ranks are refused."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole part."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One cache of one layer. Sizes are of all heads and one sequence."""

    kind: str
    """``full``, ``window``, ``chunked``, ``mla``, ``indexer``, ``mamba2``, ..."""
    source: str
    """Publication or code from which the formula is."""
    parts: tuple[TokenPart, ...] = ()
    kv_heads: int | None = None
    """KV heads; 1 for a latent that all heads share; None without a token axis."""
    head_dim: int | None = None
    """Elements of a key (of an entry, where key and value are one)."""
    window: int | None = None
    """Most tokens that stay cached; None without a limit."""
    every: int = 1
    """Tokens per entry."""
    state: tuple[StatePart, ...] = ()
    expression: str = ""
    """The formula in the words of the configuration."""

    def token_bytes(self, form: Format) -> float:
        """Bytes a token, window or not."""
        return sum(part.count * form.vector_bytes(part.role, part.size) for part in self.parts) / self.every

    @property
    def state_bytes(self) -> int:
        """Bytes of state."""
        return sum(part.bytes for part in self.state)

    def tokens_on_gpu(self, in_flight: int) -> int:
        """Most tokens for which vLLM holds blocks, beside `in_flight` tokens of its steps; 0 without a limit."""
        if self.window is None:
            return 0
        return (math.ceil((self.window - 1 + in_flight) / BLOCK_TOKENS) + 1) * BLOCK_TOKENS  # may begin inside a block

    def tokens_in_store(self, chunk_tokens: int) -> int:
        """Tokens of a chunk that a store keeps: those in whole blocks that the next token may see."""
        if self.window is None:
            return chunk_tokens
        return min(chunk_tokens, math.ceil(max(1, self.window - 1) / BLOCK_TOKENS) * BLOCK_TOKENS)

    def rank_token_bytes(self, form: Format, tp: int) -> float:
        """Bytes a token on one of `tp` ranks: whole heads each, and copies when there are more ranks than heads."""
        heads = self.kv_heads or 1
        return self.token_bytes(form) * max(1, heads // tp) / heads

    def rank_state_bytes(self, tp: int) -> float:
        """Bytes of state on one of `tp` ranks."""
        return sum(part.bytes * max(1, part.heads // tp) / part.heads for part in self.state)

    def can_be_split(self, tp: int) -> bool:
        """Whether `tp` ranks can share it: whole heads for each, or equally many copies of each head."""
        heads = self.kv_heads or 1
        return (heads % tp == 0 or tp % heads == 0) and all(
            part.heads % tp == 0 or (part.may_copy and tp % part.heads == 0) for part in self.state
        )


def full(heads: int, key_dim: int, value_dim: int | None = None) -> LayerCache:
    """MHA, GQA or MQA: a key and a value for every KV head and token."""
    value_dim = key_dim if value_dim is None else value_dim
    return LayerCache(
        kind="full",
        source="Vaswani et al. 2017 (MHA), Shazeer 2019 (MQA), Ainslie et al. 2023 (GQA)",
        parts=(TokenPart("kv", heads, key_dim), TokenPart("kv", heads, value_dim)),
        kv_heads=heads,
        head_dim=key_dim,
        expression="2 x KV heads x head dim" if key_dim == value_dim else "KV heads x (key dim + value dim)",
    )


def window(cache: LayerCache, tokens: int) -> LayerCache:
    """Sliding window: `cache` for the last `tokens` only."""
    return replace(cache, kind="window", source=_SLIDING, window=tokens)


def chunked(cache: LayerCache, tokens: int) -> LayerCache:
    """Chunked attention: `cache` for the current chunk of at most `tokens`."""
    source = "Llama 4 in Transformers: tokens see their own chunk only"
    return replace(cache, kind="chunked", source=source, window=tokens)


def shared() -> LayerCache:
    """Cross-layer sharing: no cache of its own."""
    source = "Brandon et al. 2024 (cross-layer attention): the layer reads the KV of an earlier layer of its kind"
    return LayerCache(kind="shared", source=source, expression="0: reads an earlier layer's")


def cross() -> LayerCache:
    """Cross-attention to an image: no cache for tokens of text."""
    source = "Llama 3.2 Vision in Transformers: keys and values come from the image alone"
    return LayerCache(kind="cross", source=source, expression="0 a token of text")


def mla(latent: int, rotary: int) -> LayerCache:
    """Multi-head latent attention. No factor 2 and no heads; every rank needs all of it."""
    rope = (TokenPart("rope", 1, rotary),) if rotary else ()
    return LayerCache(
        kind="mla",
        source="DeepSeek-V2 2024: one latent and one rotary key a token, shared by all heads",
        parts=(TokenPart("latent", 1, latent), *rope),
        kv_heads=1,
        head_dim=latent + rotary,
        expression="latent + rotary dim",
    )


def indexer(dim: int, every: int = 1) -> LayerCache:
    """The keys by which a sparse attention selects its tokens."""
    return LayerCache(
        kind="indexer",
        source="DeepSeek-V3.2 2025: one index key a token, shared by all index heads",
        parts=(TokenPart("index", 1, dim),),
        kv_heads=1,
        head_dim=dim,
        every=every,
        expression="index dim" if every == 1 else f"index dim / {every} tokens",
    )


def compressed(dim: int, rotary: int, every: int) -> LayerCache:
    """A latent for every `every` tokens, key and value in one, the last `rotary` elements rotated."""
    return LayerCache(
        kind="compressed",
        source="DeepSeek-V4 config and vLLM 0.32: one latent, key and value in one, for a fixed number of tokens",
        parts=(TokenPart("compressed", 1, dim - rotary), TokenPart("rope", 1, rotary)),
        kv_heads=1,
        head_dim=dim,
        every=every,
        expression=f"head dim / {every} tokens",
    )


def latent_window(dim: int, rotary: int, tokens: int) -> LayerCache:
    """The uncompressed entries beside a compressed cache, for the last `tokens`."""
    return replace(compressed(dim, rotary, 1), kind="window", source=_SLIDING, window=tokens, expression="head dim")


def mamba1(inner: int, states: int, kernel: int, state_bytes: int) -> LayerCache:
    """Mamba: a state for each inner channel and the last inputs of its convolution."""
    return LayerCache(
        kind="mamba1",
        source="Gu and Dao 2023; shapes as in vLLM 0.32 mamba_utils",
        state=(
            StatePart("state", inner * states, state_bytes, inner),
            StatePart("convolution", (kernel - 1) * inner, SIXTEEN_BITS, inner),
        ),
        expression="inner x state size, and (kernel - 1) x inner",
    )


def mamba2(heads: int, head_dim: int, states: int, groups: int, kernel: int, state_bytes: int) -> LayerCache:
    """Mamba-2: a matrix for each head, and the last inputs of a convolution over x, B and C."""
    return LayerCache(
        kind="mamba2",
        source="Dao and Gu 2024; shapes as in vLLM 0.32 mamba_utils",
        state=(
            StatePart("state", heads * head_dim * states, state_bytes, heads),
            StatePart("convolution of x", (kernel - 1) * heads * head_dim, SIXTEEN_BITS, heads),
            StatePart("convolution of B, C", (kernel - 1) * 2 * groups * states, SIXTEEN_BITS, groups, may_copy=True),
        ),
        expression="heads x head dim x state size, and (kernel - 1) x (heads x head dim + 2 x groups x state size)",
    )


def gated_delta_net(heads: tuple[int, int], dims: tuple[int, int], kernel: int, state_bytes: int) -> LayerCache:
    """Gated delta net: a key x value matrix for each value head; `heads` and `dims` are (key, value)."""
    keys, values = heads[0] * dims[0], heads[1] * dims[1]
    return LayerCache(
        kind="gated_delta_net",
        source="Yang et al. 2024 (gated delta net); shapes as in vLLM 0.32 mamba_utils",
        state=(
            StatePart("state", heads[1] * dims[0] * dims[1], state_bytes, heads[1]),
            StatePart("convolution of q, k", (kernel - 1) * 2 * keys, SIXTEEN_BITS, heads[0]),
            StatePart("convolution of v", (kernel - 1) * values, SIXTEEN_BITS, heads[1]),
        ),
        expression="value heads x key dim x value dim, and (kernel - 1) x (2 x key heads x key dim + values)",
    )


def kda(heads: int, dim: int, kernel: int, state_bytes: int) -> LayerCache:
    """Kimi delta attention: a square matrix for each head, and three convolutions."""
    return LayerCache(
        kind="kda",
        source="Kimi Linear 2025 (Kimi delta attention); shapes as in vLLM 0.32 mamba_utils",
        state=(
            StatePart("state", heads * dim * dim, state_bytes, heads),
            StatePart("convolution of q, k, v", (kernel - 1) * 3 * heads * dim, SIXTEEN_BITS, heads),
        ),
        expression="heads x dim x dim, and (kernel - 1) x 3 x heads x dim",
    )


def lightning(heads: int, dim: int, state_bytes: int) -> LayerCache:
    """Lightning (linear) attention: a square matrix for each head."""
    return LayerCache(
        kind="linear_attention",
        source="MiniMax-01 2025; shape as in vLLM 0.32 mamba_utils, 16 bits as there and in Transformers 5.23",
        state=(StatePart("state", heads * dim * dim, state_bytes, heads),),
        expression="heads x dim x dim",
    )


def rg_lru(width: int, kernel: int) -> LayerCache:
    """Griffin's recurrent block: one state for each channel, and the last inputs of its convolution."""
    return LayerCache(
        kind="rg_lru",
        source="De et al. 2024 (Griffin); shapes and the 32 bits of the state as in Transformers 5.23",
        state=(
            StatePart("state", width, THIRTY_TWO_BITS, width),
            StatePart("convolution", (kernel - 1) * width, SIXTEEN_BITS, width),
        ),
        expression="width, and (kernel - 1) x width",
    )


def short_convolution(width: int, kernel: int, heads: int = 0) -> LayerCache:
    """A short convolution's last inputs; `heads` pieces, of which one has a copy on each rank, or any number."""
    return LayerCache(
        kind="convolution",
        source="LFM2 2025; shapes as in vLLM 0.32 mamba_utils, and in Transformers 5.23",
        state=(StatePart("convolution", (kernel - 1) * width, SIXTEEN_BITS, heads or width, may_copy=heads == 1),),
        expression="(kernel - 1) x width",
    )
