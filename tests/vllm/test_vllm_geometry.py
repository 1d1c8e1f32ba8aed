"""What kvtier fills is what vLLM's own block managers take for filled; and both need the same of a window."""

import __future__

import ast
import random
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.axes import check_axes, numbered
from tests.vllm_world import attended, cache_flash, gathered

with warnings.catch_warnings():
    # What vLLM and torch have to say of each other while they are imported is not ours to mend.
    warnings.simplefilter("ignore")
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.utils.torch_utils import is_quantized_kv_cache
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request

from kvtier.connect.vllm.geometry import SKIP, DcpShards, Geometry
from kvtier.connect.vllm.rank_parts import token_share
from kvtier.connect.vllm.worker.pages import SIDE_BY_SIDE
from kvtier.layout import Window

pytestmark = pytest.mark.vllm_core

BLOCKS = 4000


def full(block: int) -> Any:
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


def sliding(block: int, window: int) -> Any:
    return SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=window)


def state(block: int) -> Any:
    return MambaSpec(
        block_size=block,
        shapes=((4, 8),),
        dtypes=(torch.float32,),
        page_size_padded=block * 32,
        mamba_cache_mode="align",
    )


MODELS = {
    "full": [full(16)],
    "window": [sliding(16, 100), full(16)],
    "window of one block": [sliding(32, 33), full(32)],
    "window of a chunk": [sliding(16, 257), full(16)],
    "window of more": [sliding(16, 700), sliding(16, 700), full(16)],
    "two windows": [sliding(16, 100), sliding(16, 300), full(16)],
    "state": [state(64), state(64), full(64)],
    "full, 4 ranks": [full(16)],
    "state, 2 ranks": [state(64), full(32)],
}
RANKS = {"full, 4 ranks": 4, "state, 2 ranks": 2}
"""With decode context parallelism: how many share the tokens of a block."""


def made(specs: list[Any], ranks: int = 1) -> KVCacheConfig:
    tokens = specs[0].block_size * (ranks if specs[0].dcp_sharded else 1)
    page = max(spec.page_size_bytes for spec in specs)
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(size=page * BLOCKS, layers=[f"l{n}"], layer_stride=page * BLOCKS, block_stride=page)
            for n in range(len(specs))
        ],
        kv_cache_groups=[KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)],
        kv_cache_layout="LBHNC",
        hash_block_size=tokens,
        cache_hit_alignment_tokens=tokens,
    )


def manager(config: KVCacheConfig, ranks: int = 1) -> KVCacheManager:
    block, most = config.hash_block_size, 8192
    sizes = {"scheduler_block_size": block, "hash_block_size": block, "dcp_world_size": ranks}
    return KVCacheManager(config, max_model_len=most, **sizes)


