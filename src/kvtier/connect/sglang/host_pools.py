"""Describes SGLang's host pools: which pools are stored, what identifies a page's bytes, and where the bytes are.

A page is opaque. Its object contains the pieces that the pool itself reports (`get_page_buffer_meta`): K and V of all
layers, K and V of each layer, or one latent. Only tested classes are stored, by exact name, because a subclass may
store something else.
"""

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from kvtier.connect.fingerprint_exclusions import plain
from kvtier.connect.sglang.sglang_types import HostPool, Indices, StorageConfig
from kvtier.errors import ConfigError
from kvtier.layout import Axes, Axis, GroupLayout, History, Part, Run, RunKind, State, run_of

KV = "kv"
"""SGLang's name for the pool that holds the KV of tokens. Other pools belong to windows, states and indexers."""

POOLS: Mapping[str, frozenset[str]] = {
    "MHATokenToKVPoolHost": frozenset({"layer_first", "page_first", "page_first_direct", "page_head"}),
    "AsymmetricMHATokenToKVPoolHost": frozenset({"page_first", "page_first_direct"}),
    "MLATokenToKVPoolHost": frozenset({"layer_first", "page_first", "page_first_direct"}),
    "MambaPoolHost": frozenset({"page_first", "page_first_direct"}),
    "DSAIndexerPoolHost": frozenset({"page_first", "page_first_direct"}),
    "DeepSeekV4PagedHostPool": frozenset({"layer_first", "page_first", "page_first_direct"}),
    "DeepSeekV4StateHostPool": frozenset({"layer_first", "page_first", "page_first_direct"}),
}
"""The host pools and layouts that are stored."""

WITHOUT_KV = frozenset({"LogicalHostPool"})
"""Pools that hold positions for other pools' pages. These pools have no bytes."""

SAME_ON_ALL_RANKS = frozenset({
    "MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool", "DeepSeekV4StateHostPool",
})  # fmt: skip
"""Pools with equal contents on every tensor-parallel rank of a model with a replicated cache. One rank writes them."""

STATES = frozenset({"MambaPoolHost"})
"""Pools of recurrent states. A page is valid only at its own boundary."""

RUNS: Mapping[str, tuple[RunKind, tuple[str, ...]]] = {
    "MHATokenToKVPoolHost": ("kv", ("dtype",)),
    "AsymmetricMHATokenToKVPoolHost": ("kv", ("dtype",)),
    "MLATokenToKVPoolHost": ("latent", ("dtype",)),
    "MambaPoolHost": ("state", ("conv_dtype", "temporal_dtype")),
    "DSAIndexerPoolHost": ("index", ()),
}
"""The kind of a page's pieces, and the pool's attributes that give their dtype. Pieces of mixed dtypes are `bytes`."""

ARRANGEMENTS: Mapping[str, tuple[tuple[Axis, ...], tuple[str, ...]]] = {
    "layer_first": (("token", "head", "channel"), ("page_size", "head_num")),
    "page_first": (("token", "head", "channel"), ("page_size", "layer_num head_num")),
    "page_first_direct": (("layer", "token", "head", "channel"), ("layer_num", "page_size", "head_num")),
    "page_head": (("layer", "token", "head", "channel"), ("head_num", "page_size", "layer_num")),
}
"""The axes of a piece with keys or values, by layout. Each axis except `channel` has the pool attributes whose product
is its size. Codecs mix neither heads nor layers, so these two axes are interchangeable."""

FIELDS = (
    "page_size", "logical_page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num",
    "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "item_bytes",
    "state_page_bytes", "slot_page_size", "num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "dtype",
    "conv_dtype", "temporal_dtype", "indexer_dtype", "indexer_page_stride_size", "ring_size", "dcp_size",
    "storage_format_tag",
)  # fmt: skip
"""Attributes that define the meaning of a pool's bytes. Each pool has some of them."""


