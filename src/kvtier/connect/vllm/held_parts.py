"""The part of each KV group that a rank holds, as vLLM's pipeline stages and tensor parallelism divide it.

vLLM gives each rank the KV heads ``[rank * n, (rank + 1) * n)``. With more ranks than heads, consecutive ranks hold
copies of one head (`QKVParallelLinear`, vLLM 0.32). The latent of MLA is on every rank. States are divided in other
ways. A pipeline stage has consecutive layers, the draft model's only the last one.

A wrong claim that two ranks hold the same KV would give one of them the other's bytes. So it is made only where every
field of the model's configuration about KV heads agrees: some models have layers with another number of heads.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from kvtier.connect.vllm.geometry import Geometry, Group
from kvtier.connect.vllm.support import draft_model, specs_of
from kvtier.connect.vllm.vllm_types import KvCacheConfig, VllmConfig
from kvtier.layout import Part

_KV_HEADS = re.compile(r"kv.*head|key_value.*head|head.*kv|heads_in_group|attention_groups|query_group", re.IGNORECASE)
"""Fields of a configuration that may be a number of KV heads."""

_LATENT, _WITH_HEADS = frozenset({"MLAAttentionSpec"}), frozenset({"FullAttentionSpec", "SlidingWindowSpec"})

Held = tuple[Part | None, int]
"""A rank's part of a group, None if it is unknown, and how many ranks before it hold the same."""


def held_parts(
    config: VllmConfig, kv_cache_config: KvCacheConfig, geometry: Geometry, rank: int, first_layers: Sequence[int]
) -> list[Held]:
    """What a rank holds of each group of `geometry`.

    Args:
        config: the engine's.
        kv_cache_config: the worker's.
        geometry: of `kv_cache_config`.
        rank: number of the rank, of all workers.
        first_layers: layers of each group in the pipeline stages before that of the rank.
    """
    ranks = config.parallel_config.tensor_parallel_size
    heads = _kv_heads(config)
    spans = zip(first_layers, geometry.layer_counts, strict=True)
    layers = [(first, first + count) for first, count in spans]
    held = [_held(*it, kv_cache_config, heads, rank % ranks, ranks) for it in zip(geometry.groups, layers, strict=True)]
    stages = config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return held
    # An unknown part of a stage: its layers are known, and no other rank may have its names.
    return [
        (part or Part(*span, rank=rank, ranks=stages * ranks), copy)
        for (part, copy), span in zip(held, layers, strict=True)
    ]


def _held(
    group: Group, layers: tuple[int, int], kv_cache_config: KvCacheConfig, heads: int | None, rank: int, ranks: int
) -> Held:
    specs = [
        spec for table in group.tables for spec in specs_of(kv_cache_config.kv_cache_groups[table.number].kv_cache_spec)
    ]
    kinds = {type(spec).__name__ for spec in specs}
    if kinds <= _LATENT:
        return Part(*layers, 0, 1), rank
    if heads is None or not kinds <= _WITH_HEADS:
        return None, 0
    here = {spec.num_heads for spec in specs}
    if here == {heads // ranks} and not heads % ranks:
        own = heads // ranks
        return Part(*layers, rank * own, (rank + 1) * own), 0
    if here == {1} and not ranks % heads:
        head, copy = divmod(rank, ranks // heads)
        return Part(*layers, head, head + 1), copy
    return None, 0


def _kv_heads(config: VllmConfig) -> int | None:
    """KV heads of every attention layer, drafts included; None if the configurations leave a doubt."""
    model, draft = config.model_config, draft_model(config)
    total = model.get_total_num_kv_heads()
    if model.using_transformers_backend() or type(total) is not int or total < 1:
        return None
    found = list(_named(model.hf_text_config.to_dict()))
    if draft is not None:
        found += [draft.get_total_num_kv_heads(), *_named(draft.hf_text_config.to_dict())]
    return total if found and all(type(value) is int and value == total for value in found) else None


def _named(settings: object) -> Iterator[object]:
    """The values of all fields that may be a number of KV heads."""
    if isinstance(settings, Mapping):
        for name, value in cast("Mapping[object, object]", settings).items():
            if isinstance(name, str) and _KV_HEADS.search(name):
                yield value
            else:
                yield from _named(value)
    elif isinstance(settings, list | tuple):
        for value in cast("list[object]", settings):
            yield from _named(value)
