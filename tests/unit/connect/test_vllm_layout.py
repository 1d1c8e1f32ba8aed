"""Chunks lie where vLLM's block tables say, and a load fills just what vLLM takes for filled; on recorded engines."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.refusals import refuses
from tests.vllm_config import vllm_config
from tests.vllm_recorded import Recorded, recorded

from kvtier.connect.vllm.geometry import NULL_BLOCK, SKIP, UNDIVIDED, DcpShards, Geometry
from kvtier.core.prefix import needed_chunks
from kvtier.errors import UnsupportedModelError
from kvtier.layout import History, State, Window
from kvtier.types import ChunkKey, Place, Prefix

SERVED = ["llama128", "llama32", "llama32_f32", "llama_fp8", "mla", "swa128", "swa32", "swa_win100", "gdn", "mamba"]


def geometry(case: str, **options: int) -> Geometry:
    return Geometry.of(recorded(case).config, **options)


def step(engine: Recorded, tokens: int) -> Any:
    return next(step for step in engine.steps if step.tokens == tokens)


def places(found: list[Place], group: int) -> dict[int, tuple[int, ...]]:
    return {place.chunk: place.blocks for place in found if place.group == group}


# ---- groups and sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "chunk_tokens", "rules", "layer_bytes"),
    [
        ("llama128", 256, [History()], [(131072,) * 4]),
        ("llama32", 256, [History()], [(131072,) * 4]),
        ("llama32_f32", 256, [History()], [(262144,) * 4]),
        ("llama_fp8", 256, [History()], [(65536,) * 4]),
        ("mla", 256, [History()], [(294912,) * 2]),
        # Five groups of one sliding layer each are one of ours. A window of 256 needs the 255 tokens before a boundary.
        ("swa128", 256, [Window(255), History()], [(131072,) * 5, (131072,)]),
        # A window of 100 needs four blocks of 32 of each chunk.
        ("swa_win100", 256, [Window(99), History()], [(65536,) * 5, (131072,)]),
        # A state's page is padded to 131,072 bytes; what counts are 68,608.
        ("gdn", 256, [State(), History()], [(68608,) * 3, (131072,)]),
        ("mamba", 384, [History(), State()], [(196608,) * 2, (134912,) * 2]),
    ],
)
def test_groups_of_one_rule_become_one(case, chunk_tokens, rules, layer_bytes):
    found = geometry(case)
    assert found.chunk_tokens == chunk_tokens
    assert [group.validity for group in found.groups] == rules
    assert [group.layer_bytes for group in found.layout.groups] == layer_bytes


@pytest.mark.parametrize(
    ("case", "runs"),
    [
        ("llama32_f32", [[("kv", "fp32", 262144)]]),
        ("llama_fp8", [[("kv", "bytes", 65536)]]),  # vLLM calls its numbers bytes
        ("mla", [[("latent", "bf16", 294912)]]),
        ("gdn", [[("state", "bf16", 3072), ("state", "fp32", 65536)], [("kv", "bf16", 131072)]]),
    ],
)
def test_a_layer_says_which_numbers_it_holds(case, runs):
    assert [[tuple(run) for run in group.runs[0]] for group in geometry(case).layout.groups] == runs


def test_scheduler_and_worker_agree_on_all_but_the_names_of_pages():
    found = geometry("swa32")
    worker = found.layout_with({"model.layers.5.self_attn.attn": "CPU_ATTN:amx"})
    assert [group.layer_bytes for group in worker.groups] == [group.layer_bytes for group in found.layout.groups]
    assert worker.groups[1].pages.endswith("CPU_ATTN:amx")
    assert worker.digest(0) == found.layout.digest(0)
    assert worker.digest(1) != found.layout.digest(1)


@pytest.mark.parametrize(
    ("owner", "fields"),
    [
        ("spec", {"dtype": "torch.float16"}),  # as many bytes, other numbers
        ("spec", {"num_heads": 1, "state_content_size_bytes": 512}),  # as many bytes, other heads
        ("spec", {"block_size": 64, "num_states": 64}),
        ("config", {"kv_cache_layout": "LBNHC"}),
    ],
)
def test_other_pages_have_other_names(owner, fields):
    config = recorded("llama32").config
    before = Geometry.of(config).layout.digest(0)
    vars(config if owner == "config" else config.kv_cache_groups[0].kv_cache_spec).update(fields)
    assert Geometry.of(config).layout.digest(0) != before


def test_the_chunk_is_a_multiple_of_every_block_and_of_what_hits_are_aligned_to():
    engine = recorded("swa32")
    for group in engine.config.kv_cache_groups[:5]:
        group.kv_cache_spec.block_size = 48
    found = Geometry.of(engine.config)
    assert found.chunk_tokens == 288
    assert Geometry.of(engine.config, chunk_tokens=96).chunk_tokens == 96
    with refuses("store.chunk_tokens", value="100", allowed="0, or a multiple of 96"):
        Geometry.of(engine.config, chunk_tokens=100)
    engine.config.cache_hit_alignment_tokens = 528
    assert Geometry.of(engine.config).chunk_tokens == 1056


def test_a_block_that_ranks_share_has_the_tokens_of_all():
    config = recorded("gdn").config
    for group in config.kv_cache_groups:
        group.kv_cache_spec.block_size = 32
    alone, shared = Geometry.of(config), Geometry.of(config, shards=DcpShards(4, 8))
    assert shared.chunk_tokens == alone.chunk_tokens == 256
    # A state is whole on each rank.
    assert [[table.block_tokens for table in group.tables] for group in shared.groups] == [[32] * 3, [128]]
    assert [[table.blocks for table in group.tables] for group in shared.groups] == [[1] * 3, [2]]
    assert Geometry.of(config, shards=DcpShards(16)).chunk_tokens == 512
    states, ids = [NULL_BLOCK] * 15 + [9], [1, 2, 3, 4]
    assert [place.blocks for place in shared.sources(range(2), [*[states] * 3, ids])] == [(1, 2), (3, 4)]
    loaded = shared.targets(512, [*[states] * 3, ids], resident_tokens=128)
    assert loaded is not None
    assert places(loaded, 1) == {0: (SKIP, 2), 1: (3, 4)}
    assert shared.blocks(257) == 3 * 9 + 3


def test_another_division_of_tokens_has_other_names():
    config = recorded("llama32").config
    shards = [UNDIVIDED, DcpShards(2), DcpShards(4), DcpShards(2, 16)]
    layouts = [Geometry.of(config, shards=it).layout for it in shards]
    assert {layout.chunk_tokens for layout in layouts} == {256}
    assert len({layout.digest(0) for layout in layouts}) == len(shards)
    assert Geometry.of(config, shards=UNDIVIDED) == Geometry.of(config)


@pytest.mark.parametrize(
    ("sizes", "interleave", "shares", "problem", "allowed"),
    [
        ((4, 4), 1, 6, "decode_context_parallel_size = 4", "a multiple of 4"),
        ((4, 2), 8, 8, "blocks of 16 tokens", "block_size that is a multiple of 32"),
        ((2, 1), 4, 8, "blocks of 16 tokens", "block_size that is a multiple of 32"),
    ],
)
def test_shares_that_ranks_or_blocks_cannot_hold_whole_are_refused(sizes, interleave, shares, problem, allowed):
    tp, dcp = sizes
    engine = vllm_config(
        parallel__tensor_parallel_size=tp,
        parallel__decode_context_parallel_size=dcp,
        parallel__cp_kv_cache_interleave_size=interleave,
    )
    with refuses("store.token_shares", problem, value=str(shares), allowed=allowed):
        Geometry.of(recorded("mla").config, shards=DcpShards.of(engine, shares))


@pytest.mark.parametrize("change", [{"state_content_bytes": 1152}, {"dcp_sharded": False}])
def test_latents_with_other_numbers_or_whole_on_each_rank_have_no_shares(change):
    config = recorded("mla").config
    vars(config.kv_cache_groups[0].kv_cache_spec).update(change)
    assert Geometry.of(config, shards=DcpShards(2, 1, 4)) == Geometry.of(config, shards=DcpShards(2, 1))


def test_the_places_of_shares_are_the_same_blocks_and_their_names_have_no_sizes_of_an_engine():
    config = recorded("mla").config
    found, tables = Geometry.of(config, shards=DcpShards(2, 1, 4)), [[7, 8, 9, 10, 11, 12, 13, 14, 15, 16]]
    assert places(found.sources([0], tables), 0) == {0: tuple(range(7, 15))}
    assert [place.group for place in found.sources([0], tables)] == [0, 1, 2, 3]
    assert {place.blocks for place in found.targets(256, tables, resident_tokens=32) or []} == {(SKIP, *range(8, 15))}
    assert found.unfilled(tables, 128, 256) == set(range(11, 15))
    assert found.blocks(256) == 8
    assert found.can_load_in_part
    config.kv_cache_groups[0].kv_cache_spec.block_size = config.kv_cache_groups[0].kv_cache_spec.num_states = 32
    shards = [DcpShards(1, 1, 4), DcpShards(4, 1, 4), DcpShards(2, 2, 4), DcpShards(2, 1, 8), DcpShards(1, 1, 0)]
    digests = [Geometry.of(config, shards=it).layout.digest(0) for it in shards]
    assert [it == found.layout.digest(0) for it in digests] == [True, True, False, False, False]
    assert len(set(digests)) == 4


def test_layers_that_share_another_ones_kv_have_no_pages():
    engine = recorded("llama32")
    engine.config.kv_cache_groups[0].layer_names.append("model.layers.4.self_attn.attn")  # what a worker adds
    assert Geometry.of(engine.config) == geometry("llama32")


def test_a_workers_layers_must_have_equal_pages():
    engine = recorded("llama32")
    group = engine.config.kv_cache_groups[0]
    same = group.kv_cache_spec
    wrapper = type("UniformTypeKVCacheSpecs", (SimpleNamespace,), {})
    group.kv_cache_spec = wrapper(kv_cache_specs=dict.fromkeys(group.layer_names, same))
    assert Geometry.of(engine.config) == geometry("llama32")
    other = type(same)(**{**vars(same), "num_heads": 4})
    group.kv_cache_spec.kv_cache_specs[group.layer_names[-1]] = other
    with pytest.raises(UnsupportedModelError, match="group 0 has layers with different pages"):
        Geometry.of(engine.config)


@pytest.mark.parametrize(("tokens", "most"), [(0, 0), (1, 0), (256, 0), (257, 256), (700, 512), (768, 512), (769, 768)])
def test_a_hit_leaves_a_token_to_compute(tokens, most):
    assert geometry("llama32").hit_tokens(tokens) == most


# ---- stores ------------------------------------------------------------------------------------------------------


def test_the_chunks_of_a_prompt_that_are_wholly_allocated_lie_in_its_table():
    engine = recorded("llama32")
    for asked in (range(2), range(5)):
        found = Geometry.of(engine.config).sources(asked, step(engine, 700).blocks)
        assert found == [Place(0, 0, tuple(range(1, 9))), Place(0, 1, tuple(range(9, 17)))]


def test_blocks_of_another_order_are_named_in_token_order():
    engine = recorded("mla")
    tables = step(engine, 3000).blocks
    assert tables[0][:3] == [49, 48, 47]
    found = Geometry.of(engine.config).sources([1], tables)
    assert found == [Place(0, 1, tuple(tables[0][16:32]))]


def test_a_chunk_that_is_not_wholly_allocated_is_left_out():
    engine = recorded("llama32")
    tables = step(engine, 700).blocks
    assert Geometry.of(engine.config).sources(range(5), tables) == Geometry.of(engine.config).sources(range(2), tables)


def test_a_window_is_stored_while_it_is_there():
    engine = recorded("swa128")
    found = Geometry.of(engine.config).sources(range(2), step(engine, 700).blocks)
    assert places(found, 0)[1] == (3, 4, 9, 10, 15, 16, 21, 22, 27, 28)
    assert places(found, 1) == {0: (31, 32), 1: (33, 34)}
    slid = next(step for step in engine.steps if step.tokens == 1)
    assert slid.blocks[0] == [0, 0, 0, 4, 5, 6]
    found = Geometry.of(engine.config).sources(range(2), slid.blocks)
    assert places(found, 0) == {}, "block 2 of the table has slid out, so neither chunk has its whole window"
    assert places(found, 1) == {0: (31, 32), 1: (33, 34)}


def test_of_a_small_window_only_the_blocks_it_needs_are_stored():
    engine = recorded("swa_win100")
    tables = step(engine, 700).blocks
    found = Geometry.of(engine.config).sources([0, 1], tables)
    assert places(found, 0)[0] == tuple(block for table in tables[:5] for block in table[4:8])
    assert places(found, 1)[0] == tuple(tables[5][:8])


def test_states_are_stored_from_offers_only():
    engine = recorded("gdn")
    first, second = engine.steps[0], engine.steps[1]
    assert first.offers == [(0, 1, 512), (1, 2, 512), (2, 3, 512)]
    found = Geometry.of(engine.config).sources(range(2), first.blocks, first.offers)
    assert found == [Place(0, 1, (1, 2, 3)), Place(1, 0, (4,)), Place(1, 1, (5,))]
    # Block 6 is at the place of the third chunk, but holds the state after 700 tokens.
    assert second.blocks[0] == [0, 1, 6]
    assert places(Geometry.of(engine.config).sources(range(3), second.blocks), 0) == {}


def test_an_offer_counts_when_all_tables_have_it_and_it_lies_on_a_chunk():
    engine = recorded("gdn")
    found, tables = Geometry.of(engine.config), engine.steps[0].blocks
    assert places(found.sources(range(2), tables, [(0, 1, 512), (1, 2, 512)]), 0) == {}
    assert places(found.sources(range(2), tables, [(0, 1, 500), (1, 2, 500), (2, 3, 500)]), 0) == {}
    assert places(found.sources(range(1), tables, engine.steps[0].offers), 0) == {}, "chunk 1 was not asked for"


# ---- loads -------------------------------------------------------------------------------------------------------


def allocated(found: Geometry, tokens: int) -> list[list[int]]:
    """Tables as vLLM's managers make them for a hit; tests/vllm holds this against those managers."""
    free = iter(range(1, 100_000))
    count = 1 + max(table.number for group in found.groups for table in group.tables)
    tables: list[list[int]] = [[] for _ in range(count)]
    for group in found.groups:
        for table in group.tables:
            skipped = {History: 0, Window: tokens - getattr(group.validity, "tokens", 0), State: tokens - 1}
            first = max(0, skipped[type(group.validity)]) // table.block_tokens
            blocks = [NULL_BLOCK if at < first else next(free) for at in range(tokens // table.block_tokens)]
            tables[table.number] = blocks
    return tables


def alignment_of(found: Geometry) -> int:
    """Tokens to which vLLM's hits are aligned."""
    return math.lcm(*(table.block_tokens for group in found.groups for table in group.tables))


@pytest.mark.parametrize("case", SERVED)
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("resident_blocks", [0, 1, 2, 5])
def test_a_load_writes_every_block_that_is_not_resident_and_no_other(case, chunks, resident_blocks):
    found = geometry(case)
    tokens, resident_tokens = chunks * found.chunk_tokens, resident_blocks * alignment_of(found)
    if resident_tokens >= tokens:
        assert found.targets(tokens, allocated(found, tokens), resident_tokens) == []
        return
    tables = allocated(found, tokens)
    result = found.targets(tokens, tables, resident_tokens)
    assert result is not None
    written = [block for place in result for block in place.blocks if block != SKIP]
    wanted = {
        block
        for group in found.groups
        for table in group.tables
        for block in tables[table.number][resident_tokens // table.block_tokens :]
    } - {NULL_BLOCK}
    assert sorted(written) == sorted(wanted)
    # The core asks for exactly these, or refuses the load.
    prefix = Prefix(tuple(ChunkKey(bytes([n]) * 32) for n in range(chunks)), found.chunk_tokens)
    for number, group in enumerate(found.layout.groups):
        needed = needed_chunks(group, prefix, tokens)
        assert set(places(result, number)) == {c for c in needed if (c + 1) * found.chunk_tokens > resident_tokens}
    sizes = [sum(table.blocks for table in group.tables) for group in found.groups]
    assert all(len(place.blocks) == sizes[place.group] for place in result)


@pytest.mark.parametrize("case", SERVED)
def test_what_is_stored_is_what_is_loaded(case):
    """The n-th block of an address is the same block of the chunk on both ways."""
    found = geometry(case)
    tokens = 3 * found.chunk_tokens
    tables = allocated(found, tokens)
    for place in found.targets(tokens, tables) or []:
        group = found.groups[place.group]
        if isinstance(group.validity, State):
            offers = [(table.number, tables[table.number][-1], tokens) for table in group.tables]
            assert place in found.sources([place.chunk], tables, offers)
        elif SKIP not in place.blocks:
            assert place in found.sources([place.chunk], tables)


def test_blocks_before_a_window_are_skipped():
    found = geometry("swa_win100")
    tables = allocated(found, 1024)
    assert tables[0][:28] == [NULL_BLOCK] * 28
    result = found.targets(1024, tables)
    assert places(result or [], 0) == {3: tuple(block for table in tables[:5] for block in table[28:32])}


def test_a_window_that_begins_with_a_block_needs_no_block_before_it():
    engine = recorded("swa32")
    for group in engine.config.kv_cache_groups[:5]:
        group.kv_cache_spec.sliding_window = 257
    found = Geometry.of(engine.config)
    tables = allocated(found, 1024)
    assert tables[0].count(NULL_BLOCK) == 24, "256 tokens before the next one are eight blocks"
    assert set(places(found.targets(1024, tables) or [], 0)) == {3}


def test_a_window_that_begins_within_a_chunk_is_loaded_in_part():
    engine = recorded("swa32")
    for group in engine.config.kv_cache_groups[:5]:
        group.kv_cache_spec.sliding_window = 301
    found = Geometry.of(engine.config)
    tables = allocated(found, 1024)
    result = places(found.targets(1024, tables) or [], 0)
    assert set(result) == {2, 3}
    # 300 tokens before 1024: from token 724 on, which is in the block of 704, the seventh of chunk 2.
    assert result[2][:8] == (SKIP,) * 6 + tuple(tables[0][22:24])
    assert SKIP not in result[3]


@pytest.mark.parametrize(
    ("case", "table", "at", "blocks"),
    [
        pytest.param("swa_win100", 2, slice(27, 28), [999], id="a window of one token more"),  # no object has it
        pytest.param("gdn", 1, slice(1, 2), [999], id="a state too early"),
        pytest.param("swa_win100", 4, slice(-1, None), [], id="too few"),
        pytest.param("swa_win100", 5, slice(3, 4), [NULL_BLOCK], id="a hole"),
    ],
)
def test_what_a_load_would_leave_unfilled_is_not_loaded(case, table, at, blocks):
    found = geometry(case)
    tables = allocated(found, 1024)
    tables[table][at] = blocks
    assert found.targets(1024, tables) is None


def test_a_load_to_no_boundary_is_a_mistake():
    with pytest.raises(ValueError, match="multiple of 256, got 300"):
        geometry("llama32").targets(300, [[1] * 10])


def test_only_one_table_of_full_attention_can_use_part_of_a_load():
    assert geometry("llama32").can_load_in_part
    assert geometry("mla").can_load_in_part
    assert not geometry("swa32").can_load_in_part
    alone = recorded("swa32")
    del alone.config.kv_cache_groups[1:], alone.config.kv_cache_tensors[1:]
    assert not Geometry.of(alone.config).can_load_in_part, "blocks before the window's end were never allocated"


def test_after_a_partial_load_the_rest_is_unfilled():
    found = geometry("llama32")
    tables = allocated(found, 768)
    assert found.unfilled(tables, 256, 768) == set(range(9, 25))
    assert found.unfilled(tables, 768, 768) == set()


# ---- what is refused ---------------------------------------------------------------------------------------------


def test_states_without_prefix_caching_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"mode 'none'.*--enable-prefix-caching"):
        geometry("gdn_nocache")


@pytest.mark.parametrize("kind", ["ChunkedLocalAttentionSpec", "RSWASpec", "SlidingWindowMLASpec", "MyAttentionSpec"])
def test_a_kind_of_kv_that_we_do_not_know_is_refused_by_its_name(kind):
    engine = recorded("llama32")
    group = engine.config.kv_cache_groups[0]
    group.kv_cache_spec = type(kind, (type(group.kv_cache_spec),), {})(**vars(group.kv_cache_spec))
    with pytest.raises(
        UnsupportedModelError, match=f"KV group 0 has KV of kind {kind}.* allowed: full attention"
    ) as result:
        Geometry.of(engine.config)
    assert ("--disable-hybrid-kv-cache-manager" in str(result.value)) == (kind == "ChunkedLocalAttentionSpec")


NO_PURPOSE = r"KV group 0 \(model\.layers\.0\.self_attn\.attn and 3 more"


@pytest.mark.parametrize(
    ("case", "owner", "field", "value", "message"),
    [
        ("llama32", "spec", "kv_quant_mode", SimpleNamespace(name="INT8_X"), "INT8_X is not supported. Use"),
        ("llama32", "spec", "tokens_per_state", 4, "one state per 4 tokens"),
        ("llama32", "spec", "non_causal", True, "attends to later tokens"),
        ("llama32", "spec", "prefix_cacheable", False, "never reuses this KV"),
        ("llama32", "group", "host_resident", True, NO_PURPOSE),
        ("llama32", "group", "enable_kv_transfer", False, NO_PURPOSE),
        ("mla", "spec", "model_version", "deepseek_v4", "MLA with .*deepseek_v4"),
        ("mla", "spec", "cache_role", SimpleNamespace(name="INDEXER"), "MLA with .*INDEXER"),
        ("swa32", "spec", "sliding_window", 1, "sliding window of 1; allowed: at least 2 tokens"),
        ("gdn", "spec", "num_speculative_blocks", 2, "states with speculative decoding"),
    ],
)
def test_kv_that_we_cannot_serve_is_refused(case, owner, field, value, message):
    engine = recorded(case)
    group = engine.config.kv_cache_groups[0]
    setattr(group if owner == "group" else group.kv_cache_spec, field, value)
    with pytest.raises(UnsupportedModelError, match=message):
        Geometry.of(engine.config)
