"""Keys of LMCache 0.5.6, vLLM 0.32 and 0.33, Mooncake 0.3.13 and SGLang 0.5.23, and the fate of each key.

The tables hold facts about other packages. `convert_settings` converts values of keys that become settings of kvtier.
`fate`, `answers` and `final` return the fate of a key, in the words that `convert_settings` prints.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from kvtier.config.value_types import size_text
from kvtier.keys.secret import redacted

OFF = (False, "False", "false")

STAYS, LOST, UNKNOWN, NOT_NEEDED = "(stays)", "(no counterpart)", "(not known)", "(not needed)"


class Fate(NamedTuple):
    """The fate of a key: a setting of kvtier or one of the four words above, with a reason or a difference."""

    becomes: str
    why: str = ""


NO_DISK = Fate(NOT_NEEDED, "LMCache uses a disk only with both local_disk and max_local_disk_size")

Table: TypeAlias = Mapping[str, Mapping[str, str]]
"""For each of the four words, the reasons for it, and for each reason the patterns of its keys."""

LMCACHE: Table = {
    LOST: {
        "kvtier reuses prefixes only": "enable_blend* blend_* enable_segmented_prefix enable_sparse",
        "kvtier has no peer-to-peer transfer; a shared tier reaches all engines": "enable_p2p p2p_* transfer_channel",
        "--role prefill and --role decode exchange KV through a shared tier": "enable_pd pd_* enable_xpyd",
        "kvtier has no tier for NIXL, GDS or CXL": "*nixl_* *gds* maru_* l1_devdax_path dax.* rust_*",
        "a running engine answers `kvtier cache` on control.socket": "*controller* *lmcache_instance_id "
        "lmcache_worker_* internal_api_server_* script_allowed_imports run_script_api_enabled http_* coordinator_* "
        "instance_id heartbeat_url",
        "kinds of tier are plug-ins of kvtier, too": "*storage_plugins external_backends *plugin_locations "
        "remote_storage_plugin.*",
        "each engine asks the tiers itself": "external_lookup_client",
        "kvtier stores only the KV of engines": "*hidden_state* ec_*",
        "trace.path records requests for kvtier replay": "*chunk_statistics*",
        "a request opts out itself: store false in kv_transfer_params": "priority_limit force_skip_save",
        "settings come from a file, the environment and flags": "app_id remote_config_url",
        "host.capacity_bytes is all the memory that kvtier takes, for all ranks": "reserve_local_cpu_size "
        "first_rank_max_local_cpu_size",
        "the system's transparent huge pages apply": "*hugepages",
        "bind the engine's processes with numactl": "numa_mode gpu_to_numa_mapping",
        "set the tier's addresses, username and password_file": "resp_host resp_port resp_username resp_password",
        "the master places objects; those on SSDs of its nodes are misses": "*storage_root_dir *prefer_local_alloc",
        "engines lend Mooncake no memory; mooncake_client does": "*global_segment_size",
        "kvtier does not speak the sessions of S3 Express One Zone": "s3_enable_s3express",
        "kvtier has no tier for it": "azure_* hf3fs_* sagemaker_* infinistore_* bigtable_*",
        "it is for tests": "audit_* hit_miss_ratio enable null_block_id",
    },
    NOT_NEEDED: {
        "keys are digests, equal in every process": "PYTHONHASHSEED pre_caching_hash_algorithm hash_algorithm",
        "kvtier stores whole chunks, and the engine computes the rest": "save_unfull_chunk discard_partial_chunks",
        "host memory is always a cache, never only a buffer": "local_cpu",
        "copies run while the engine computes": "use_layerwise enable_async_loading async_loading force_store_wait",
        "kvtier's scheduler asks all tiers itself": "enable_scheduler_bypass_lookup",
        "the planner loads where that is faster than computing": "min_retrieve_tokens",
        "every wait has a deadline: limits.load_deadline_s, transfer_deadline_s": "blocking_timeout_secs "
        "lookup_timeout_ms request_timeout connection_timeout *transfer_timeout lookup_backoff_time *_ttl_seconds",
        "--kv-events-config of vLLM turns on kvtier's events, too": "enable_kv_events kv_msg_* *kv_event*",
        "each rank has a store of its own in the directory": "local_disk_path_sharding",
        "every tier receives what is stored, and lookups ask all in order": "store_location retrieve_locations "
        "l2_store_policy l2_prefetch_*",
        "kvtier runs in the engine: there is no server": "mp_* mp.* host port engine_type transport shm_name "
        "lmcache_rpc_port *lookup_server_worker_ids server_module *worker*seconds",
        "host memory is taken at the start; host.populate touches all of it": "enable_lazy_memory_allocator "
        "lazy_memory_* l1_*",
        "each tier enforces its own cap": "eviction_*",
        "the defaults of read_threads, write_threads and loads_in_flight suit most": "*num_threads *num_workers "
        "*_io_threads s3_max_* max_workers max_*_workers disk_io_threads",
        "direct_io of the tier decides": "*odirect fs_connector_* use_direct_io",
        "every object has a header with its layout": "save_chunk_meta separate_object_groups",
        "ranks with equal KV share one copy: count its size once": "save_only_first_rank",
        "host memory of a transfer is free when the transfer has ended": "pin_*",
        "kvtier logs through the engine, and sends nothing anywhere": "track_usage log_level disable_observability "
        "*otlp*",
        "the file of --from-lmcache is read": "config_file",
        "a switch of older releases": "use_experimental py_enable_gc",
        "kvtier asks the server whether it is a cluster": "valkey_mode",
        "tiers.valkey.lifetime_s, 7 days, is always on": "valkey_enable_ttl",
        "the client and the server agree on it": "s3_prefer_http2",
        "it is a detail of LMCache": "use_gpu_connector_v3 use_native supported_transfer_mode "
        "local_cpu.* full_sync_* enable_dedup_content isolated_ipc grpc_* periodic_* "
        "runtime_plugin_config",
        "kvtier uses P2PHANDSHAKE, and finds its address": "*metadata_server *local_hostname *local_buffer_size",
        "its keys in extra_config name the tiers": "remote_storage_plugins",
    },
}

OFFLOADING: Table = {
    LOST: {
        "engines lend Mooncake no memory; mooncake_client does": "*global_segment_size *GLOBAL_SEGMENT_SIZE mode "
        "*standalone_storage *STANDALONE_STORAGE client_server_address MOONCAKE_CLIENT",
        "the master places objects; those on SSDs of its nodes are misses": "*ssd_offload* enable_offload "
        "*SSD_OFFLOAD* *OFFLOAD_FILE* preferred_segment",
        "other sizes of an engine share MLA's latents only: store.token_shares": "*store_tp* prefill_tp_sizes",
        "kinds of tier and policies are plug-ins of kvtier, too": "spec_module_path cache_policy_module_path "
        "module_path",
        "store.chunk_tokens counts tokens: these blocks times the engine's block size": "blocks_per_chunk",
        "the nearest is --set store.write_policy=selective, for lower tiers": "store_threshold max_tracker_size",
        "host.capacity_bytes is the total of all ranks": "cpu_bytes_to_use_per_rank",
        "the codecs of store.codec are lossless without store.loss": "serde",
        "kvtier has no memory pool of its own on the device": "custom_mem_pool",
        "the tier disk has reserve_bytes, 1 GiB": "min_free_space *MIN_FREE_SPACE",
        "tiers.valkey.prefix; other programs' objects cannot be read": "key_prefix affinity_tag",
        "remove it: it replaces HiCache, and kvtier would store nothing": "--radix-cache-backend --enable-lmcache "
        "--lmcache-* --enable-unified-cache-external-linker",
    },
    NOT_NEEDED: {
        "the tiers that are named are used": "spec_name kv_offload_backend shared locality",
        "--kv-events-config of vLLM turns on kvtier's events, too": "self_describing_kv_events enable_kv_events",
        "names carry each rank's share of layers and heads": "canonical_layout enable_cross_layers_blocks",
        "each write to a tier has a deadline, and a tier that fails is not used for a while": "backpressure",
        "every wait has a deadline: limits.load_deadline_s, transfer_deadline_s": "request_timeout connection_timeout",
        "copies run while the engine computes": "load_async lookup_async use_layerwise lazy_offload",
        "host memory is the buffer of every tier": "disk_buffer_slots",
        "each object has the KV of one group of layers": "enable_group_semantics",
        "kvtier runs in the engine: there is no server": "lookup_rpc_port",
        "direct_io of the tier decides": "use_page_cache use_odirect",
        "it is a detail of the other cache's files": "read_ahead_size relative_tmp_dir",
        "the defaults of read_threads, write_threads and loads_in_flight suit most": "io_threads num_workers "
        "per_op_workers s3_num_io_threads",
        "the client and the server agree on it": "s3_prefer_http2",
        "kvtier uses P2PHANDSHAKE, and finds its address": "metadata_server *META_DATA_SERVER local_hostname "
        "MOONCAKE_LOCAL_HOSTNAME local_buffer_size",
        "each tier enforces its own cap, and has an index": "eviction* *EVICTION_RATIO *metadata_* *METADATA_*",
        "what a tier stores always survives a restart": "persist",
        "kvtier asks the server itself": "cluster_mode master_metrics_port check_server MOONCAKE_*",
        "what it names is converted": "*MOONCAKE_CONFIG_PATH",
        "kvtier's JSON has its own": "kv_connector_module_path kv_load_failure_policy engine_id",
        "it is for connectors between servers": "kv_ip kv_port kv_rank kv_parallel_size kv_buffer_* "
        "enable_permute_local_kv",
        "remove it: the printed flags have it": "--enable-hierarchical-cache --enable-hicache --page-size "
        "--hicache-storage-backend*",
    },
    STAYS: {
        "SGLang keeps host memory itself; kvtier adds host.staging_bytes for each rank": "--hicache-ratio "
        "--hicache-size --hicache-host-memory-*",
        "it is SGLang's own": "SGLANG_HICACHE_* extra_backend_tag --hicache-write-policy --hicache-io-backend "
        "--hicache-mem-layout --hicache-storage-prefetch-*",
    },
}
"""Keys of vLLM's own offloading, its ``--kv-transfer-config``, of Mooncake, of LMCache's adapters, and of SGLang."""

_FILES = {
    **dict.fromkeys(("base_path", "root_dir", "file_storage_path", "fs_base_path"), "path"),
    "max_capacity_gb": "GiB",
    **dict.fromkeys(("max_size", "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"), "each_bytes"),
    "n_read_threads": "read_threads",
    "n_write_threads": "write_threads",
}

TIER_KEYS: Mapping[str, Mapping[str, str]] = {
    "disk": {"disk_capacity_bytes": "capacity_bytes"},
    "directory": _FILES,
    "shared_directory": _FILES,
    "valkey": {
        "startup_nodes": "addresses",
        **dict.fromkeys(("username", "valkey_username"), "username"),
        **dict.fromkeys(("password", "valkey_password"), "password"),
        **dict.fromkeys(("valkey_database", "database_id"), "database"),
        "tls_enable": "tls",
        **dict.fromkeys(("valkey_ttl_sec", "ttl_seconds"), "lifetime_s"),
    },
    "s3": {
        **dict.fromkeys(("bucket", "s3_endpoint"), "url"),
        **dict.fromkeys(("prefix", "s3_file_prefix"), "prefix"),
        "endpoint_override": "endpoint",
        **dict.fromkeys(("scheme", "disable_tls"), "scheme"),
        **dict.fromkeys(("region", "s3_region"), "region"),
        "ca_bundle": "ca_file",
        "max_capacity_gb": "GiB",
    },
    "mooncake": {
        **dict.fromkeys(("master_server_address", "mooncake_master_server_address", "MOONCAKE_MASTER"), "master"),
        **dict.fromkeys(("protocol", "mooncake_protocol", "MOONCAKE_PROTOCOL"), "protocol"),
        **dict.fromkeys(("device_name", "mooncake_device_name", "MOONCAKE_DEVICE"), "devices"),
        **dict.fromkeys(("tenant_id", "mooncake_tenant_id", "MOONCAKE_TENANT_ID"), "tenant_id"),
    },
}
"""For each kind of tier, its settings by the keys of other packages. `convert_settings` converts the values of some."""

SECRETS: Mapping[str, str] = {
    **dict.fromkeys(("aws_access_key_id", "access_key"), "AWS_ACCESS_KEY_ID"),
    **dict.fromkeys(("aws_secret_access_key", "secret_key"), "AWS_SECRET_ACCESS_KEY"),
    "session_token": "AWS_SESSION_TOKEN",
}
"""For each secret, the server's environment variable that is to hold it."""

