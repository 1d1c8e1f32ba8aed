"""Determines what a secondary tier of vLLM's tiering manager stores, and what identifies the stored bytes.

An object is one chunk of vLLM's host memory in one KV group: a row with the pages of all workers, as
`SharedOffloadRegion` lays them out. Its bytes are opaque. The fingerprint and the layout's `pages` cover everything
that determines their meaning, and are part of every object's name.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvtier.config.loader import load
from kvtier.config.sections import Config
from kvtier.connect.vllm import engine_hooks, identity, installed_engine, support
from kvtier.connect.vllm.engine_setup import settings_of
from kvtier.connect.vllm.geometry import DcpShards, Geometry, layer_starts
from kvtier.connect.vllm.vllm_types import KvCacheConfig, VllmConfig
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.layout import ELEMENT_BYTES, GroupLayout, History, KvLayout, Loss, Part, Run

ORIGIN = "secondary_tiers of kv_connector_extra_config"

TIER: Mapping[str, str] = {"type": "KvtierSecondaryTier", "module_path": "kvtier.connect.vllm.secondary_tier"}
"""How an entry in `secondary_tiers` names kvtier."""

VLLM_KEYS = frozenset({*TIER, "backpressure", "locality", "enable_kv_events"})
"""Keys of the entry that are not settings of kvtier."""

USED = re.compile(
    r"tiers(\..+)?|(journal|log)\..+|host\.(staging_bytes|populate)|store\.(codec|loss|secret|keys|tenant)\w*"
    r"|limits\.(load|store|open|close)_deadline_s"
)
"""Names of settings that have an effect below vLLM's offloading."""

HASHES = ("sha256", "sha256_cbor")
"""vLLM's hash algorithms that never give two prompts the same hash. Their chains start from a fixed seed or from
`PYTHONHASHSEED`. With the same seed, a prompt has the same hashes after a restart. Chains from different seeds share no
hash."""

ASK_WORKERS_S = 60.0


class TieringSetup(NamedTuple):
    """Settings, layout and identity of an engine with the tiering manager."""

    config: Config
    layout: KvLayout
    """A single group for all of vLLM's groups, because an object is a whole row."""
    identity: identity.EngineIdentity
    prefix_groups: Mapping[int, int]
    """Tokens per chunk of each KV group that is valid only as a whole prefix, by group number."""


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
        settings: settings of kvtier in the tier's entry of `secondary_tiers`. They override the settings file and the
            environment.
        spec: vLLM's specification, with the division into chunks and ranks.
        vllm_config: the engine's configuration.
        kv_cache_config: the configuration of its KV cache.
        row_bytes: bytes per chunk in vLLM's host memory.
        workers: `page_details` of each worker.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM or its block hash is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    loaded = settings_of(settings, load(), ORIGIN)
    config = loaded.config
    if not config.tiers:
        raise ConfigError(
            "no tier is configured", setting="tiers", origin=ORIGIN, allowed='one or more, such as ["disk:/path/to/kv"]'
        )
    support.check_settings(config, loaded.origins, loaded.file, is_start=True)
    check_class(config.store.loss)
    version = installed_engine.check_release()
    check_tiering_engine(vllm_config)
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
        "hashes": [vllm_config.cache_config.prefix_caching_hash_algo, about.cache.tokens_per_hash],
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


def check_class(loss: Loss) -> None:
    """Refuse a lossy class (`store.loss`). vLLM would also pass lossy KV to other secondary tiers, without the class.

    Raises:
        ConfigError: the engine has a lossy class.
    """
    if loss != "none":
        raise ConfigError(
            "vLLM's offloading does not define the arrangement of a row, and a secondary tier stores rows",
            setting="store.loss",
            value=loss,
            allowed="none; or any class with kvtier as the connector",
        )


def check_tiering_engine(vllm_config: VllmConfig) -> None:
    """Refuse an engine that the connector also refuses, or that only the connector can serve.

    Raises:
        ConfigError: the block hash is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    support.check_engine(vllm_config)
    if support.looks_ahead(vllm_config):
        raise UnsupportedModelError(
            "a draft model with its own KV reads the next token, which vLLM's block hash does not cover: stored KV "
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
            "two prompts may have one hash, so stored KV could be that of another prompt",
            setting="prefix_caching_hash_algo",
            value=repr(algorithm),
            allowed=", ".join(map(repr, HASHES)),
        )


def page_details(worker: Any) -> dict[str, str]:  # noqa: ANN401 - vLLM's `WorkerWrapperBase`
    """Return the properties of a page that only a worker knows, by layer. vLLM calls it in each worker."""
    from kvtier.connect.vllm.worker.pages import backend_name  # noqa: PLC0415 - imports torch

    engine_hooks.check("layers", *(("cpu",) if worker.device.type == "cpu" else ()))
    return {
        name: backend_name(layer, worker.device)
        for name, layer in worker.vllm_config.compilation_config.static_forward_context.items()
    }


def _places(spec: Any, config: KvCacheConfig) -> list[object]:  # noqa: ANN401
    """List the block size and layers of each KV group, and the place of each layer's pages in the row.

    Layers of several groups may share a place. The number of blocks affects vLLM's offsets, but not the places.
    """
    starts = layer_starts(config)
    places = {start: place for place, start in enumerate(sorted(set(starts.values())))}
    return [
        [
            group.group_id,
            group.tokens_per_block,
            [[layer, places[starts[layer]]] for layer in group.layer_names if layer in starts],
        ]
        for group in spec.config.groups
    ]
