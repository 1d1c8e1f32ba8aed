"""The part of the KV that each of vLLM's ranks holds: divided heads and tokens, copies, and what is not known."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from tests.vllm_config import vllm_config, with_draft
from tests.vllm_recorded import recorded

from kvtier.config.sections import Config
from kvtier.connect.vllm.engine_setup import EngineSetup, WorkerFacts
from kvtier.connect.vllm.geometry import DcpShards, Geometry
from kvtier.connect.vllm.identity import EngineIdentity
from kvtier.connect.vllm.rank_parts import parts_of_rank, token_share
from kvtier.errors import UnsupportedModelError
from kvtier.keys.object_names import object_name
from kvtier.layout import ELSEWHERE, Part
from kvtier.tools import size
from kvtier.tools.size.caches import full, mla


def held(case, ranks, heads, here, stages=1, before=None, **changes):
    """The parts of all ranks of the last stage.

    Args:
        case: the recorded engine, which stands for each stage.
        ranks: of each stage.
        heads: of the model.
        here: those of a rank, as vLLM says them.
        stages: of the pipeline.
        before: layers of each group in the stages before.
        changes: of vLLM's configuration.
    """
    engine = recorded(case)
    for group in engine.config.kv_cache_groups:
        if type(group.kv_cache_spec).__name__ in ("FullAttentionSpec", "SlidingWindowSpec"):
            group.kv_cache_spec.num_heads = here
    size = {"parallel__tensor_parallel_size": ranks, "parallel__pipeline_parallel_size": stages}
    config = vllm_config(**size, hf__num_key_value_heads=heads, **changes)
    parallel = config.parallel_config
    geometry = Geometry.of(engine.config, shards=DcpShards(parallel.decode_context_parallel_size))
    before = before or [0] * len(geometry.groups)
    workers = ranks * parallel.prefill_context_parallel_size
    numbers = range((stages - 1) * workers, stages * workers)
    return [parts_of_rank(config, engine.config, geometry, rank, before) for rank in numbers]


@pytest.mark.parametrize(
    ("ranks", "heads", "here", "expected"),
    [
        (1, 2, 2, [(0, 2, 0)]),
        (2, 8, 4, [(0, 4, 0), (4, 8, 0)]),
        (4, 4, 1, [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 4, 0)]),
        # More ranks than heads: vLLM gives consecutive ranks copies of one head.
        (4, 2, 1, [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)]),
        (3, 1, 1, [(0, 1, 0), (0, 1, 1), (0, 1, 2)]),
    ],
)
def test_heads_are_divided_among_ranks_or_copied(ranks, heads, here, expected):
    assert held("llama32", ranks, heads, here) == [[(Part(0, 4, first, end), copy)] for first, end, copy in expected]


def test_mlas_latent_is_on_every_rank():
    assert held("mla", 3, 4, 1) == [[(Part(0, 2, 0, 1), rank)] for rank in range(3)]


@pytest.mark.parametrize(
    ("case", "ranks", "heads", "here", "changes"),
    [
        ("llama32", 2, 8, 4, {}),
        ("llama32", 4, 2, 1, {}),
        ("llama32", 8, 1, 1, {}),
        ("llama32", 4, 2, 1, {"hf__num_global_key_value_heads": 4}),
        ("mla", 4, 4, 1, {}),
    ],
)
def test_sizes_count_the_ranks_that_store(case, ranks, heads, here, changes):
    parts = held(case, ranks, heads, here, **changes)
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": heads, "head_dim": 64}
    model = size.from_config(config, "mine")
    if case == "mla":
        model = replace(model, layers=((mla(512, 64),),) * 4)
    elif changes:
        model = replace(model, layers=(*model.layers[1:], (full(changes["hf__num_global_key_value_heads"], 64),)))
    assert size.of(model, tp=ranks).storing_ranks == sum(copy == 0 for ((_, copy),) in parts)


def test_each_group_has_its_own_part():
    assert held("swa128", 2, 2, 1) == [
        [(Part(0, 5, rank, rank + 1), 0), (Part(0, 1, rank, rank + 1), 0)] for rank in range(2)
    ]
    # Nothing says which share of a state a rank holds.
    assert held("gdn", 4, 2, 1)[3] == [(None, 0), (Part(0, 1, 1, 2), 1)]


def test_a_stage_has_its_own_layers_of_each_group():
    assert held("llama32", 2, 8, 4, stages=2, before=[5]) == [[(Part(5, 9, first, first + 4), 0)] for first in (0, 4)]
    assert held("mla", 2, 4, 1, stages=3, before=[7]) == [[(Part(7, 9, 0, 1), rank)] for rank in range(2)]
    # What is not known of a stage's part is known of no other rank: rank 3 of 4 is the second of the second stage.
    state, attention = held("gdn", 2, 2, 1, stages=2, before=[2, 1])[1]
    assert state == (Part(2, 5, rank=3, ranks=4), 0)
    assert attention == (Part(1, 2, 1, 2), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"hf__swa_num_key_value_heads": 4},
        {"hf__num_global_key_value_heads": 4},
        {"hf__attention_other_setting": {"num_attention_groups": 8}},
        {"hf__block_configs": [{"attention": {"n_heads_in_group": 8}}]},
        {"hf__num_kv_heads_per_layer": [2, 2, 4]},
        {"hf__num_kv_heads": None},
        {"model__using_transformers_backend": lambda: True},
        {"model__get_total_num_kv_heads": lambda: 1},
        {"model__get_total_num_kv_heads": lambda: 0},
    ],
)
def test_where_fields_disagree_no_ranks_share_a_part(changes):
    """At four ranks a layer of four heads looks like one of two: one head on each rank."""
    found = held("llama32", 4, 2, 1, **changes)
    assert found == [[(None, 0)]] * 4
    layout = Geometry.of(recorded("llama32").config).layout
    ranks = [layout.with_parts(parts).on_rank(rank, 4) for rank, parts in enumerate(found)]
    assert len({object_name(bytes(32), 0, each.part(0), each.digest(0)) for each in ranks}) == 4


@pytest.mark.parametrize(("ranks", "heads", "here"), [(2, 8, 8), (4, 8, 1), (4, 3, 1), (3, 8, 2), (3, 2, 1)])
def test_what_vllm_would_not_divide_like_that_is_not_known(ranks, heads, here):
    assert held("llama32", ranks, heads, here) == [[(None, 0)]] * ranks


def test_fields_that_agree_leave_no_doubt():
    assert held("llama32", 2, 2, 1, hf__text={"num_kv_heads": 2}, hf__kv_lora_rank=7)[1] == [(Part(0, 4, 1, 2), 0)]


@pytest.mark.parametrize(("heads", "is_known"), [(2, True), (4, False)])
def test_where_draft_layers_have_other_heads_no_ranks_share_a_part(heads, is_known):
    """At four ranks a draft layer of four heads looks like one of two: one head on each rank."""
    draft = with_draft(vllm_config(), "draft", hf__num_key_value_heads=heads)
    fields = ("speculative_config", "num_prefill_lookahead_tokens")
    found = held("llama32", 4, 2, 1, **{name: getattr(draft, name) for name in fields})
    wanted = [(0, 1, 0), (0, 1, 1), (1, 2, 0), (1, 2, 1)] if is_known else []
    assert found == ([[(Part(0, 4, first, end), copy)] for first, end, copy in wanted] or [[(None, 0)]] * 4)


# ---- context parallelism -----------------------------------------------------------------------------------------


def held_with(case, tp, dcp, pcp=1, heads=1, here=1):
    """The part and copy of the only group, by rank."""
    changes = {"parallel__decode_context_parallel_size": dcp, "parallel__prefill_context_parallel_size": pcp}
    return [parts[0] for parts in held(case, tp, heads, here, **changes)]


def test_ranks_with_the_same_heads_and_tokens_are_copies_of_each_other():
    first, second = Part(0, 2, 0, 1, 0, 2), Part(0, 2, 0, 1, 1, 2)
    assert held_with("mla", 4, 2) == [(first, 0), (second, 0), (first, 1), (second, 1)]
    # A DCP group spans PCP ranks first: the second one of each TP rank has the second share.
    assert held_with("mla", 2, 2, pcp=2) == [(first, 0), (first, 1), (second, 0), (second, 1)]
    # PCP alone divides no KV.
    assert held_with("mla", 1, 1, pcp=3) == [(Part(0, 2, 0, 1), copy) for copy in range(3)]
    assert held_with("llama32", 4, 2, heads=2) == [
        (Part(0, 4, head, head + 1, share, 2), 0) for head in range(2) for share in range(2)
    ]


def test_what_dcp_does_not_divide_is_a_copy_on_each_rank():
    engine = recorded("llama32")
    engine.config.kv_cache_groups[0].kv_cache_spec.dcp_sharded = False
    engine.config.kv_cache_groups[0].kv_cache_spec.num_heads = 1
    config = vllm_config(
        parallel__tensor_parallel_size=2, parallel__decode_context_parallel_size=2, hf__num_key_value_heads=1
    )
    geometry = Geometry.of(engine.config, shards=DcpShards(2))
    assert [parts_of_rank(config, engine.config, geometry, rank, [0]) for rank in range(2)] == [
        [(Part(0, 4, 0, 1), copy)] for copy in range(2)
    ]


def shapes(most):
    """(TP, PCP, DCP) that vLLM's `ParallelConfig` accepts, with up to `most` ranks."""
    for tp, pcp in product(range(1, most + 1), repeat=2):
        sizes = [size for size in range(1, tp + 1) if tp % size == 0] if pcp == 1 else sorted({1, pcp, tp * pcp})
        yield from ((tp, pcp, size) for size in sizes if tp * pcp <= most)