KINDS: Mapping[str, str] = {
    **dict.fromkeys(("redis", "rediss", "valkey", "resp", "redis-cluster"), "valkey"),
    **dict.fromkeys(("s3", "obj"), "s3"),
    **dict.fromkeys(("mooncakestore", "mooncake", "mooncake_store"), "mooncake"),
    **dict.fromkeys(("fs", "fs_native", "file"), "directory"),
}
"""The kind of tier for schemes of LMCache's `remote_url`, and for types of adapters, secondary tiers and backends."""

NO_KINDS: Mapping[str, str] = {
    "redis-sentinel": "kvtier does not support Sentinel: name the primary, or a cluster: --tier valkey:HOST",
    "unix": "kvtier uses no Unix sockets: --tier valkey:HOST",
    "lm": "it is LMCache's own server: use valkey, mooncake or s3",
    "hf3fs": "mount it, and use shared_directory",
}

REPLACED: Mapping[str, str] = {
    "LMCacheConnectorV1": "--from-lmcache FILE or --from-lmcache env converts the rest, too",
    "LMCacheMPConnector": "--from-lmcache 'FLAGS' converts those of lmcache server, too",
    "OffloadingConnector": "",
    "SimpleCPUOffloadConnector": "",
    "MooncakeStoreConnector": "MOONCAKE_CONFIG_PATH has the master's address; without it: --tier mooncake:HOST",
}
"""vLLM's connectors that kvtier replaces, and where their other settings are."""

