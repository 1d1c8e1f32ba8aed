"""SGLang's host pools: which ones are stored, what identifies the bytes of a page, and where they lie.

A page is opaque. Its object holds the pieces that the pool itself names (`get_page_buffer_meta`): K and V of all
layers, or of each layer, or one latent. Only tested classes are stored, by exact name, since a subclass may have
another meaning.
"""

import ctypes
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvtier.connect.sglang.sglang_types import HostPool, Indices, StorageConfig
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, Part, State

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

FIELDS = (
    "page_size", "logical_page_size", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num",
    "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "item_bytes",
    "state_page_bytes", "slot_page_size", "num_mamba_layers", "conv_state_shapes", "temporal_state_shape", "dtype",
    "conv_dtype", "temporal_dtype", "indexer_dtype", "indexer_page_stride_size", "ring_size", "dcp_size",
    "storage_format_tag",
)  # fmt: skip
"""Attributes of a pool that say what its bytes mean; a pool has some of them."""

GRID_LAYOUT = "page_head"
"""The layout in which the heads of a page are divided by an offset: ranks of other tensor parallel sizes can share."""


@dataclass(frozen=True)
class StoredPool:
    """A host pool whose pages are stored."""

    name: str
    """SGLang's name of the pool, such as ``kv``."""
    pool: HostPool
    layout: GroupLayout
    """Of one object. A page has `cells` objects."""
    first_cell: int = 0
    cells: int = 1
    grid: int = 0
    """Cells of the whole model, if ranks of other sizes share them; else 0."""

    @property
    def page_size(self) -> int:
        """Positions of one page."""
        return int(self.pool.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, in all of its objects."""
        return self.cells * sum(self.layout.layer_bytes)

    def are_pages(self, indices: Indices) -> bool:
        """Whether these positions are whole pages: SGLang's pools take the first of each and add the page's length."""
        pages = indices.reshape(-1, self.page_size)
        starts = pages[:, 0]
        return bool((starts % self.page_size == 0).all()) and bool((pages.diff(dim=1) == 1).all())

    def pieces(self, indices: Indices) -> list[list[Any]]:
        """The memory of each object of these pages, in pieces; cells of a page follow each other.

        Args:
            indices: `page_size` positions for each page.
        """
        pointers, sizes = _meta(self.pool, indices, self.cells)
        count = len(self.layout.layer_bytes)
        memory = [(ctypes.c_uint8 * size).from_address(at) for at, size in zip(pointers, sizes, strict=True)]
        return [memory[start : start + count] for start in range(0, len(memory), count)]


def describe(name: str, pool: HostPool, config: StorageConfig, one_page: Indices) -> StoredPool | None:
    """How the pages of a host pool are stored; None for a pool without bytes.

    Args:
        name: SGLang's name of the pool.
        pool: the pool.
        config: ranks.
        one_page: the positions of the pool's first page.

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
    grid = _grid(kind, layout, config)
    cells = grid // config.tp_size if grid else 1
    try:
        _, sizes = _meta(pool, one_page, cells)
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"SGLang's host pool {name!r} ({kind}, {layout}) does not give the addresses of its pages: "
            f"{error or type(error).__name__}. Serve this model without kvtier"
        ) from error
    pieces = len(sizes) // cells
    is_shared = bool(grid) or (bool(config.is_mla_model) and kind in SAME_ON_ALL_RANKS)
    part = Part(0, pieces) if is_shared else Part(0, pieces, rank=config.tp_rank, ranks=config.tp_size)
    return StoredPool(
        name=name,
        pool=pool,
        layout=GroupLayout(
            validity=State() if kind in STATES else History(),
            layer_bytes=tuple(int(size) for size in sizes[:pieces]),
            pages=_pages(name, kind, layout, pool, config, cells),
            part=part,
        ),
        first_cell=config.tp_rank * cells if grid else 0,
        cells=cells,
        grid=grid,
    )


def _grid(kind: str, layout: str, config: StorageConfig) -> int:
    """Cells into which the heads of the whole model are divided, for ranks of other sizes; 0: they share nothing."""
    if not config.tp_lcm_size or layout != GRID_LAYOUT or kind != "MHATokenToKVPoolHost" or config.is_mla_model:
        return 0
    if config.attn_cp_size > 1:
        return 0
    return int(config.tp_lcm_size)


def _meta(pool: HostPool, indices: Indices, cells: int) -> tuple[Sequence[int], Sequence[int]]:
    """Addresses and lengths of the pieces of these pages."""
    if cells > 1:
        return pool.get_split_heads_page_buffer_meta(indices, cells)
    return pool.get_page_buffer_meta(indices)


def _pages(name: str, kind: str, layout: str, pool: HostPool, config: StorageConfig, cells: int) -> str:
    """Everything that decides what the bytes of an object mean, besides the fingerprint."""
    fields: dict[str, object] = {}
    for field in FIELDS:
        value = getattr(pool, field, None)
        if value is not None:
            fields[field] = value // cells if field == "head_num" else _plain(value)
    ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
    return json.dumps(["sglang", name, kind, layout, fields, ranks], separators=(",", ":"), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    return str(value)
