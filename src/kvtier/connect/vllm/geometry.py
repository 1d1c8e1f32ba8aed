"""Lays out chunks in vLLM's block tables: maps a request's block ids to the addresses that the copier uses.

vLLM groups layers by page size as well as by attention rule, and may divide layers with one rule among several groups.
Here, groups with the same rule are merged, and each vLLM group is one `TableLayout`. The address of a chunk
(`Place.blocks`) consists of the block ids of its tables, one table after the other, each in token order:

    group 0, sliding window, 2 tables of 4 blocks:   [ table 0: 7 8 9 10 | table 1: 31 32 33 34 ]

`SKIP` replaces the id of a block that must not be written. Which blocks of a chunk an address contains depends on the
rule, given n tokens up to the chunk's end:

    history   all blocks
    window    the blocks that overlap the last `window` tokens before n
    state     the block with the state after n tokens

With decode context parallelism (DCP), a block id names one block on each of several ranks. Together these blocks
contain ``block_size * ranks`` consecutive tokens, dealt out in turns (`DcpShards`). Token counts refer to such whole
blocks, as in vLLM's scheduler (`resolve_dcp_kv_block_size`, vLLM 0.32 and 0.33).

With `store.token_shares` = N, a history of latents becomes N groups with the same blocks. Group s contains the tokens t
with ``t // interleave % N == s``, ascending, on whichever rank they are. So the group's bytes and names do not depend
on the sizes of TP, DCP and blocks. A rank has every group s with ``s % dcp`` equal to its number in the DCP group. With
N = 2 * dcp, the turns (`interleave` tokens each) of a block on rank r of its DCP group belong to these shares:

    turn      0      1        2         ...
    share     r      r + dcp  r         ...

Everything here is arithmetic on lists. Neither vLLM nor torch is imported.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from kvtier.connect.vllm.support import check_groups, specs_of, validity_of
from kvtier.connect.vllm.vllm_types import (
    BlockTables,
    KvCacheConfig,
    KvCacheSpec,
    StateOffer,
    VllmConfig,
    plain_name,
)
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.layout import (
    ELEMENT_BYTES,
    Axes,
    GroupLayout,
    History,
    KvLayout,
    Run,
    RunKind,
    State,
    Validity,
    Window,
    run_of,
)
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.types import Place

SKIP = -1
"""Replaces the id of a block that must not be written."""

NULL_BLOCK = 0
"""vLLM's id for a block that is no longer kept. It slid out of a window, or its state was superseded."""


class DcpShards(NamedTuple):
    """How decode context parallelism divides the tokens of a block among ranks."""

    ranks: int = 1
    interleave: int = 1
    """Consecutive tokens in one turn of a rank."""
    shares: int = 0
    """Number of token shares, a multiple of `ranks`. Each share is one group. If 0, a group has one rank's tokens."""

    @staticmethod
    def of(config: VllmConfig, shares: int = 0) -> "DcpShards":
        """Return an engine's division. Prefill context parallelism does not divide KV: each of its ranks has all KV.

        Args:
            config: the engine's configuration.
            shares: the setting `store.token_shares`.

        Raises:
            ConfigError: the ranks cannot have whole shares.
        """
        parallel = config.parallel_config
        size = parallel.decode_context_parallel_size
        if shares % size:
            raise ConfigError(
                f"does not fit decode_context_parallel_size = {size}",
                setting="store.token_shares",
                value=str(shares),
                allowed=f"0, or a multiple of {size}",
            )
        return DcpShards(size, parallel.cp_kv_cache_interleave_size, shares) if size > 1 or shares else UNDIVIDED

    def on(self, spec: KvCacheSpec) -> "DcpShards":
        """Return the division of one kind of KV. States and some draft layers are whole on each rank."""
        return self if self.shares or (self.ranks > 1 and spec.dcp_sharded) else UNDIVIDED

    def of_all(self, specs: Iterable[KvCacheSpec]) -> "DcpShards":
        """Return this division, without shares if some KV of the engine has no row of bytes for each token.

        Only MLA is certain to have such rows. Other backends may mix the tokens of a block, and their
        specifications do not say so.

        Raises:
            ConfigError: a block does not end with a whole turn of each share.
        """
        rows = [
            type(spec).__name__ == "MLAAttentionSpec" and _is_plain(spec) and (self.ranks == 1 or spec.dcp_sharded)
            for spec in specs
        ]
        if not self.shares or not all(rows):
            return self._replace(shares=0) if self.ranks > 1 else UNDIVIDED
        turn = self.interleave * self.shares // self.ranks
        sizes = [spec.block_size for spec in specs if spec.block_size % turn]
        if sizes:
            raise ConfigError(
                f"with decode_context_parallel_size = {self.ranks} and cp_kv_cache_interleave_size = "
                f"{self.interleave}, it does not fit blocks of {sizes[0]} tokens",
                setting="store.token_shares",
                value=str(self.shares),
                allowed=f"0, or this value with a block_size that is a multiple of {turn}",
            )
        return self


