"""Determines the part of each KV group that a rank holds under pipeline, tensor and context parallelism.

vLLM gives each rank the KV heads ``[rank * n, (rank + 1) * n)``. With more ranks than heads, consecutive ranks have
copies of one head (`QKVParallelLinear`, vLLM 0.32). The latent of MLA is on every rank. States are divided in other
ways. A pipeline stage has consecutive layers, and only the last stage has the draft model's.

Decode context parallelism (DCP) divides the tokens of equal heads among ranks. The `Part` of each rank contains its
number among these ranks. Prefill context parallelism (PCP) does not divide KV: each of its ranks has all tokens
(`ops/pcp.py`, vLLM 0.32 and 0.33), unless a DCP group spans them.

A wrong claim that two ranks have equal KV would give one rank the other's bytes. So kvtier makes the claim only if all
fields about KV heads in the model's configuration agree. Some models have layers with different numbers of heads.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from kvtier.connect.vllm.geometry import Geometry, Group
from kvtier.connect.vllm.support import draft_model, specs_of
from kvtier.connect.vllm.vllm_types import ConfigPart, KvCacheConfig, KvCacheSpec, VllmConfig
from kvtier.layout import ELSEWHERE, Part

_KV_HEADS = re.compile(r"kv.*head|key_value.*head|head.*kv|heads_in_group|attention_groups|query_group", re.IGNORECASE)
"""Matches names of fields that may give a number of KV heads."""

_LATENT, _WITH_HEADS = frozenset({"MLAAttentionSpec"}), frozenset({"FullAttentionSpec", "SlidingWindowSpec"})

RankPart = tuple[Part | None, int]
"""A rank's part of a group (None if unknown), and how many ranks before it have the same part (`GroupLayout.copy`)."""


def parts_of_rank(
    config: VllmConfig, kv_cache_config: KvCacheConfig, geometry: Geometry, rank: int, first_layers: Sequence[int]
) -> list[RankPart]:
    """Return the part of each group of `geometry` that a rank holds.

    Args:
        config: the engine's configuration.
        kv_cache_config: the worker's `KVCacheConfig`.
        geometry: the geometry of `kv_cache_config`.
        rank: number of the worker, from 0. TP ranks come first, then PCP ranks, then stages.
        first_layers: number of layers of each group in the pipeline stages before the rank's.
    """
    heads = _kv_heads(config)
    parallel = config.parallel_config
    spans = [(first, first + count) for first, count in zip(first_layers, geometry.layer_counts, strict=True)]
    parts = [_rank_part(*it, kv_cache_config, heads, rank, parallel) for it in zip(geometry.groups, spans, strict=True)]
    if parallel.pipeline_parallel_size == 1:
        return parts
    # An unknown part is named after its layers and rank, because no other rank may have its object names.
    ranks = parallel.pipeline_parallel_size * stage_ranks(parallel)
    return [
        (part or Part(*span, rank=rank, ranks=ranks), copy) for (part, copy), span in zip(parts, spans, strict=True)
    ]


def stage_ranks(parallel: ConfigPart) -> int:
    """Return the number of workers in a pipeline stage. They have the same layers, and consecutive numbers in vLLM.

    Args:
        parallel: vLLM's `ParallelConfig`.
    """
    return int(parallel.prefill_context_parallel_size * parallel.tensor_parallel_size)


def token_share(parallel: ConfigPart, rank: int) -> tuple[int, int]:
    """Return a rank's share of the tokens that DCP divides, as (index, number of shares).

    A DCP group first spans the PCP ranks of a TP rank, then further TP ranks (`initialize_model_parallel`).

    Args:
        parallel: vLLM's `ParallelConfig`.
        rank: as in `parts_of_rank`.
    """
    size, pcp = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    pcp_rank, tp_rank = divmod(rank, parallel.tensor_parallel_size)
    return (tp_rank * pcp + pcp_rank % pcp) % size, size


def _rank_part(
    group: Group,
    span: tuple[int, int],
    kv_cache_config: KvCacheConfig,
    heads: int | None,
    rank: int,
    parallel: ConfigPart,
) -> RankPart:
    specs = [
        spec for table in group.tables for spec in specs_of(kv_cache_config.kv_cache_groups[table.number].kv_cache_spec)
    ]
    first = rank - rank % stage_ranks(parallel)
    if group.shares:
        part = Part(*span, 0, 1, group.share, group.shares)
        numbers = [token_share(parallel, each) for each in range(first, rank + 1)]
        *before, has_share = (group.share % size == number for number, size in numbers)
        return part, sum(before) if has_share else ELSEWHERE
    parts = [_part(specs, span, heads, each, parallel) for each in range(first, rank + 1)]
    part = parts.pop()
    return part, 0 if part is None else parts.count(part)


def _part(
    specs: list[KvCacheSpec], span: tuple[int, int], heads: int | None, rank: int, parallel: ConfigPart
) -> Part | None:
    number, size = token_share(parallel, rank)
    if size > 1 and not any(spec.dcp_sharded for spec in specs):
        number, size = 0, 1
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= _LATENT:
        return Part(*span, 0, 1, number, size)
    ranks, tp_rank = parallel.tensor_parallel_size, rank % parallel.tensor_parallel_size
    if heads is None or not kinds <= _WITH_HEADS or (heads % ranks and ranks % heads):
        return None
    own, copies = max(1, heads // ranks), max(1, ranks // heads)
    # A DCP group's TP ranks are consecutive. Their tokens are shares only if all of them have the same heads.
    together = -(-size // parallel.prefill_context_parallel_size)
    if {spec.num_heads for spec in specs} != {own} or copies % together:
        return None
    first = tp_rank // copies * own
    return Part(*span, first, first + own, number, size)


def _kv_heads(config: VllmConfig) -> int | None:
    """Return the number of KV heads that every attention layer has, including draft layers; None if in doubt."""
    model, draft = config.model_config, draft_model(config)
    total = model.get_total_num_kv_heads()
    if model.using_transformers_backend() or type(total) is not int or total < 1:
        return None
    found = list(_named(model.hf_text_config.to_dict()))
    if draft is not None:
        found += [draft.get_total_num_kv_heads(), *_named(draft.hf_text_config.to_dict())]
    return total if found and all(type(value) is int and value == total for value in found) else None


def _named(settings: object) -> Iterator[object]:
    """Yield the values of all fields that may give a number of KV heads."""
    if isinstance(settings, Mapping):
        for name, value in cast("Mapping[object, object]", settings).items():
            if isinstance(name, str) and _KV_HEADS.search(name):
                yield value
            else:
                yield from _named(value)
    elif isinstance(settings, list | tuple):
        for value in cast("list[object]", settings):
            yield from _named(value)