HICACHE_FOLDER = "/tmp/hicache"  # noqa: S108 - SGLang's default


SHARED = {"shared_directory", "valkey", "redis", "rediss", "s3", "mooncake"}
"""Kinds of tier that several engines share, and their schemes."""

ALLOWED: Mapping[str, str] = {
    **dict.fromkeys(
        ("max_local_cpu_size", "max_local_disk_size", "l1_size_gb", "max_capacity_gb"), "a number of GB, at least 0"
    ),
    "local_disk": "a path, or file:// and a path",
    "remote_url": "a URL; the path of redis:// is the number of a database",
}
"""Allowed values for messages, where they are not simply a number from 0."""

S3_PARTS = ("url", "endpoint", "virtual_host", "allow_http")
"""The settings of the tier `s3` that `s3_tier` makes from a URL."""

_NEXT = re.compile(r", (?=tiers\.)")
"""Separates the settings of one row."""

_PLAIN = re.compile(r"(?:[^']|'[^']{1,2}'|'<[a-z ]+>')*")
"""Matches a reason of PyYAML that quotes only punctuation of the file. Any other reason may quote a secret."""


def fate(key: str, table: Table, value: object = None) -> Fate:
    """Return the fate of a key that kvtier lacks. The value of a key without a counterpart shows whether it is off."""
    found = (
        Fate(becomes, why)
        for becomes, reasons in table.items()
        for why, patterns in reasons.items()
        if any(fnmatchcase(key, pattern) for pattern in patterns.split())
    )
    becomes = next(found, Fate(UNKNOWN, "kvtier does not know this key, and ignored it"))
    return Fate(NOT_NEEDED, "it is off") if becomes.becomes == LOST and value in OFF else becomes