def held_by(tp, pcp, dcp, heads):
    """(head, token) that each rank holds, of a block of ``2 * dcp`` tokens, as vLLM makes its groups of ranks."""
    # `initialize_model_parallel` with DCP: the PCP ranks of a TP rank are neighbours.
    order = [pcp_rank * tp + tp_rank for tp_rank in range(tp) for pcp_rank in range(pcp)]
    order = order if dcp > 1 else sorted(order)
    own, copies = max(1, heads // tp), max(1, tp // heads)  # `QKVParallelLinear`
    found = {}
    for at, rank in enumerate(order):
        first = rank % tp // copies * own
        found[rank] = frozenset(product(range(first, first + own), range(at % dcp, 2 * dcp, dcp)))
    return [found[rank] for rank in range(tp * pcp)], [order[at : at + dcp] for at in range(0, len(order), dcp)]


@pytest.mark.parametrize(("case", "models"), [("mla", [1]), ("llama32", range(1, 17))])
def test_the_parts_of_all_ranks_tile_the_kv_and_ranks_with_equal_parts_hold_the_same(case, models):
    known = 0
    for (tp, pcp, dcp), heads in product(shapes(16), models):
        is_latent = case == "mla"
        if dcp > 1 and not is_latent and dcp > tp // heads:
            continue  # refused by vLLM's `verify_with_parallel_config`
        own, groups = held_by(tp, pcp, dcp, heads)
        parts = held_with(case, tp, dcp, pcp, heads, max(1, heads // tp))
        is_divided = is_latent or not (heads % tp and tp % heads)
        if not is_divided or any(len({min(own[rank])[0] for rank in group}) > 1 for group in groups):
            assert parts == [(None, 0)] * (tp * pcp), (tp, pcp, dcp, heads)
            continue
        known += 1
        assert frozenset().union(*own) == frozenset(product(range(heads), range(2 * dcp)))
        for rank, (part, copy) in enumerate(parts):
            same = [other for other, (theirs, _) in enumerate(parts) if theirs == part]
            assert same == [other for other in range(tp * pcp) if own[other] == own[rank]], (tp, pcp, dcp, heads)
            assert copy == same.index(rank)
            said = product(range(part.first_head, part.end_head), range(part.rank, 2 * dcp, part.ranks))
            assert own[rank] == frozenset(said)
    assert known > 50


@pytest.mark.parametrize("case", ["mla", "llama32"])
def test_each_token_is_in_one_share_and_a_share_is_the_same_on_ranks_of_all_shapes(case):
    """Of shapes with up to 16 ranks. Only latents have shares."""
    turns, shares, whole = 3, 16, {}
    config = recorded(case).config
    for (tp, pcp, dcp), interleave in product(shapes(16), (1, 2)):
        if shares % dcp:
            continue
        sizes = {"tensor_parallel_size": tp, "prefill_context_parallel_size": pcp, "decode_context_parallel_size": dcp}
        parallel = {f"parallel__{name}": size for name, size in sizes.items()}
        vllm = vllm_config(**parallel, parallel__cp_kv_cache_interleave_size=interleave, hf__num_key_value_heads=2)
        config.kv_cache_groups[0].kv_cache_spec.block_size = 32 // dcp * turns
        geometry = Geometry.of(config, shards=DcpShards.of(vllm, shares))
        if case != "mla":
            assert geometry == Geometry.of(config, shards=DcpShards.of(vllm))
            continue
        own, _ = held_by(tp, pcp, dcp, 1)  # shares of two tokens for each rank: rank r of dcp has r and r + dcp
        for rank in range(tp * pcp):
            held = parts_of_rank(vllm, config, geometry, rank, [0] * shares)
            number = min(token for _, token in own[rank])
            assert [share for share, (_, copy) in enumerate(held) if copy != ELSEWHERE] == [
                *range(number, shares, dcp)
            ], (tp, pcp, dcp)
            for share, (part, copy) in enumerate(held):
                assert part == Part(0, 2, 0, 1, share, shares)
                if copy != ELSEWHERE:
                    assert copy == whole.get((tp, pcp, dcp, interleave, share), 0)
                    whole[tp, pcp, dcp, interleave, share] = copy + 1
        assert all(whole[tp, pcp, dcp, interleave, share] == tp * pcp // dcp for share in range(shares))


def test_a_second_stage_counts_its_own_ranks():
    parallel = SimpleNamespace(tensor_parallel_size=2, prefill_context_parallel_size=2, decode_context_parallel_size=2)
    assert [token_share(parallel, rank) for rank in range(8)] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2


# ---- what workers tell each other at start -------------------------------------------------------------------------


def setup_of(config, rank=0, **sizes):
    """A worker's setup, of an engine with the parallel sizes that are given."""
    given = {f"parallel__{name}": value for name, value in sizes.items()}
    identity = EngineIdentity(MagicMock(digest=bytes(32)), None, is_private=False, detail="")
    vllm = vllm_config(**given, parallel__rank=rank)
    return EngineSetup(vllm, config, Config(), Geometry.of(config), identity, "kv_both")


def told(setup, layers, shape="chunks"):
    return WorkerFacts(setup.identity.fingerprint.digest, "", shape, layers)


def test_a_workers_first_layers_are_those_of_the_stages_before_it():
    config = recorded("swa128").config
    facts = [(5, 1), (5, 1), (3, 2), (3, 2), (4, 1), (4, 1)]
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    found = []
    for rank in range(6):
        setup = setup_of(config, rank, **sizes)
        found.append(setup.agreed([told(setup, layers) for layers in facts]).first_layers)
    assert found == [[0, 0], [0, 0], [5, 1], [5, 1], [8, 3], [8, 3]]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            [((4,), "x")] * 3 + [((3,), "x")],
            r"ranks 2 and 3 divide the KV differently\. Rank 2: layers per KV group 4; x\. Rank 3: .* 3; x\. Serve",
        ),
        ([((4,), "x")] * 2 + [((2,), "y")] * 2, r"Rank 0: layers per KV group 4; x\. Rank 2: .* group 2; y\. Serve"),
    ],
)
def test_a_worker_with_an_unexpected_part_stops_the_start_with_both_shapes_named(facts, message):
    setup = setup_of(recorded("llama32").config, tensor_parallel_size=2, pipeline_parallel_size=2)
    setup.agreed([told(setup, (4,)), told(setup, (4,)), told(setup, (1,)), told(setup, (1,))])
    with pytest.raises(UnsupportedModelError, match=message):
        setup.agreed([told(setup, *it) for it in facts])


def test_a_stage_may_lack_the_layers_of_a_vllm_group_but_not_of_a_rule():
    config = recorded("swa128").config
    whole = Geometry.of(config)
    window = [group for group in config.kv_cache_groups if type(group.kv_cache_spec).__name__ == "SlidingWindowSpec"]
    for number, group in enumerate(window):
        group.layer_names = []
        if number < len(window) - 1:
            left = Geometry.of(config)
            assert left.shape == whole.shape
            assert sum(left.layer_counts) == sum(whole.layer_counts) - number - 1
    with pytest.raises(
        UnsupportedModelError, match=r"no layer with KV of the kind Window\(tokens=255\); each stage needs a layer"
    ):
        Geometry.of(config)