UNDIVIDED = DcpShards()


class TableLayout(NamedTuple):
    """One vLLM group as a part of a `Group`."""

    number: int
    """Index of the vLLM group in the block tables."""
    block_tokens: int
    """Tokens of a block, over all ranks that share them."""
    blocks: int
    """Number of blocks in an address: the last ones of the chunk."""
    layers: tuple[str, ...]
    """The layers of this vLLM group on the worker's pipeline stage. There may be none."""
    runs: tuple[Run, ...]
    """The runs of one block of one layer, without padding. There are several only if a chunk has one block."""
    pages: str
    """Name of a page's contents, from the configuration."""
    piece: int = 0
    """Index of this table among its `pieces`."""
    pieces: int = 1
    """Number of tables that share the rows of a block on one rank. Each table gets every `pieces`-th turn."""
    row_bytes: int = 0
    """Bytes of one turn."""
    channels: int = 0
    """Channels of a key and of a value; 0 if a page contains more than its block's keys and values."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer, without padding and other pieces."""
        return sum(run.size_bytes for run in self.runs)

    def run(self, chunk: int, chunk_tokens: int) -> tuple[int, int]:
        """Return the range of this table's positions that the address of `chunk` covers, as (first, last + 1)."""
        stop = (chunk + 1) * chunk_tokens // self.block_tokens
        return stop - self.blocks, stop


@dataclass(frozen=True, slots=True)
class Group:
    """The vLLM groups with one rule: full history, sliding window or recurrent state."""

    validity: Validity
    tables: tuple[TableLayout, ...]
    share: int = 0
    """Index of the group's token share; see `DcpShards.shares`."""
    shares: int = 0

    def needed_from(self, table: TableLayout, tokens: int) -> int:
        """Return the first block table position that a request requires to resume after `tokens`."""
        if isinstance(self.validity, History):
            return 0
        if isinstance(self.validity, Window):
            return max(0, tokens - self.validity.tokens) // table.block_tokens
        return tokens // table.block_tokens - 1


