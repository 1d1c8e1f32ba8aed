"""What a secondary tier of vLLM's tiering manager stores, and what identifies its bytes.

An object is one chunk of vLLM's host memory in one KV group: a row with the pages of all workers, as
`SharedOffloadRegion` lays them out. Its bytes are opaque. Everything that decides their meaning is in the fingerprint
or in the layout's `pages`, and so in every object's name.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvtier.config.loader import flat, load, override
from kvtier.config.sections import Config
from kvtier.connect.vllm import identity, installed, support
from kvtier.connect.vllm.geometry import DcpShards, Geometry
from kvtier.connect.vllm.vllm_types import KvCacheConfig, VllmConfig
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.layout import ELEMENT_BYTES, GroupLayout, History, KvLayout, Part, Run

ORIGIN = "secondary_tiers of kv_connector_extra_config"

HASHES = ("sha256", "sha256_cbor")
"""vLLM's block hashes under which no two prompts have one name. Their chains begin with a fixed seed, or with
`PYTHONHASHSEED`; so a prompt has the same hashes after a restart, and chains with other seeds have none in common."""

ASK_WORKERS_S = 60.0


class TieringSetup(NamedTuple):
    """Settings, layout and identity of an engine with the tiering manager."""

    config: Config
    layout: KvLayout
    """One group, for all of vLLM's: an object is a whole row."""
    identity: identity.EngineIdentity
    prefix_groups: Mapping[int, int]
    """Tokens of a chunk, by number of the KV groups that are valid only as a whole prefix."""


def setup_of(
    settings: Mapping[str, object],
    spec: Any,  # noqa: ANN401 - vLLM's `OffloadingSpec`
    vllm_config: VllmConfig,
    kv_cache_config: KvCacheConfig,
    row_bytes: int,
    workers: list[Mapping[str, str]],
) -> TieringSetup:
    """Check and identify an engine.

    Args:
        settings: kvtier's, from the tier's entry in `secondary_tiers`; they override the settings file and the
            environment.
        spec: with the division into chunks and ranks.
        vllm_config: the engine's.
        kv_cache_config: the engine's.
        row_bytes: bytes of a chunk in vLLM's host memory.
        workers: `page_details` of each worker.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM or its block hash is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    config = override(load().config, flat(settings, ORIGIN), ORIGIN)
    if not config.tiers:
        raise ConfigError(f'{ORIGIN}: no tier; allowed: at least one, such as "tiers": ["disk:/path/to/kv"]')
    support.check_settings(config, is_start=True)
    version = installed.check_engine()
    support.check_engine(vllm_config)
    if support.looks_ahead(vllm_config):
        raise UnsupportedModelError(
            "a draft model with KV of its own reads the next token, which vLLM's block hash does not cover: stored KV "
            "may be that of another prompt. Use kvtier as the connector"
        )
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, name)
        if size > 1:
            raise UnsupportedModelError(
                f"{name} = {size} below vLLM's offloading is not supported: a row does not say which layers and tokens "
                "each rank holds. Use kvtier as the connector"
            )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise ConfigError(
            f"prefix_caching_hash_algo = {algorithm!r}: two prompts may have one hash, and stored KV would be that of "
            f"another prompt; allowed: {', '.join(map(repr, HASHES))}"
        )
    geometry = Geometry.of(kv_cache_config, shards=DcpShards.of(vllm_config))
    about, chunk = spec.config, spec.config.cache.blocks_per_chunk
    tokens = {group.group_id: group.tokens_per_block * chunk for group in about.groups}
    histories = {
        table.number for group in geometry.groups if isinstance(group.validity, History) for table in group.tables
    }
    pages = {
        "row": _places(spec, kv_cache_config),
        "pages": sorted({group.pages for it in workers for group in geometry.layout_with(it).groups}),
        "layout": [about.kv_cache_layout, about.replicated_layout, about.canonical_layout, chunk],
        "ranks": [getattr(about.parallel, f"{it}_size") for it in ("world", "tp", "pp", "pcp", "dcp")],
        "hashes": [algorithm, about.cache.tokens_per_hash],
    }
    runs = {
        run._replace(size_bytes=row_bytes) for group in geometry.groups for table in group.tables for run in table.runs
    }
    run = runs.pop() if len(runs) == 1 else Run("bytes", "bytes", row_bytes)
    if row_bytes % ELEMENT_BYTES[run.element]:
        run = Run("bytes", "bytes", row_bytes)
    text = f"vllm tiering/{json.dumps(pages, separators=(',', ':'), sort_keys=True)}"
    group = GroupLayout(History(), (row_bytes,), text, Part(0, 1), runs=((run,),))
    return TieringSetup(
        config,
        KvLayout(max(tokens.values()), (group,)),
        identity.identify(vllm_config, version),
        {number: count for number, count in tokens.items() if number in histories},
    )


def page_details(worker: Any) -> dict[str, str]:  # noqa: ANN401 - vLLM's `WorkerWrapperBase`
    """By layer: the properties of a page that only a worker knows. vLLM calls it in each worker."""
    from kvtier.connect.vllm.pages import backend_name  # noqa: PLC0415 - imports torch

    layers = worker.vllm_config.compilation_config.static_forward_context
    return {name: backend_name(layer, worker.device) for name, layer in layers.items()}


def _places(spec: Any, config: KvCacheConfig) -> list[object]:  # noqa: ANN401
    """For each KV group its block size and layers, each with the place of its pages among those of the row.

    Layers of several groups may have one place. The number of blocks, which is in vLLM's offsets, does not matter.
    """
    starts = {
        layer: (tensor.offset + number * tensor.layer_stride, tensor.block_stride)
        for tensor in config.kv_cache_tensors
        for number, layer in enumerate(tensor.layers)
    }
    places = {start: place for place, start in enumerate(sorted(set(starts.values())))}
    return [
        [
            group.group_id,
            group.tokens_per_block,
            [[layer, places[starts[layer]]] for layer in group.layer_names if layer in starts],
        ]
        for group in spec.config.groups
    ]