@dataclass(frozen=True)
class StoredPool:
    """A host pool whose pages are stored."""

    name: str
    """SGLang's name for the pool, such as ``kv``."""
    pool: HostPool
    layout: GroupLayout
    """The layout of a page."""
    number: int
    """Number of the pool's group in the store's layout."""

    @property
    def page_size(self) -> int:
        """Number of positions in one page."""
        return int(self.pool.page_size)

    @property
    def page_bytes(self) -> int:
        """Number of bytes in a page."""
        return sum(self.layout.layer_bytes)

    def are_pages(self, indices: Indices) -> bool:
        """Return whether these positions are whole pages. SGLang's pools use only the first position of each page."""
        pages = indices.reshape(-1, self.page_size)
        starts = pages[:, 0]
        return bool((starts % self.page_size == 0).all()) and bool((pages.diff(dim=1) == 1).all())

    def pieces(self, indices: Indices) -> list[list[Any]]:
        """Return the memory of each page, in pieces.

        Args:
            indices: `page_size` positions for each page.
        """
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        count = len(self.layout.layer_bytes)
        memory = [(ctypes.c_uint8 * size).from_address(at) for at, size in zip(pointers, sizes, strict=True)]
        return [memory[start : start + count] for start in range(0, len(memory), count)]


def describe(name: str, pool: HostPool, config: StorageConfig, one_page: Indices, number: int = 0) -> StoredPool | None:
    """Return how a host pool's pages are stored; None if the pool has no bytes.

    Args:
        name: SGLang's name for the pool.
        pool: the pool.
        config: SGLang's storage configuration, with the ranks.
        one_page: the positions of the pool's first page.
        number: the pool's group in the store's layout.

    Raises:
        ConfigError: the pool's class or layout has not been tested. The message names it.
    """
    kind, layout = type(pool).__name__, str(getattr(pool, "layout", None))
    if kind in WITHOUT_KV:
        return None
    if kind not in POOLS or not type(pool).__module__.startswith("sglang."):
        raise ConfigError(
            f"SGLang's host pool {name!r} is a {type(pool).__module__}.{kind}; allowed: {', '.join(sorted(POOLS))}. "
            "kvtier cannot interpret other pools, so it stores none of them. Serve this model without kvtier"
        )
    if layout not in POOLS[kind]:
        raise ConfigError(
            f"SGLang's host pool {name!r} ({kind}) has the layout {layout!r}; allowed: "
            f"{', '.join(sorted(POOLS[kind]))}. Set --hicache-mem-layout to one of them"
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
        axes=_axes(layout, pool, runs) if name == KV and holds == "kv" else (),
    )
    return StoredPool(name, pool, group, number)


def _axes(layout: str, pool: HostPool, runs: Sequence[tuple[Run]]) -> tuple[tuple[Axes | None], ...]:
    """Return the axes of a page's pieces. `get_page_buffer_meta` returns keys and values alternately.

    If a pool of another release lacks an attribute, its pieces have no axes.
    """
    names, attributes = ARRANGEMENTS[layout]
    outer = [math.prod(int(getattr(pool, it, 0)) for it in product.split()) for product in attributes]
    keys = Axes(names, (*outer, int(getattr(pool, "head_dim", 0))), "keys")
    values = Axes(names, (*outer, int(getattr(pool, "v_head_dim", 0))), "values")
    return tuple((side.fitting(run),) for (run,), side in zip(runs, cycle((keys, values)), strict=False))


def _pages(name: str, kind: str, layout: str, pool: HostPool, config: StorageConfig) -> str:
    """Return all that determines the meaning of a page's bytes and that the fingerprint does not cover."""
    values = {field: getattr(pool, field, None) for field in FIELDS}
    fields = {field: plain(value) for field, value in values.items() if value is not None}
    ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
    return json.dumps(["sglang", name, kind, layout, fields, ranks], separators=(",", ":"), sort_keys=True)
