"""SGLang's host pools: which ones are stored, what identifies the bytes of a page, and where they lie.

A page is opaque. Its object holds the pieces that the pool itself names (`get_page_buffer_meta`): K and V of all
layers, or of each layer, or one latent. Only tested classes are stored, by exact name, since a subclass may have
another meaning.
"""

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.connect.fingerprint_exclusions import plain
from kvtier.connect.sglang.sglang_types import HostPool, Indices, StorageConfig
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, Part, RunKind, State, run_of

POOLS: Mapping[str, frozenset[str]] = {
    "MHATokenToKVPoolHost": frozenset({"layer_first", "page_first", "page_first_direct", "page_head"}),
    "AsymmetricMHATokenToKVPoolHost": frozenset({"page_first", "page_first_direct"}),
    "MLATokenToKVPoolHost": frozenset({"layer_first", "page_first", "page_first_direct"}),
    "MambaPoolHost": frozenset({"page_first", "page_first_direct"}),
    "DSAIndexerPoolHost": frozenset({"page_first", "page_first_direct"}),
    "DeepSeekV4PagedHostPool": frozenset({"layer_first", "page_first", "page_first_direct"}),
    "DeepSeekV4StateHostPool": frozenset({"layer_first", "page_first", "page_first_direct"}),
}
"""Host pools and layouts that are stored."""

WITHOUT_KV = frozenset({"LogicalHostPool"})
"""Pools of positions for other pools' pages, with no bytes of their own."""

SAME_ON_ALL_RANKS = frozenset({
    "MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool",
})  # fmt: skip
"""Pools that hold the same on every tensor parallel rank of a model with a replicated cache. One rank writes them."""

STATES = frozenset({"MambaPoolHost"})
"""Pools of recurrent states: a page is valid at its own boundary only."""

RUNS: Mapping[str, tuple[RunKind, tuple[str, ...]]] = {
    "MHATokenToKVPoolHost": ("kv", ("dtype",)),
    "AsymmetricMHATokenToKVPoolHost": ("kv", ("dtype",)),
    "MLATokenToKVPoolHost": ("latent", ("dtype",)),
    "MambaPoolHost": ("state", ("conv_dtype", "temporal_dtype")),
    "DSAIndexerPoolHost": ("index", ()),
}
"""What a piece of a page holds, and the attributes that name its dtype. Pieces of several dtypes are `bytes`."""

FIELDS = (
    "page_size", "logical_page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num",
    "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "item_bytes",
    "state_page_bytes", "slot_page_size", "num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "dtype",
    "conv_dtype", "temporal_dtype", "indexer_dtype", "indexer_page_stride_size", "ring_size", "dcp_size",
    "storage_format_tag",
)  # fmt: skip
"""Attributes of a pool that say what its bytes mean; a pool has some of them."""


@dataclass(frozen=True)
class StoredPool:
    """A host pool whose pages are stored."""

    name: str
    """SGLang's name of the pool, such as ``kv``."""
    pool: HostPool
    layout: GroupLayout
    """Of a page."""
    number: int
    """Group of the store's layout."""

    @property
    def page_size(self) -> int:
        """Positions of one page."""
        return int(self.pool.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.layout.layer_bytes)

    def are_pages(self, indices: Indices) -> bool:
        """Whether these positions are whole pages: SGLang's pools take the first of each and add the page's length."""
        pages = indices.reshape(-1, self.page_size)
        starts = pages[:, 0]
        return bool((starts % self.page_size == 0).all()) and bool((pages.diff(dim=1) == 1).all())

    def pieces(self, indices: Indices) -> list[list[Any]]:
        """The memory of each of these pages, in pieces.

        Args:
            indices: `page_size` positions for each page.
        """
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        count = len(self.layout.layer_bytes)
        memory = [(ctypes.c_uint8 * size).from_address(at) for at, size in zip(pointers, sizes, strict=True)]
        return [memory[start : start + count] for start in range(0, len(memory), count)]


def describe(name: str, pool: HostPool, config: StorageConfig, one_page: Indices, number: int = 0) -> StoredPool | None:
    """How the pages of a host pool are stored; None for a pool without bytes.

    Args:
        name: SGLang's name of the pool.
        pool: the pool.
        config: ranks.
        one_page: the positions of the pool's first page.
        number: group of the store's layout.

    Raises:
        ConfigError: the pool's class or layout was not tested; the message names it.
    """
    kind, layout = type(pool).__name__, str(getattr(pool, "layout", None))
    if kind in WITHOUT_KV:
        return None
    if kind not in POOLS or not type(pool).__module__.startswith("sglang."):
        raise ConfigError(
            f"SGLang's host pool {name!r} is a {type(pool).__module__}.{kind}; allowed: {', '.join(sorted(POOLS))}. "
            "kvtier does not know what the bytes of another pool mean, and stores none. Serve this model without kvtier"
        )
    if layout not in POOLS[kind]:
        raise ConfigError(
            f"SGLang's host pool {name!r} ({kind}) has the layout {layout!r}; allowed: "
            f"{', '.join(sorted(POOLS[kind]))}. Set --hicache-mem-layout"
        )
    try:
        _, sizes = pool.get_page_buffer_meta(one_page)
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"SGLang's host pool {name!r} ({kind}, {layout}) does not give the addresses of its pages: "
            f"{error or type(error).__name__}. Serve this model without kvtier"
        ) from error
    holds, attributes = RUNS.get(kind, ("bytes", ()))
    dtypes = list({str(getattr(pool, it, None)) for it in attributes})
    runs = tuple((run_of(holds, dtypes[0] if len(dtypes) == 1 else "", int(size)),) for size in sizes)
    is_shared = bool(config.is_mla_model) and kind in SAME_ON_ALL_RANKS
    pieces = len(sizes)
    part = Part(0, pieces) if is_shared else Part(0, pieces, rank=config.tp_rank, ranks=config.tp_size)
    group = GroupLayout(
        validity=State() if kind in STATES else History(),
        layer_bytes=tuple(int(size) for size in sizes),
        pages=_pages(name, kind, layout, pool, config),
        part=part,
        runs=runs,
    )
    return StoredPool(name, pool, group, number)


def _pages(name: str, kind: str, layout: str, pool: HostPool, config: StorageConfig) -> str:
    """Everything that decides what the bytes of a page mean, besides the fingerprint."""
    values = {field: getattr(pool, field, None) for field in FIELDS}
    fields = {field: plain(value) for field, value in values.items() if value is not None}
    ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
    return json.dumps(["sglang", name, kind, layout, fields, ranks], separators=(",", ":"), sort_keys=True)
