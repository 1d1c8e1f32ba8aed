"""The names of vLLM that the connector uses, and which of them the installed vLLM lacks.

vLLM guarantees none of these names. They are looked up in vLLM's source without importing it, which takes 0.1 s instead
of 5 s. Names prove nothing about the layout of a page; see `selftest`.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any

from kvtier.connect.vllm.vllm_types import VllmConfig

_FRAMES_MAX = 16

_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"

USED: Mapping[str, Mapping[str, str]] = {
    "config/vllm.py": {
        "VllmConfig": "model_config cache_config parallel_config scheduler_config load_config lora_config "
        "attention_config compilation_config speculative_config kv_transfer_config kv_events_config "
        "weight_transfer_config instance_id max_concurrent_batches device_config",
    },
    "config/model.py": {
        "ModelConfig": "model model_weights revision code_revision trust_remote_code hf_config architectures dtype "
        "quantization quantization_config model_impl max_model_len disable_sliding_window multimodal_config "
        "is_encoder_decoder runner_type enable_sleep_mode hf_text_config get_total_num_kv_heads "
        "using_transformers_backend use_mla",
    },
    "config/cache.py": {
        "CacheConfig": "block_size cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype "
        "enable_prefix_caching",
    },
    "config/parallel.py": {
        "ParallelConfig": "rank tensor_parallel_size pipeline_parallel_size decode_context_parallel_size "
        "prefill_context_parallel_size nnodes enable_eplb",
    },
    "config/scheduler.py": {"SchedulerConfig": "max_num_batched_tokens long_prefill_token_threshold"},
    "config/speculative.py": {"SpeculativeConfig": "method"},
    "config/load.py": {"LoadConfig": "load_format download_dir"},
    "config/compilation.py": {"CompilationConfig": "static_forward_context is_custom_op_enabled"},
    "config/device.py": {"DeviceConfig": "device_type"},
    "config/multimodal.py": {"MultiModalConfig": "mm_processor_cache_gb"},
    "config/kv_events.py": {"KVEventsConfig": "enable_kv_cache_events"},
    "config/kv_transfer.py": {
        "KVTransferConfig": "kv_connector kv_connector_module_path kv_role kv_load_failure_policy "
        "kv_connector_extra_config engine_id",
    },
    _BASE: {
        "KVConnectorBase_V1": "_kv_cache_manager",
        "KVConnectorRole": "SCHEDULER WORKER",
        "KVConnectorTransferResults": "finished_recving failed_recving",
        "SupportsHMA": "request_finished_all_groups",
    },
    "distributed/kv_events.py": {
        "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name group_idx",
        "BlockRemoved": "block_hashes medium group_idx",
    },
    "v1/metrics/cache_hit_source.py": {"CacheHitSource": "HOST DISK EXTERNAL_UNSPECIFIED"},
    "v1/core/kv_cache_utils.py": {
        "": "maybe_convert_block_hash",
        "KVCacheBlock": "block_id ref_cnt block_hash next_free_block",
        "FreeKVCacheBlockQueue": "iter_blocks_after remove prepend_n",
    },
    "v1/core/block_pool.py": {
        "BlockPool": "blocks free_block_queue touch free_blocks evict_blocks unpin_blocks num_gpu_blocks "
        "get_num_free_blocks",
    },
    "v1/engine/core.py": {"EngineCore": "model_executor"},
    "v1/executor/abstract.py": {"Executor": "collective_rpc"},
    "v1/worker/worker_base.py": {"WorkerBase": "get_model"},
    "v1/core/kv_cache_manager.py": {
        "KVCacheManager": "block_pool get_block_ids get_computed_blocks",
        "KVCacheBlocks": "get_block_ids",
    },
    "v1/kv_cache_interface.py": {
        "KVCacheConfig": "num_blocks kv_cache_groups kv_cache_tensors kv_cache_layout cache_hit_alignment_tokens "
        "hash_block_size",
        "KVCacheGroupSpec": "layer_names kv_cache_spec role host_resident enable_kv_transfer",
        "KVCacheTensor": "layers offset layer_stride block_stride",
        "KVCacheSpec": "block_size prefix_cacheable num_heads num_states state_content_size_bytes",
        "FullAttentionSpec": "dtype kv_quant_mode tokens_per_state non_causal",
        "MLAAttentionSpec": "model_version cache_role",
        "SlidingWindowSpec": "sliding_window extra_retained_tokens",
        "MambaSpec": "shapes dtypes mamba_type mamba_cache_mode num_speculative_blocks",
        "UniformTypeKVCacheSpecs": "kv_cache_specs",
    },
    "v1/core/sched/output.py": {
        "SchedulerOutput": "num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs kv_connector_block_state",
        "NewRequestData": "req_id",
        "CachedRequestData": "resumed_req_ids",
    },
    "v1/outputs.py": {"KVConnectorOutput": "kv_connector_worker_meta invalid_block_ids"},
    "v1/request.py": {
        "Request": "request_id status all_token_ids num_tokens num_prompt_tokens num_computed_tokens "
        "num_in_flight_tokens block_hashes lora_request cache_salt prompt_embeds prompt_is_token_ids mm_features "
        "pooling_params resumable skip_reading_prefix_cache kv_transfer_params",
    },
    "lora/request.py": {"LoRARequest": "lora_name lora_path lora_int_id load_inplace is_3d_lora_weight"},
}
"""Names in use, by file in vLLM's package and class ("" for the module). Hooks are checked separately."""