def answers(*, is_wanted: bool) -> Fate:
    """Return the fate of a switch for the KV of answers, which kvtier always stores."""
    more = Fate(LOST, "the whole chunks of answers are always stored, so kvtier writes more")
    return Fate(NOT_NEEDED, "the whole chunks of answers are stored, too") if is_wanted else more


def names(fate: Fate) -> list[str]:
    """Return the names of the settings that a key becomes."""
    return [re.split(" = |: ", part)[0] for part in _NEXT.split(fate.becomes)]


def final(fate: Fate, values: Mapping[str, object], by: Mapping[str, str]) -> Fate:
    """Return the fate that the table shows, once all converted settings and the user's flags are known.

    Args:
        fate: fate of the key when it was read.
        values: the converted settings that are printed.
        by: the user's flags by the settings that they override.
    """
    parts: list[str] = []
    for name, part in zip(names(fate), _NEXT.split(fate.becomes), strict=True):
        if name in by:
            if len(fate.becomes) == len(part):
                is_cap = by[name] == "--tier" and name.startswith("tiers.") and name.endswith(".capacity_bytes")
                fate = Fate(part, "a cap goes with its tier: --tier KIND:PATH?capacity_bytes=SIZE" if is_cap else "")
            parts.append(f"{name}: (overridden by {by[name]})")
        elif name in values and "(overridden by " not in part:
            parts += [shown(name, values[name])] if values[name] not in (False, "") else []
        elif name.startswith("tiers.disk.") and " = " in part:
            return NO_DISK
        elif name == part and name.startswith("tiers."):
            continue
        else:
            parts.append(part)
    return Fate(", ".join(parts), fate.why)