def request(name: str, tokens: list[int], block: int) -> Request:
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=4)
    return Request(name, tokens, params, None, block_hasher=get_request_block_hasher(block, sha256))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_a_load_fills_what_vllm_has_allocated_for_it(model, seed):
    rng = random.Random(seed)
    ranks = RANKS.get(model, 1)
    config = made(MODELS[model], ranks)
    geometry, blocks = Geometry.of(config, shards=DcpShards(ranks)), manager(config, ranks)
    block = config.hash_block_size
    tokens = rng.randrange(1, 8) * geometry.chunk_tokens
    ids = [rng.randrange(1000) for _ in range(tokens + rng.randrange(1, 300))]
    # Another request has computed a part of the same prompt, which vLLM finds in its own cache.
    first = request("first", ids[: rng.randrange(0, tokens) // block * block + 1], block)
    assert blocks.allocate_slots(first, first.num_tokens) is not None
    blocks.coordinator.new_step_starts()
    second = request("second", ids, block)
    found, resident_tokens, _ = blocks.get_computed_blocks(second)
    resident_tokens = min(resident_tokens, tokens - block)
    if resident_tokens <= 0 or resident_tokens % block:
        resident_tokens, found = 0, blocks.empty_kv_cache_blocks
    else:
        found = blocks.truncate_computed_blocks(found, resident_tokens)
    held = {id_ for group in blocks.get_block_ids("first") for id_ in group}
    assert blocks.allocate_slots(
        second,
        0,
        num_new_computed_tokens=resident_tokens,
        new_computed_blocks=found,
        num_external_computed_tokens=tokens - resident_tokens,
        delay_cache_blocks=True,
    )
    tables = blocks.get_block_ids("second")
    places = geometry.targets(tokens, tables, resident_tokens)
    assert places is not None
    written = [id_ for place in places for id_ in place.blocks if id_ != SKIP]
    assert len(written) == len(set(written))
    assert not held & set(written), "a block that another request reads"
    assert {id_ for table in tables for id_ in table} - held - {0} == set(written)
    for number, table in enumerate(tables):
        less, more = ([list(each) for each in tables] for _ in range(2))
        less[number][-1] = 0
        assert geometry.targets(tokens, less, resident_tokens) is None
        if 0 in table[resident_tokens // block :]:
            more[number][table.index(0, resident_tokens // block)] = BLOCKS - 1
            result = geometry.targets(tokens, more, resident_tokens)
            assert result is None or any(BLOCKS - 1 in place.blocks for place in result), "VLLM would read it unfilled"


@pytest.mark.parametrize("block", [16, 32, 128])
@pytest.mark.parametrize("window", [2, 16, 17, 33, 100, 128, 129, 256, 257, 1024, 1025])
def test_a_window_object_has_the_blocks_that_vllm_wants_for_a_hit(block, window):
    geometry = Geometry.of(made([sliding(block, window)]))
    (group,) = geometry.groups
    assert group.validity == Window(window - 1)
    wanted = SlidingWindowManager._contiguous_blocks_for_hit(window, block, use_eagle=False)
    assert group.tables[0].blocks == min(wanted, geometry.chunk_tokens // block)
    tokens = 8 * geometry.chunk_tokens
    assert tokens // block - group.needed_from(group.tables[0], tokens) == wanted


def test_a_window_of_one_token_more_would_be_another_rule():
    """The negative control: `sliding_window` itself is one too many."""
    blocks = SlidingWindowManager._contiguous_blocks_for_hit
    assert blocks(257, 16, use_eagle=False) == 16
    assert blocks(258, 16, use_eagle=False) == 17


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "pp"),
    [(2, 1, 2, 1), (4, 1, 2, 1), (8, 1, 4, 2), (2, 2, 1, 1), (2, 2, 2, 1), (2, 4, 4, 2), (2, 2, 4, 1), (4, 2, 8, 1)],
)
def test_a_rank_has_the_share_of_the_tokens_that_vllms_groups_give_it(tp, pcp, dcp, pp, monkeypatch):
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        pipeline_parallel_size=pp,
    )
    groups: dict[str, list[list[int]]] = {}

    def group_of(ranks: list[list[int]], *_: Any, group_name: str = "", **__: Any) -> Any:
        groups[group_name] = ranks
        return SimpleNamespace(rank_in_group=0)

    world = SimpleNamespace(local_rank=0, device_group=None, rank_in_group=0)
    ranks = range(tp * pcp * pp)
    for name, value in {"is_initialized": True, "get_world_size": len(ranks), "get_rank": 0, "get_backend": ""}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", group_of)
    for name in ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB"):
        monkeypatch.setattr(parallel_state, name, None, raising=False)
    config = VllmConfig()
    config.parallel_config = parallel  # the constructor refuses PCP here: it has no model runner for it
    with set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(tp, pp, pcp, dcp)
    shares = {rank: (number, len(group)) for group in groups["dcp"] for number, rank in enumerate(group)}
    assert [shares[rank] for rank in ranks] == [token_share(parallel, rank) for rank in ranks]


# ---- axes ----------------------------------------------------------------------------------------------------------


def update_of(backend: str) -> Callable[..., None]:
    """Return the method with which a backend of the installed vLLM writes keys and values, with its kernel replaced.

    It is read from the source, because a backend for GPUs cannot always be imported.
    """
    spec = find_spec(f"vllm.v1.attention.backends.{backend}")
    assert spec is not None
    assert spec.origin is not None
    (method,) = (
        node
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "do_kv_cache_update"
    )
    code = compile(
        ast.Module([method], []), spec.origin, "exec", __future__.annotations.compiler_flag, dont_inherit=True
    )
    kernels = {"reshape_and_cache_flash": cache_flash, "triton_reshape_and_cache_flash": cache_flash}
    ops = SimpleNamespace(ops=SimpleNamespace(_C_cache_ops=SimpleNamespace(**kernels)))
    names: dict[str, Any] = {
        "torch": ops,
        "AttentionType": AttentionType,
        "is_quantized_kv_cache": is_quantized_kv_cache,
        **kernels,
    }
    exec(code, names)
    return names["do_kv_cache_update"]


@pytest.mark.parametrize("backend", sorted(SIDE_BY_SIDE))
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_backends_write_where_the_axes_say(backend: str, layout: str) -> None:
    update = update_of({"TRITON_ATTN": "triton_attn", "FLASH_ATTN": "flash_attn"}.get(backend, backend.lower()))
    implementation = SimpleNamespace(
        attn_type=AttentionType.DECODER,
        head_size=9,
        num_kv_heads=2,
        kv_cache_dtype="auto",
        cache_dtype="auto",
        kv_sharing_target_layer_name=None,
        is_kvcache_nvfp4=False,
        nvfp4_fa2=False,
        _is_per_token_head_quant=False,
    )
    scales = SimpleNamespace(_k_scale=None, _v_scale=None)
    numbers = numbered(3, 2, 256, 9)
    found, payload = gathered(
        attended(layout, backend=backend), numbers, lambda *given: update(implementation, scales, *given)
    )
    check_axes(found.of_class("int4").groups[0], payload, numbers)
