"""Where vLLM keeps a chunk: from a request's block tables to the addresses that the copier understands.

vLLM sorts layers into groups by page size as much as by rule: Gemma-3's five sliding layers are five groups of one. We
merge groups of one rule; each vLLM group is one `TableLayout`. The address of a chunk (`Place.blocks`) is the
block ids of its tables, one table after the other, each in token order:

    group 0, sliding window, 2 tables of 4 blocks:   [ table 0: 7 8 9 10 | table 1: 31 32 33 34 ]

`SKIP` in place of an id means that nothing is to be written there. Which blocks of a chunk a table names follows from
the rule, for n tokens at the chunk's own end:

    history   all of them
    window    those that reach into the last `window` tokens before n
    state     the one that holds the state after n tokens

Everything here is arithmetic on lists; neither vLLM nor torch is imported.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from kvtier.connect.vllm.support import check_groups, specs_of, validity_of
from kvtier.connect.vllm.vllm_types import BlockTables, KvCacheConfig, KvCacheSpec, StateOffer, plain_name
from kvtier.errors import UnsupportedModelError
from kvtier.layout import GroupLayout, History, KvLayout, State, Validity, Window
from kvtier.runtime.open import choose_chunk_tokens
from kvtier.types import Place

SKIP = -1
"""Stands in an address for a block that is not to be written."""

NULL_BLOCK = 0
"""vLLM's block that stands for "not kept": slid out of a window, or a state that was superseded."""


class TableLayout(NamedTuple):
    """One vLLM group, as a part of one of ours."""

    number: int
    """Of the vLLM group: its place among the block tables."""
    block_tokens: int
    blocks: int
    """How many blocks of a chunk an address names: the last ones of the chunk."""
    layers: tuple[str, ...]
    page_bytes: int
    """Of one block of one layer, without padding."""
    pages: str
    """What lies inside a page, as far as the configuration tells."""

    def run(self, chunk: int, chunk_tokens: int) -> tuple[int, int]:
        """First and last (exclusive) position in the block table of what an address of `chunk` names."""
        stop = (chunk + 1) * chunk_tokens // self.block_tokens
        return stop - self.blocks, stop


@dataclass(frozen=True, slots=True)
class Group:
    """One of our groups: the vLLM groups that follow one rule."""

    validity: Validity
    tables: tuple[TableLayout, ...]

    def needed_from(self, table: TableLayout, tokens: int) -> int:
        """The first position in a block table that a request needs which resumes after `tokens`."""
        if isinstance(self.validity, History):
            return 0
        if isinstance(self.validity, Window):
            return max(0, tokens - self.validity.tokens) // table.block_tokens
        return tokens // table.block_tokens - 1