def shown(name: str, value: object) -> str:
    """Return a setting and its value for the table."""
    value = str(value).lower() if isinstance(value, bool) else value
    text = size_text(value) if isinstance(value, int) and name.endswith("_bytes") else redacted(str(value))
    return f"{name} = {text}"


def s3_tier(tier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tier `s3` with its URL and endpoint in kvtier's form.

    The host in LMCache's URL begins with the bucket.
    """
    name, _, server = str(tier.get("url", "")).removeprefix("s3://").partition(".")
    endpoint = str(tier.get("endpoint", ""))
    is_hosted = bool(server) and not endpoint and not server.endswith("amazonaws.com")
    name, endpoint = (
        (name, f"{name}.{server}") if is_hosted else (f"{name}.{server}" if endpoint and server else name, endpoint)
    )
    is_plain = endpoint.startswith("http://") or ("://" not in endpoint and tier.get("scheme") in (True, "http"))
    url = f"http{'' if is_plain else 's'}://{endpoint.rpartition('://')[2]}" if endpoint else ""
    made = {
        "url": "/".join(filter(None, ["s3:/", name, *str(tier.get("prefix", "")).split("/")])) + "/",
        "endpoint": url,
        "virtual_host": is_hosted,
    }
    made["allow_http"] = bool(endpoint) and is_plain
    return {key: value for key, value in tier.items() if key not in {"prefix", "scheme"}} | made


def reason(error: Exception) -> str:
    """Return where and why a string cannot be parsed. For an unfinished part, the line is where it begins."""
    problem = str(getattr(error, "problem", None) or getattr(error, "msg", ""))
    is_open = str(getattr(error, "context", "")).startswith("while scanning a ")
    mark = getattr(error, "context_mark" if is_open else "problem_mark", None)
    line = getattr(error, "lineno", None) or (mark.line + 1 if mark else 0)
    why = problem if _PLAIN.fullmatch(problem) else f"{problem.partition(chr(39))[0]}(hidden)"
    return (f", line {line}" if line else "") + (f": {why}" if why else "")