@dataclass(frozen=True)
class Geometry:
    """How one engine's KV is divided into chunks. Processes differ only in the layers of their pipeline stage.

    Args:
        chunk_tokens: tokens of a chunk.
        groups: one per rule.
    """

    chunk_tokens: int
    groups: tuple[Group, ...]

    @staticmethod
    def of(config: KvCacheConfig, chunk_tokens: int = 0, shards: DcpShards = UNDIVIDED) -> "Geometry":
        """Return the geometry of an engine.

        Args:
            config: `KVCacheConfig` of the scheduler or a worker.
            chunk_tokens: the setting `store.chunk_tokens`. 0 selects the smallest valid size of at least 256.
            shards: how tokens are divided among ranks.

        Raises:
            UnsupportedModelError: KV is of an unknown kind, or stored in an unknown way.
            ConfigError: `chunk_tokens` is not a multiple of vLLM's alignment.
        """
        check_groups(config)
        specs = [_spec_of(number, group) for number, group in enumerate(config.kv_cache_groups)]
        shards = shards.of_all(specs)
        sizes = [spec.block_size * shards.on(spec).ranks for spec in specs]
        alignment = math.lcm(config.cache_hit_alignment_tokens or 1, *sizes)
        tokens = choose_chunk_tokens(chunk_tokens, alignment)
        tables: dict[Validity, list[TableLayout]] = {}
        for number, spec in enumerate(specs):
            validity = validity_of(spec, f"KV group {number}")
            tables.setdefault(validity, []).append(_table(config, number, spec, validity, tokens, shards.on(spec)))
        for validity, members in tables.items():
            if not any(table.layers for table in members):
                raise UnsupportedModelError(
                    f"this pipeline stage has no layer with KV of the kind {validity}; each stage needs a layer of "
                    "every kind. Set VLLM_PP_LAYER_PARTITION, or a smaller pipeline_parallel_size"
                )
        groups = tuple(Group(validity, tuple(members)) for validity, members in tables.items())
        if shards.shares:
            groups = tuple(_share(group, share, shards) for group in groups for share in range(shards.shares))
        return Geometry(tokens, groups)

    @property
    def shape(self) -> str:
        """Text that must be equal on all workers: the size of chunks, and the pages of each vLLM group."""
        pages = "; ".join(f"{it.blocks} blocks of {it.block_tokens} tokens, {it.pages}" for it in self._tables)
        return f"chunks of {self.chunk_tokens} tokens: {pages}"

    @property
    def shares(self) -> int:
        """Number of token shares; 0 if the setting is off or has no effect."""
        return self.groups[0].shares

    @property
    def _tables(self) -> list[TableLayout]:
        """The tables, one for each vLLM group. A table that several shares use is listed once."""
        return list({table.number: table for group in self.groups for table in group.tables}.values())

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each group on this worker."""
        return tuple(sum(len(table.layers) for table in group.tables) for group in self.groups)

    @cached_property
    def layout(self) -> KvLayout:
        """Layout for the core. The `pages` of its groups lack a worker's details; see `layout_with`."""
        return self.layout_with({})

    def layout_with(self, details: Mapping[str, str], axes: Mapping[str, Axes] = MappingProxyType({})) -> KvLayout:
        """Return the layout of a worker.

        Args:
            details: for each layer, page properties that its configuration lacks, such as its attention backend.
            axes: for each layer whose backend defines them, the axes of a page, the first of which is `page`.
        """
        return KvLayout(self.chunk_tokens, tuple(_group_layout(group, details, axes) for group in self.groups))

    @cached_property
    def has_states(self) -> bool:
        """Whether any group has states. They are stored only if vLLM offers them."""
        return any(isinstance(group.validity, State) for group in self.groups)

    @cached_property
    def can_load_in_part(self) -> bool:
        """Whether vLLM can use the leading blocks of a load that failed later on.

        With several groups, vLLM accepts no report of single blocks. With a window, blocks before the load's end were
        never allocated, so no earlier boundary is valid. In both cases a partly failed load delivers nothing.
        """
        return len(self._tables) == 1 and isinstance(self.groups[0].validity, History)

    def hit_tokens(self, tokens: int) -> int:
        """Return the maximum number of tokens to load for a prompt of `tokens`. vLLM always computes the last token."""
        return max(tokens - 1, 0) // self.chunk_tokens * self.chunk_tokens

    def blocks(self, tokens: int) -> int:
        """Return the maximum number of blocks that `tokens` tokens occupy."""
        return sum(-(-tokens // table.block_tokens) for table in self._tables)

    # ---- stores ----------------------------------------------------------------------------------------------------

    def sources(self, chunks: Iterable[int], tables: BlockTables, offers: Iterable[StateOffer] = ()) -> list[Place]:
        """Return the places of chunks to store. A chunk some of whose blocks are missing is skipped.

        Args:
            chunks: computed chunks.
            tables: the request's block tables.
            offers: states that vLLM offered for this request and that are still valid. A block table does not suffice,
                because its block may hold the state of another boundary.
        """
        wanted = list(chunks)
        places: list[Place] = []
        for number, group in enumerate(self.groups):
            if isinstance(group.validity, State):
                places += self._states(number, group, frozenset(wanted), offers)
            else:
                found = (self._source(number, group, chunk, tables) for chunk in wanted)
                places += [place for place in found if place is not None]
        return places

    def _source(self, number: int, group: Group, chunk: int, tables: BlockTables) -> Place | None:
        blocks: list[int] = []
        for table in group.tables:
            start, stop = table.run(chunk, self.chunk_tokens)
            ids = tables[table.number][start:stop]
            if len(ids) < table.blocks or NULL_BLOCK in ids:
                return None
            blocks += ids
        return Place(number, chunk, tuple(blocks))

    def _states(self, number: int, group: Group, chunks: frozenset[int], offers: Iterable[StateOffer]) -> list[Place]:
        offered: dict[int, dict[int, int]] = {}
        for table, block, tokens in offers:
            chunk, rest = divmod(tokens, self.chunk_tokens)
            if not rest and block != NULL_BLOCK and chunk - 1 in chunks:
                offered.setdefault(chunk - 1, {})[table] = block
        numbers = [table.number for table in group.tables]
        return [
            Place(number, chunk, tuple(blocks[table] for table in numbers))
            for chunk, blocks in sorted(offered.items())
            if all(table in blocks for table in numbers)
        ]

    # ---- loads -----------------------------------------------------------------------------------------------------

    def targets(self, tokens: int, tables: BlockTables, resident_tokens: int = 0) -> list[Place] | None:
        """Return the places that a load of the leading `tokens` writes, or None if it does not fit the allocation.

        vLLM considers every allocated block up to `tokens` filled. So the load must write every one of these blocks
        that is not resident. Otherwise nothing is loaded. Resident blocks are never written, because other requests may
        read them.

        Args:
            tokens: a multiple of `chunk_tokens`.
            tables: the request's block tables, allocated up to `tokens`.
            resident_tokens: leading tokens in vLLM's own cache.

        Raises:
            ValueError: `tokens` is not a boundary.
        """
        if tokens % self.chunk_tokens or tokens < self.chunk_tokens:
            raise ValueError(f"tokens must be a multiple of {self.chunk_tokens}, got {tokens}")
        if tokens <= resident_tokens:
            return []
        places: list[Place] = []
        for number, group in enumerate(self.groups):
            chunks = self._chunks_to_load(group.validity, tokens, resident_tokens)
            if not all(_fits(group, table, chunks, tokens, resident_tokens, self, tables) for table in group.tables):
                return None
            places += [self._target(number, group, chunk, tables, resident_tokens) for chunk in chunks]
        return places

    def unfilled(self, tables: BlockTables, delivered_tokens: int, wanted_tokens: int) -> set[int]:
        """Return blocks that vLLM considers filled, but that a load of `delivered_tokens` did not fill."""
        found: set[int] = set()
        for table in self._tables:
            start, stop = delivered_tokens // table.block_tokens, wanted_tokens // table.block_tokens
            found.update(tables[table.number][start:stop])
        return found - {NULL_BLOCK}

    def _chunks_to_load(self, validity: Validity, tokens: int, resident_tokens: int) -> range:
        full = tokens // self.chunk_tokens
        first = resident_tokens // self.chunk_tokens
        if isinstance(validity, Window):
            first = max(first, max(0, tokens - validity.tokens) // self.chunk_tokens)
        elif isinstance(validity, State):
            first = full - 1
        return range(first, full)

    def _target(self, number: int, group: Group, chunk: int, tables: BlockTables, resident_tokens: int) -> Place:
        blocks: list[int] = []
        for table in group.tables:
            start, stop = table.run(chunk, self.chunk_tokens)
            resident = resident_tokens // table.block_tokens
            ids = tables[table.number][start:stop]
            blocks += [SKIP if start + at < resident or id_ == NULL_BLOCK else id_ for at, id_ in enumerate(ids)]
        return Place(number, chunk, tuple(blocks))


def _fits(
    group: Group,
    table: TableLayout,
    chunks: range,
    tokens: int,
    resident_tokens: int,
    geometry: Geometry,
    tables: BlockTables,
) -> bool:
    """Return whether a load of `chunks` fills exactly the blocks that vLLM allocated in one table."""
    ids = tables[table.number]
    stop = tokens // table.block_tokens
    resident = resident_tokens // table.block_tokens
    needed = max(resident, group.needed_from(table, tokens))
    written = max(resident, table.run(chunks.start, geometry.chunk_tokens)[0])
    has_all = len(ids) >= stop and NULL_BLOCK not in ids[needed:stop]
    return has_all and written <= needed and not any(ids[resident:written])


def _spec_of(number: int, group: KvCacheConfig) -> KvCacheSpec:
    """Return the first spec of a group's layers.

    A worker may have one spec per layer where the scheduler has only the first. All specs must have equal pages.
    """
    specs = specs_of(group.kv_cache_spec)
    kinds = {(type(spec).__name__, spec.block_size, _page_bytes(spec), _pages(spec)) for spec in specs}
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"KV group {number} has layers with different pages: {sorted(kinds)}. Serve the model without kvtier"
        )
    return specs[0]


def _table(
    config: KvCacheConfig, number: int, spec: KvCacheSpec, validity: Validity, chunk_tokens: int, shards: DcpShards
) -> TableLayout:
    group = config.kv_cache_groups[number]
    # A layer that shares another layer's KV is in the group but has no pages.
    placed = {layer for tensor in config.kv_cache_tensors for layer in tensor.layers}
    layers = tuple(layer for layer in group.layer_names if layer in placed)
    if group.layer_names and not layers:
        raise UnsupportedModelError(f"KV group {number} has no layer with its own pages")
    tokens = spec.block_size * shards.ranks
    if isinstance(validity, State):
        blocks = 1
    else:
        needed = chunk_tokens if isinstance(validity, History) else min(validity.tokens, chunk_tokens)
        blocks = -(-needed // tokens)
    pages = f"vllm/{config.kv_cache_layout}/{_pages(spec)}"
    if shards.shares:  # independent of the engine's blocks and ranks
        pages = f"{pages.replace(f'/N={spec.num_states}', '')}/shares={shards.shares}/interleave={shards.interleave}"
    elif shards.ranks > 1:
        pages += f"/dcp={shards.ranks}/interleave={shards.interleave}"
    return TableLayout(number, tokens, blocks, layers, _runs(spec), pages, channels=_channels(spec, tokens))


def _share(group: Group, share: int, shards: DcpShards) -> Group:
    """Return one share of a group's tokens."""
    pieces = shards.shares // shards.ranks
    tables: list[TableLayout] = []
    for table in group.tables:
        runs = tuple(run._replace(size_bytes=run.size_bytes // pieces) for run in table.runs)
        row_bytes = table.page_bytes * shards.ranks // table.block_tokens * shards.interleave
        tables.append(table._replace(runs=runs, piece=share // shards.ranks, pieces=pieces, row_bytes=row_bytes))
    return Group(group.validity, tuple(tables), share, shards.shares)


def _page_bytes(spec: KvCacheSpec) -> int:
    return spec.num_heads * spec.num_states * spec.state_content_size_bytes


def _runs(spec: KvCacheSpec) -> tuple[Run, ...]:
    """Return the runs of one block of a layer; a single run if the specification does not tell them apart."""
    name, size = type(spec).__name__, _page_bytes(spec)
    if name == "MambaSpec":
        states = [run_of("state", dtype, 0) for dtype in spec.dtypes]
        shapes = zip(states, spec.shapes, strict=True)
        runs = tuple(it._replace(size_bytes=math.prod(shape) * ELEMENT_BYTES[it.element]) for it, shape in shapes)
        return runs if sum(run.size_bytes for run in runs) == size else (Run("state", "bytes", size),)
    kind: RunKind = "latent" if "MLA" in name else "kv"
    return (run_of(kind, spec.dtype if _is_plain(spec) else "", size),)


def _is_plain(spec: KvCacheSpec) -> bool:
    """Return whether heads and dtype alone decide a page's size. Other pages contain more numbers, such as scales."""
    return getattr(spec, "state_content_bytes", None) is None


def _channels(spec: KvCacheSpec, block_tokens: int) -> int:
    """Return the channels of a key and of a value, or 0 if a block of `block_tokens` contains anything else."""
    is_dense = (
        type(spec).__name__ == "FullAttentionSpec"
        and _is_plain(spec)
        and (spec.head_size_v, spec.num_heads, spec.num_states) == (spec.head_size, spec.num_kv_heads, block_tokens)
    )
    return spec.head_size if is_dense else 0


def _pages(spec: KvCacheSpec) -> str:
    kind = type(spec).__name__.removesuffix("Spec")
    if kind == "Mamba":
        parts = (f"{'x'.join(map(str, s))}:{plain_name(d)}" for s, d in zip(spec.shapes, spec.dtypes, strict=True))
        return f"{plain_name(spec.mamba_type)}/{'+'.join(parts)}"
    numbers = f"H={spec.num_heads}/N={spec.num_states}/C={spec.state_content_size_bytes}"
    return f"{kind}/{plain_name(spec.dtype)}/{plain_name(spec.kv_quant_mode)}/{numbers}"


def _group_layout(group: Group, details: Mapping[str, str], axes: Mapping[str, Axes]) -> GroupLayout:
    runs: list[tuple[Run, ...]] = []
    of_runs: list[tuple[Axes | None, ...]] = []
    names: list[str] = []
    for table in group.tables:
        of_chunk = tuple(run._replace(size_bytes=run.size_bytes * table.blocks) for run in table.runs)
        runs += [of_chunk] * len(table.layers)
        of_runs += [_axes_of(of_chunk, table, axes.get(layer)) for layer in table.layers]
        found = [details.get(layer, "") for layer in table.layers]
        detail = found[0] if len(set(found)) == 1 else ",".join(found)
        extent = f"{table.blocks * table.block_tokens}" if group.shares else f"{table.blocks}x{table.block_tokens}"
        name = f"{len(table.layers)} layers of {extent} {table.pages} {detail}"
        names.append(name.rstrip())
    pages = "; ".join(f"{len(list(same))} * {text}" for text, same in groupby(names))
    layer_bytes = tuple(sum(run.size_bytes for run in layer) for layer in runs)
    return GroupLayout(group.validity, layer_bytes, pages, runs=tuple(runs), axes=tuple(of_runs))


def _axes_of(runs: tuple[Run, ...], table: TableLayout, page: Axes | None) -> tuple[Axes | None, ...]:
    """Return the axes of a layer's runs in a chunk, whose blocks are pages in the order of their tokens."""
    if page is None or len(runs) != 1:
        return (None,) * len(runs)
    return (page._replace(sizes=(page.sizes[0] * table.blocks, *page.sizes[1:])).fitting(runs[0]),)


def layer_starts(config: KvCacheConfig) -> dict[str, tuple[int, int]]:
    """Return (offset, block stride) of each layer in a worker's KV memory, in bytes."""
    return {
        layer: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