@dataclass(frozen=True)
class Geometry:
    """How one engine's KV is cut into chunks. The same in the scheduler and in every worker.

    Args:
        chunk_tokens: tokens of a chunk.
        alignment_tokens: tokens to which vLLM aligns hits, and blocks begin and end; divides `chunk_tokens`.
        groups: ours, each of one rule.
    """

    chunk_tokens: int
    alignment_tokens: int
    groups: tuple[Group, ...]

    @staticmethod
    def of(config: KvCacheConfig, chunk_tokens: int = 0) -> "Geometry":
        """The geometry of an engine.

        Args:
            config: `KVCacheConfig`, of the scheduler or of a worker.
            chunk_tokens: the setting `store.chunk_tokens`; 0 chooses the smallest that fits and is at least 256.

        Raises:
            UnsupportedModelError: KV of a kind, or in a place, that we do not know.
            ConfigError: `chunk_tokens` is not a multiple of what vLLM aligns to.
        """
        check_groups(config)
        specs = [_spec_of(number, group) for number, group in enumerate(config.kv_cache_groups)]
        alignment = math.lcm(config.cache_hit_alignment_tokens or 1, *(spec.block_size for spec in specs))
        tokens = choose_chunk_tokens(chunk_tokens, alignment)
        tables: dict[Validity, list[TableLayout]] = {}
        for number, spec in enumerate(specs):
            validity = validity_of(spec, f"KV group {number}")
            tables.setdefault(validity, []).append(_table(config, number, spec, validity, tokens))
        groups = tuple(Group(validity, tuple(members)) for validity, members in tables.items())
        return Geometry(tokens, alignment, groups)

    @cached_property
    def layout(self) -> KvLayout:
        """What the core needs to know. The `pages` of its groups lack what only a worker sees; see `layout_with`."""
        return self.layout_with({})

    def layout_with(self, details: Mapping[str, str]) -> KvLayout:
        """The layout of a worker.

        Args:
            details: for each layer what its configuration does not tell of the bytes of a page, such as the backend
                that wrote them.
        """
        return KvLayout(self.chunk_tokens, tuple(_group_layout(group, details) for group in self.groups))

    @cached_property
    def has_states(self) -> bool:
        """Whether some group keeps states, which are stored only from vLLM's offers."""
        return any(isinstance(group.validity, State) for group in self.groups)

    @cached_property
    def can_load_in_part(self) -> bool:
        """Whether vLLM can use the leading blocks of a load whose rest failed.

        With several groups it takes no report of single blocks. With a window the blocks before the load's end were
        never allocated, so no earlier boundary can be resumed from. Then a failed load counts for nothing.
        """
        tables = [table for group in self.groups for table in group.tables]
        return len(tables) == 1 and isinstance(self.groups[0].validity, History)

    def hit_tokens(self, tokens: int) -> int:
        """The most tokens that can be given to a prompt of so many: vLLM computes at least the last one itself."""
        return max(tokens - 1, 0) // self.chunk_tokens * self.chunk_tokens

    def blocks(self, tokens: int) -> int:
        """How many blocks so many tokens take at most."""
        return sum(-(-tokens // table.block_tokens) for group in self.groups for table in group.tables)

    # ---- stores ----------------------------------------------------------------------------------------------------

    def sources(self, chunks: Iterable[int], tables: BlockTables, offers: Iterable[StateOffer] = ()) -> list[Place]:
        """Where chunks can be read from now; what is not all there is left out.

        Args:
            chunks: whose tokens have been computed, and are known.
            tables: the request's.
            offers: blocks with states that vLLM has offered for this request and that still hold them. States are taken
                from nowhere else: a block at the right place of a table may hold the state of another boundary.
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
        """Where a load of the leading `tokens` has to go; None when it cannot be done there.

        vLLM takes every block that it allocated up to `tokens` for filled. So each of those that are not resident must
        be one that we write, or nothing is loaded. Resident blocks are never written: others may be reading them.

        Args:
            tokens: a multiple of `chunk_tokens`.
            tables: the request's, allocated up to `tokens`.
            resident_tokens: leading tokens whose KV vLLM has already.

        Raises:
            ValueError: `tokens` is no boundary.
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
        """The blocks that vLLM takes for filled and that are not, after a load that ended early."""
        found: set[int] = set()
        for group in self.groups:
            for table in group.tables:
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
    """Whether what vLLM allocated in one table is just what a load of `chunks` fills."""
    ids = tables[table.number]
    stop = tokens // table.block_tokens
    resident = resident_tokens // table.block_tokens
    needed = max(resident, group.needed_from(table, tokens))
    written = max(resident, table.run(chunks.start, geometry.chunk_tokens)[0])
    has_all = len(ids) >= stop and NULL_BLOCK not in ids[needed:stop]
    return has_all and written <= needed and not any(ids[resident:written])


def _spec_of(number: int, group: KvCacheConfig) -> KvCacheSpec:
    """The one spec of a group's layers.

    A worker may have one for each layer where the scheduler has only the first one's: they must be alike in all that we
    take from them.
    """
    specs = specs_of(group.kv_cache_spec)
    told = {(type(spec).__name__, spec.block_size, _page_bytes(spec), _pages(spec)) for spec in specs}
    if len(told) > 1:
        raise UnsupportedModelError(
            f"KV group {number} has layers with different pages: {sorted(told)}. Serve the model without kvtier"
        )
    return specs[0]


def _table(config: KvCacheConfig, number: int, spec: KvCacheSpec, validity: Validity, chunk_tokens: int) -> TableLayout:
    group = config.kv_cache_groups[number]
    # Layers that share another one's KV are in the group, but have no pages of their own.
    placed = {layer for tensor in config.kv_cache_tensors for layer in tensor.layers}
    layers = tuple(layer for layer in group.layer_names if layer in placed)
    if not layers:
        raise UnsupportedModelError(f"KV group {number} has no layer with pages of its own")
    if isinstance(validity, State):
        blocks = 1
    else:
        needed = chunk_tokens if isinstance(validity, History) else min(validity.tokens, chunk_tokens)
        blocks = -(-needed // spec.block_size)
    pages = f"vllm/{config.kv_cache_layout}/{_pages(spec)}"
    return TableLayout(number, spec.block_size, blocks, layers, _page_bytes(spec), pages)


def _page_bytes(spec: KvCacheSpec) -> int:
    return spec.num_heads * spec.num_states * spec.state_content_size_bytes


def _pages(spec: KvCacheSpec) -> str:
    kind = type(spec).__name__.removesuffix("Spec")
    if kind == "Mamba":
        parts = (f"{'x'.join(map(str, s))}:{plain_name(d)}" for s, d in zip(spec.shapes, spec.dtypes, strict=True))
        return f"{plain_name(spec.mamba_type)}/{'+'.join(parts)}"
    numbers = f"H={spec.num_heads}/N={spec.num_states}/C={spec.state_content_size_bytes}"
    return f"{kind}/{plain_name(spec.dtype)}/{plain_name(spec.kv_quant_mode)}/{numbers}"


def _group_layout(group: Group, details: Mapping[str, str]) -> GroupLayout:
    layer_bytes: list[int] = []
    told: list[str] = []
    for table in group.tables:
        layer_bytes += [table.blocks * table.page_bytes] * len(table.layers)
        known = _distinct(details.get(layer, "") for layer in table.layers)
        told.append(f"{len(table.layers)} layers of {table.blocks}x{table.block_tokens} {table.pages} {known}".rstrip())
    pages = "; ".join(f"{len(list(same))} * {text}" for text, same in groupby(told))
    return GroupLayout(group.validity, tuple(layer_bytes), pages)


def _distinct(details: Iterable[str]) -> str:
    """What all layers have in common in one word, or the word of each."""
    told = list(details)
    return told[0] if len(set(told)) == 1 else ",".join(told)
