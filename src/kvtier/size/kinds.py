"""What a layer keeps, one kind at a time: its formula, where the formula comes from, and how ranks share it.

Most layers keep one `Cache`; some keep two (an attention and a Mamba side by side, a latent and an indexer's keys).
A cache has a part that grows with the tokens, a state that does not, or neither (it reads another layer's).
"""

from dataclasses import dataclass, replace

from kvtier.size.dtype import Format, Role

GQA = "Vaswani et al. 2017 (MHA), Shazeer 2019 (MQA), Ainslie et al. 2023 (GQA)"
SLIDING = "Beltagy et al. 2020, Jiang et al. 2023 (Mistral 7B): only the last tokens are seen"
CHUNKED = "Llama 4 in Transformers: tokens see their own chunk only"
MLA = "DeepSeek-V2 2024: one latent and one rotary key a token, shared by all heads"
DSA = "DeepSeek-V3.2 2025: one index key a token, shared by all index heads"
CSA = "DeepSeek-V4 config and vLLM 0.32: one latent, key and value in one, for every so many tokens"
MAMBA1 = "Gu and Dao 2023; shapes as in vLLM 0.32 mamba_utils"
MAMBA2 = "Dao and Gu 2024; shapes as in vLLM 0.32 mamba_utils"
DELTA = "Yang et al. 2024 (gated delta net); shapes as in vLLM 0.32 mamba_utils"
KDA = "Kimi Linear 2025 (Kimi delta attention); shapes as in vLLM 0.32 mamba_utils"
LIGHTNING = "MiniMax-01 2025; shape as in vLLM 0.32 mamba_utils, 16 bits as there and in Transformers 5.23"
SHARING = "Gemma 3n and 4 in Transformers: the layer reads the KV of the last layer of its kind that keeps one"

SIXTEEN_BITS, THIRTY_TWO_BITS = 2, 4


@dataclass(frozen=True, slots=True)
class Part:
    """Vectors that are kept for every entry."""

    role: Role
    count: int
    """Vectors an entry: the KV heads, or 1."""
    size: int
    """Elements in a vector."""

    def bytes(self, form: Format) -> float:
        """Bytes of an entry's vectors."""
        return self.count * form.vector_bytes(self.role, self.size)