_CONNECTOR = Path(__file__).with_name("connector.py")


def package() -> Path | None:
    """Folder of the installed vLLM; None without one. Imports nothing."""
    found = find_spec("vllm")
    if found is None or found.origin is None or found.submodule_search_locations is None:  # a script called vllm.py
        return None
    return Path(found.origin).parent


def missing(root: Path, connector: Path = _CONNECTOR) -> list[str]:
    """Names that the connector uses and the vLLM at `root` lacks, such as ``v1/request.py: Request.status``.

    A name counts if any class of the file defines it, since a base or a subclass may.

    Args:
        root: vLLM's package.
        connector: source of the connector, whose hooks must match vLLM's.
    """
    found: list[str] = []
    for file, classes in USED.items():
        tree = _parsed(root / file)
        if tree is None:
            found.append(f"{file}: no such file, or not valid Python")
            continue
        known = {"", *_defined(tree)}
        for name, members in classes.items():
            lacking = [f".{each}" for each in members.split() if each not in known] if name in known else [""]
            found += [f"{file}: {name}{each}".replace(": .", ": ") for each in lacking]
    theirs = _hooks(root / _BASE)
    for name, taken in _hooks(connector).items():
        if name not in theirs:
            found.append(f"{_BASE}: KVConnectorBase_V1.{name}")
        elif theirs[name] != taken:
            has = ", ".join(theirs[name])
            found.append(f"{_BASE}: KVConnectorBase_V1.{name}({', '.join(taken)}), it has ({has})")
    return found


def config_being_made() -> VllmConfig | None:
    """The `VllmConfig` whose constructor is importing the connector, found on the stack; None for other callers.

    A connector gets vLLM's configuration only after the weights are loaded, up to half an hour later. But
    `VllmConfig.__post_init__` imports the connector's class before that, in the server's process.
    """
    for frame, _ in islice(walk_stack(inspect.currentframe()), _FRAMES_MAX):
        found: Any = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and type(found).__name__ == "VllmConfig":
            transfer = found.kv_transfer_config
            # Under a MultiConnector the settings belong to a configuration that does not exist yet.
            is_ours = getattr(transfer, "kv_connector", None) == "KvtierConnector"
            return found if is_ours and found.model_config is not None else None
    return None


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _defined(node: ast.AST) -> Iterator[str]:
    """Names of the classes, functions and fields below `node`, and the attributes that its functions set."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
            stored = (each for each in ast.walk(inner) if isinstance(each, ast.Attribute))
            yield from (each.attr for each in stored if isinstance(each.ctx, ast.Store))  # of self, as a rule
            continue
        if isinstance(inner, ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        yield from _defined(inner)


def _hooks(path: Path) -> dict[str, list[str]]:
    """Arguments of the public methods of a file's classes, by method."""
    return {
        each.name: [it.arg for it in ast.iter_child_nodes(each.args) if isinstance(it, ast.arg)]
        for kind in getattr(_parsed(path), "body", ())
        for each in getattr(kind, "body", ())
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    }
