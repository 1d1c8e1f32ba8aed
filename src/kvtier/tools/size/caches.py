"""The kinds of caches of a layer: the formula of each, the source of the formula, and how ranks share the cache.

Most layers have one `LayerCache`. Some have two: attention and Mamba in parallel, or a latent and an indexer's keys. A
cache has a part that grows with the tokens, a state that does not, or neither if the layer reads another layer's cache.

A format has bits per element. A quantized format stores a scale, and possibly a zero point, for every group of
elements. A group never extends beyond a vector (one head of K or V, or one latent). So a vector of 64 elements with
groups of 128 has one group of 64.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from kvtier.errors import ConfigError

Role = Literal["kv", "latent", "compressed", "rope", "index"]
"""Kinds of vectors: a head of K or V, MLA's latent, a compressed latent, the rotary part of a latent, and an
indexer's key. Engines pack some formats differently for each kind."""

GROUP_MAX = 4096


@dataclass(frozen=True, slots=True)
class Encoding:
    """How one vector is stored."""

    bits: int
    group: int = 0
    """Elements that share a scale; 0 if the cache has no scales (16-bit types, or one scale per tensor)."""
    group_bytes: int = 0
    """Bytes of a group's scale and zero point."""
    padding: int = 0
    """Bytes of padding per vector."""

    def vector_bytes(self, size: int) -> float:
        """Return the bytes of a vector of `size` elements."""
        groups = -(-size // self.group) if self.group else 0
        return size * self.bits / 8 + groups * self.group_bytes + (self.padding if size else 0)


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format of KV."""

    name: str
    description: str
    default: Encoding
    by_role: Mapping[Role, Encoding] = field(default_factory=lambda: MappingProxyType({}))

    def encoding(self, role: Role) -> Encoding:
        """Return how vectors of kind `role` are stored."""
        return self.by_role.get(role, self.default)

    def vector_bytes(self, role: Role, size: int) -> float:
        """Return the bytes of one vector of `size` elements and kind `role`."""
        return self.encoding(role).vector_bytes(size)

    def with_index(self, index: "Format") -> "Format":
        """Return this format, but with the keys of indexers in the format `index`."""
        name, description = f"{self.name}, index {index.name}", f"{self.description}; index keys: {index.description}"
        by_role: dict[Role, Encoding] = {**self.by_role, "index": index.encoding("index")}
        return Format(name, description, self.default, MappingProxyType(by_role))


_SIXTEEN, _EIGHT = Encoding(16), Encoding(8)
_FP8_INDEX = Encoding(8, group=128, group_bytes=4)

NAMED: Mapping[str, Format] = MappingProxyType(
    {
        known.name: known
        for known in (
            Format("fp32", "32 bits", Encoding(32)),
            Format("bf16", "16 bits", _SIXTEEN),
            Format("fp16", "16 bits", _SIXTEEN),
            Format("fp8", "8 bits, a scale per tensor", _EIGHT),
            Format("int8", "8 bits, a scale per tensor", _EIGHT),
            Format("mxfp8", "8 bits, a 1-byte scale per 32 (OCP MX 1.0)", Encoding(8, 32, 1)),
            Format("mxfp4", "4 bits, a 1-byte scale per 32 (OCP MX 1.0)", Encoding(4, 32, 1)),
            Format("nvfp4", "4 bits, an fp8 scale per 16 (NVIDIA Blackwell)", Encoding(4, 16, 1)),
            Format("fp4", "4 bits and no scales: a lower bound", Encoding(4)),
            # Both packed layouts come from FlashMLA. vLLM 0.32 describes them in v1/attention/backends/mla.
            Format(
                "fp8_ds_mla",
                "MLA latents in fp8 with scales, rotary part in 16 bits, index keys in fp8 (FlashMLA, vLLM)",
                _EIGHT,
                MappingProxyType(
                    {
                        "latent": Encoding(8, group=128, group_bytes=4),
                        "compressed": Encoding(8, group=64, group_bytes=1, padding=1),
                        "rope": _SIXTEEN,
                        "index": _FP8_INDEX,
                    }
                ),
            ),
            Format(
                "nvfp4_ds_mla",
                "MLA latents in nvfp4, rotary part in fp8, index keys in fp8 with scales (FlashMLA, vLLM)",
                Encoding(4, 16, 1),
                MappingProxyType({"latent": Encoding(4, 16, 1), "rope": _EIGHT, "index": _FP8_INDEX}),
            ),
        )
    }
)
"""Every format with a fixed name."""

ALIASES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}

ALLOWED = f"{', '.join(NAMED)}, int8:gN or int4:gN (groups of N elements; end with :sym or :asym)"

_GROUPED = re.compile(r"int(4|8):g([0-9]{1,5})(?::(sym|asym))?", re.ASCII)


def parse_dtype(name: str, origin: str = "dtype") -> Format:
    """Return the format `name`.

    By default, ``int4:g64`` has a 16-bit scale and a 16-bit zero point per 64 elements; ``int8:g64`` has only a scale.
    ``:sym`` (only a scale) and ``:asym`` (both) override the default.

    Raises:
        ConfigError: there is no such format; the message names `origin`.
    """
    plain = name.strip().lower()
    plain = ALIASES.get(plain, plain)
    if plain in NAMED:
        return NAMED[plain]
    found = _GROUPED.fullmatch(plain)
    if found is None or not 1 <= int(found[2]) <= GROUP_MAX:
        raise ConfigError(f"{origin}: unknown format {name!r}; known are {ALLOWED}, N from 1 to {GROUP_MAX}")
    bits, group = int(found[1]), int(found[2])
    is_symmetric = (found[3] or ("asym" if bits == 4 else "sym")) == "sym"
    description = f"{bits} bits, a 16-bit scale{'' if is_symmetric else ' and zero point'} per {group}"
    return Format(plain, description, Encoding(bits, group, 2 if is_symmetric else 4))


SIXTEEN_BITS, THIRTY_TWO_BITS = 2, 4

BLOCK_TOKENS = 16
"""Default number of tokens in a block of vLLM."""

_SLIDING = "Beltagy et al. 2020, Jiang et al. 2023 (Mistral 7B): only the last tokens are seen"


@dataclass(frozen=True, slots=True)
class TokenPart:
    """The vectors that a layer stores for every entry: a token, or a group of `LayerCache.every` tokens."""

    role: Role
    count: int
    """Vectors per entry: the number of KV heads, or 1."""
    size: int
    """Elements in a vector."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """The elements that a layer stores once per sequence, whatever its length."""

    name: str
    elements: int
    element_bytes: int
    heads: int
    """Pieces into which tensor parallelism can split the state."""
    may_copy: bool = False
    """Whether ranks beyond the heads may hold copies. If not, more ranks than heads are refused."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole part."""
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One cache of one layer. Sizes cover all heads of one sequence."""

    kind: str
    """Kind of the cache: ``full``, ``window``, ``chunked``, ``mla``, ``indexer``, ``mamba2``, ..."""
    source: str
    """Publication or code from which the formula comes."""
    parts: tuple[TokenPart, ...] = ()
    kv_heads: int | None = None
    """KV heads; 1 for a latent that all heads share; None without a token axis."""
    head_dim: int | None = None
    """Elements of a key, or of an entry if key and value are one."""
    window: int | None = None
    """Maximum number of tokens that stay cached; None without a limit."""
    every: int = 1
    """Tokens per entry."""
    state: tuple[StatePart, ...] = ()
    expression: str = ""
    """The formula in the words of the configuration."""

    def token_bytes(self, form: Format) -> float:
        """Return the bytes of one token while it is cached."""
        return sum(part.count * form.vector_bytes(part.role, part.size) for part in self.parts) / self.every

    @property
    def state_bytes(self) -> int:
        """Bytes of state."""
        return sum(part.bytes for part in self.state)

    def tokens_on_gpu(self, in_flight: int) -> int:
        """Return for how many tokens vLLM keeps blocks, with `in_flight` tokens in its steps; 0 without a limit."""
        if self.window is None:
            return 0
        return (math.ceil((self.window - 1 + in_flight) / BLOCK_TOKENS) + 1) * BLOCK_TOKENS  # may start inside a block

    def tokens_in_store(self, chunk_tokens: int) -> int:
        """Return how many tokens of each chunk a store keeps.

        These are the tokens that the token after the chunk may see, rounded up to whole blocks; without a window, the
        whole chunk.
        """
        if self.window is None:
            return chunk_tokens
        return min(chunk_tokens, math.ceil(max(1, self.window - 1) / BLOCK_TOKENS) * BLOCK_TOKENS)

    def rank_token_bytes(self, form: Format, tp: int) -> float:
        """Return the bytes per token on one of `tp` ranks. If ranks outnumber heads, heads are copied."""
        heads = self.kv_heads or 1
        return self.token_bytes(form) * max(1, heads // tp) / heads

    def rank_state_bytes(self, tp: int) -> float:
        """Return the bytes of state on one of `tp` ranks."""
        return sum(part.bytes * max(1, part.heads // tp) / part.heads for part in self.state)

    def can_be_split(self, tp: int) -> bool:
        """Return whether `tp` ranks can share the cache: each has whole heads, or heads have equally many copies."""
        heads = self.kv_heads or 1
        return (heads % tp == 0 or tp % heads == 0) and all(
            part.heads % tp == 0 or (part.may_copy and tp % part.heads == 0) for part in self.state
        )


def full(heads: int, key_dim: int, value_dim: int | None = None) -> LayerCache:
    """Return the cache of MHA, GQA or MQA: a key and a value for every KV head and token."""
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
    """Return the cache of a sliding window: `cache` for only the last `tokens`."""
    return replace(cache, kind="window", source=_SLIDING, window=tokens)


def chunked(cache: LayerCache, tokens: int) -> LayerCache:
    """Return the cache of chunked attention: `cache` for the current chunk of at most `tokens`."""
    source = "Llama 4 in Transformers: tokens see their own chunk only"
    return replace(cache, kind="chunked", source=source, window=tokens)


def shared() -> LayerCache:
    """Return the empty cache of a layer that reads another layer's cache."""
    source = "Brandon et al. 2024 (cross-layer attention): the layer reads the KV of an earlier layer of its kind"
    return LayerCache(kind="shared", source=source, expression="0: reads an earlier layer's")


def cross() -> LayerCache:
    """Return the empty cache of cross-attention to an image: it caches no tokens of text."""
    source = "Llama 3.2 Vision in Transformers: keys and values come from the image alone"
    return LayerCache(kind="cross", source=source, expression="0 a token of text")


def mla(latent: int, rotary: int) -> LayerCache:
    """Return the cache of multi-head latent attention. All heads share one latent, so every rank needs all of it."""
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
    """Return the cache of the keys by which sparse attention selects tokens."""
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
    """Return the cache of one latent (key and value) per `every` tokens. Its last `rotary` elements are rotated."""
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
    """Return the cache of the uncompressed entries that a compressed cache keeps for the last `tokens`."""
    return replace(compressed(dim, rotary, 1), kind="window", source=_SLIDING, window=tokens, expression="head dim")


def mamba1(inner: int, states: int, kernel: int, state_bytes: int) -> LayerCache:
    """Return the cache of Mamba: a state for each inner channel, and the last inputs of its convolution."""
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
    """Return the cache of Mamba-2: a matrix for each head, and the last inputs of a convolution over x, B and C."""
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
    """Return a gated delta net's cache: a key x value matrix per value head. `heads` and `dims` are (key, value)."""
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
    """Return the cache of Kimi delta attention: a square matrix for each head, and three convolutions."""
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
    """Return the cache of lightning (linear) attention: a square matrix for each head."""
    return LayerCache(
        kind="linear_attention",
        source="MiniMax-01 2025; shape as in vLLM 0.32 mamba_utils, 16 bits as there and in Transformers 5.23",
        state=(StatePart("state", heads * dim * dim, state_bytes, heads),),
        expression="heads x dim x dim",
    )


def rg_lru(width: int, kernel: int) -> LayerCache:
    """Return the cache of Griffin's recurrent block: a state per channel, and the last inputs of its convolution."""
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
    """Return the cache of a short convolution: its last inputs, in `heads` pieces (0 means any number).

    If there is only one piece, every rank has a copy of it.
    """
    return LayerCache(
        kind="convolution",
        source="LFM2 2025; shapes as in vLLM 0.32 mamba_utils, and in Transformers 5.23",
        state=(StatePart("convolution", (kernel - 1) * width, SIXTEEN_BITS, heads or width, may_copy=heads == 1),),
        expression="(kernel - 1) x width",
    )