@dataclass(frozen=True, slots=True)
class StatePart:
    """Elements that are kept for every sequence, whatever its length."""

    name: str
    elements: int
    element_bytes: int
    heads: int
    """Into how many pieces tensor parallelism can cut it."""
    may_copy: bool = False
    """Whether more ranks than that may keep copies; else so many ranks are impossible."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole part."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What one layer keeps in one place. All sizes are of one layer, all heads, one sequence."""

    kind: str
    source: str
    parts: tuple[Part, ...] = ()
    kv_heads: int | None = None
    """KV heads; 1 for a latent that all heads share; None where there is no token axis."""
    head_dim: int | None = None
    """Elements of a key (of an entry, where key and value are one)."""
    window: int | None = None
    """Tokens that are kept at most; None when all are."""
    every: int = 1
    """Tokens that one entry stands for."""
    state: tuple[StatePart, ...] = ()
    expression: str = ""
    """The formula in the config's words."""

    @property
    def has_tokens(self) -> bool:
        """Whether there is a part with a token axis."""
        return bool(self.parts)

    def token_bytes(self, form: Format) -> float:
        """Bytes a token, window or not."""
        return sum(part.bytes(form) for part in self.parts) / self.every

    @property
    def state_bytes(self) -> int:
        """Bytes a sequence, whatever its length."""
        return sum(part.bytes for part in self.state)

    def rank_token_bytes(self, form: Format, tp: int) -> float:
        """Bytes a token on one of `tp` ranks: whole heads each, and copies when there are more ranks than heads."""
        heads = self.kv_heads or 1
        return self.token_bytes(form) * max(1, heads // tp) / heads

    def rank_state_bytes(self, tp: int) -> float:
        """Bytes of state on one of `tp` ranks."""
        return sum(part.bytes * max(1, part.heads // tp) / part.heads for part in self.state)

    def can_be_cut(self, tp: int) -> bool:
        """Whether `tp` ranks can share it: whole heads for each, or as many copies of each."""
        heads = self.kv_heads or 1
        return (heads % tp == 0 or tp % heads == 0) and all(
            part.heads % tp == 0 or (part.may_copy and tp % part.heads == 0) for part in self.state
        )


def full(heads: int, key_dim: int, value_dim: int | None = None) -> Cache:
    """MHA, GQA or MQA: a key and a value for every KV head and token."""
    value_dim = key_dim if value_dim is None else value_dim
    same = key_dim == value_dim
    return Cache(
        kind="full",
        source=GQA,
        parts=(Part("kv", heads, key_dim), Part("kv", heads, value_dim)),
        kv_heads=heads,
        head_dim=key_dim,
        expression="2 x KV heads x head dim" if same else "KV heads x (key dim + value dim)",
    )


def window(cache: Cache, tokens: int) -> Cache:
    """Sliding window: what `cache` is for a token, kept for the last `tokens`."""
    return replace(cache, kind="window", source=SLIDING, window=tokens)


def chunked(cache: Cache, tokens: int) -> Cache:
    """Chunked attention: what `cache` is for a token, kept for the `tokens` of the current chunk at most."""
    return replace(cache, kind="chunked", source=CHUNKED, window=tokens)


def one_for_both(cache: Cache) -> Cache:
    """K = V sharing: the value is the key, so one of them suffices."""
    return replace(
        cache,
        parts=cache.parts[:1],
        source="Gemma 4 config, attention_k_eq_v: the value is the key before its rotation and norm",
        expression="KV heads x head dim, key and value in one",
    )


def shared() -> Cache:
    """Cross-layer sharing: nothing of its own."""
    return Cache(kind="shared", source=SHARING, expression="0: reads an earlier layer's")


def mla(latent: int, rotary: int) -> Cache:
    """Multi-head latent attention. No factor 2 and no heads; every rank needs all of it."""
    return Cache(
        kind="mla",
        source=MLA,
        parts=(Part("latent", 1, latent), Part("rope", 1, rotary)) if rotary else (Part("latent", 1, latent),),
        kv_heads=1,
        head_dim=latent + rotary,
        expression="latent + rotary dim",
    )


def indexer(dim: int, every: int = 1) -> Cache:
    """The keys by which a sparse attention picks its tokens."""
    return Cache(
        kind="indexer",
        source=DSA,
        parts=(Part("index", 1, dim),),
        kv_heads=1,
        head_dim=dim,
        every=every,
        expression="index dim" if every == 1 else f"index dim / {every} tokens",
    )


def compressed(dim: int, rotary: int, every: int) -> Cache:
    """A latent for every `every` tokens, key and value in one, the last `rotary` elements rotated."""
    return Cache(
        kind="compressed",
        source=CSA,
        parts=(Part("compressed", 1, dim - rotary), Part("rope", 1, rotary)),
        kv_heads=1,
        head_dim=dim,
        every=every,
        expression=f"head dim / {every} tokens",
    )


def latent_window(dim: int, rotary: int, tokens: int) -> Cache:
    """The uncompressed entries beside a compressed cache, kept for the last `tokens`."""
    return replace(compressed(dim, rotary, 1), kind="window", source=SLIDING, window=tokens, expression="head dim")


def mamba1(inner: int, states: int, kernel: int, state_bytes: int) -> Cache:
    """Mamba: a state for each inner channel and the last inputs of its convolution."""
    return Cache(
        kind="mamba1",
        source=MAMBA1,
        state=(
            StatePart("state", inner * states, state_bytes, inner),
            StatePart("convolution", (kernel - 1) * inner, SIXTEEN_BITS, inner),
        ),
        expression="inner x state size, and (kernel - 1) x inner",
    )


def mamba2(heads: int, head_dim: int, states: int, groups: int, kernel: int, state_bytes: int) -> Cache:
    """Mamba-2: a matrix for each head, and the last inputs of a convolution over x, B and C."""
    return Cache(
        kind="mamba2",
        source=MAMBA2,
        state=(
            StatePart("state", heads * head_dim * states, state_bytes, heads),
            StatePart("convolution of x", (kernel - 1) * heads * head_dim, SIXTEEN_BITS, heads),
            StatePart("convolution of B, C", (kernel - 1) * 2 * groups * states, SIXTEEN_BITS, groups, may_copy=True),
        ),
        expression="heads x head dim x state size, and (kernel - 1) x (heads x head dim + 2 x groups x state size)",
    )


def gated_delta_net(heads: tuple[int, int], dims: tuple[int, int], kernel: int, state_bytes: int) -> Cache:
    """Gated delta net: a key x value matrix for each value head; `heads` and `dims` are (key, value)."""
    keys, values = heads[0] * dims[0], heads[1] * dims[1]
    return Cache(
        kind="gated_delta_net",
        source=DELTA,
        state=(
            StatePart("state", heads[1] * dims[0] * dims[1], state_bytes, heads[1]),
            StatePart("convolution of q, k", (kernel - 1) * 2 * keys, SIXTEEN_BITS, heads[0]),
            StatePart("convolution of v", (kernel - 1) * values, SIXTEEN_BITS, heads[1]),
        ),
        expression="value heads x key dim x value dim, and (kernel - 1) x (2 x key heads x key dim + values)",
    )


def kda(heads: int, dim: int, kernel: int, state_bytes: int) -> Cache:
    """Kimi delta attention: a square matrix for each head, and three convolutions."""
    return Cache(
        kind="kda",
        source=KDA,
        state=(
            StatePart("state", heads * dim * dim, state_bytes, heads),
            StatePart("convolution of q, k, v", (kernel - 1) * 3 * heads * dim, SIXTEEN_BITS, heads),
        ),
        expression="heads x dim x dim, and (kernel - 1) x 3 x heads x dim",
    )


def lightning(heads: int, dim: int, state_bytes: int) -> Cache:
    """Lightning (linear) attention: a square matrix for each head."""
    return Cache(
        kind="linear_attention",
        source=LIGHTNING,
        state=(StatePart("state", heads * dim * dim, state_bytes, heads),),
        expression="heads x dim x dim",
    )
