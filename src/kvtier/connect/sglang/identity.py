"""Identifies an SGLang engine: computes the fingerprint of its weights and of every setting that changes a token's KV.

SGLang's page hash covers a request's tokens, its images and other items (as 62-bit tokens), its adapter id and its
salt. It covers neither the model nor the adapter's contents. SGLang derives the id of an adapter named at start from
the adapter's name and path. So the fingerprint includes the digests of those adapters' files.

The fingerprint excludes ranks, the layout and the page size, because every object's name contains them (`host_pools`).
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from kvtier.connect.fingerprint_exclusions import plain
from kvtier.connect.model_files import adapter_files, checkpoint_digest, checkpoint_versions, local_folder
from kvtier.connect.sglang.sglang_types import Leaves
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import FileVersion, digest_files, file_versions, home_cache

LOCAL_FORMATS = frozenset({
    "auto", "safetensors", "fastsafetensors", "pt", "npcache", "gguf", "bitsandbytes", "mistral", "layered",
    "sharded_state",
})  # fmt: skip
"""Load formats that read files from a checkpoint's folder."""

SETTINGS = (
    "dtype", "kv_cache_dtype", "quantization", "modelopt_quant", "rl_quant_profile", "json_model_override_args",
    "model_impl", "model_config_parser", "model_loader_extra_config", "context_length", "weight_version",
    "mamba_ssm_dtype", "qsa_indexer_dtype", "prefill_kv_cache_dequant_dtype", "enable_int8_mamba_checkpoint",
    "enable_deepseek_v4_fp4_indexer", "enable_dsa_cache_layer_split", "enable_kv_cache_sharding",
    "enable_prefill_cp", "cp_strategy", "disable_hybrid_swa_memory", "mm_process_config", "trust_remote_code",
    # attention kernels, which also determine the order of bytes in a page
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "enable_page_major_kv_layout",
    "dsa_prefill_backend", "dsa_decode_backend", "dsa_topk_backend", "dsa_paged_mqa_logits_backend",
    "dsv4_attn_backend", "dsv4_prefill_backend", "enable_hisparse", "hisparse_config", "c128_page_size",
    # recurrent states
    "mamba_backend", "linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend",
    "enable_linear_replayssm", "linear_replayssm_cache_len", "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds", "mamba_radix_cache_strategy", "mamba_track_interval",
    # precision of the computation, beyond rounding
    "rl_on_policy_target", "enable_deterministic_inference", "enable_tf32_matmul", "quantize_and_serve",
    "enable_quant_communications", "deepep_dispatcher_output_dtype", "enable_w4a4_mxfp4_megamoe",
    "flashinfer_mxfp4_moe_precision", "fp4_gemm_runner_backend", "fp8_gemm_runner_backend", "bf16_gemm_backend",
    "moe_runner_backend", "moe_a2a_backend", "triton_attention_reduce_in_fp32",
    # embeddings of images and other items
    "disable_fast_image_processor", "image_processor_backend", "enable_precise_embedding_interpolation",
    # attention between the items of a prompt, and the modules that an adapter changes
    "enable_mis", "lora_target_modules", "experts_shared_outer_loras",
)  # fmt: skip
"""Server arguments that change KV or its meaning. The fingerprint includes their values as resolved by SGLang."""

DRAFT_SETTINGS = (
    "speculative_draft_load_format", "speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype",
    "speculative_draft_window_size", "speculative_num_steps", "speculative_eagle_topk", "enable_multi_layer_eagle",
    "speculative_draft_sink_size", "speculative_num_draft_tokens", "speculative_draft_attention_backend",
    "speculative_dflash_block_size", "speculative_dspark_block_size",
)  # fmt: skip
"""Settings of speculative decoding, whose draft model may keep KV in the same pages."""

REFUSED = {
    "dllm_algorithm": "KV of a diffusion model depends on later tokens",
    "is_embedding": "KV of an embedding model may depend on later tokens",
    "kt_weight_path": "kvtier cannot identify weights in its format",
    "custom_weight_loader": "kvtier cannot identify weights that a custom loader creates",
    "modelopt_checkpoint_restore_path": "kvtier cannot identify weights that are quantized at the start",
    "quantization_param_path": "kvtier does not identify scales in a separate file",
    "decrypted_config_file": "kvtier cannot identify an encrypted checkpoint",
    "uno_lora_path": "kvtier does not identify an adapter of the draft model",
    "forward_hooks": "kvtier cannot identify what the hooks change",
    "trust_mm_content_hashes": "a client could declare false hashes for its images or other items",
}
"""Server arguments that kvtier refuses, and the reasons."""

ENVIRONMENT = (
    "SGLANG_", "SGL_", "FLASHINFER_NVFP4_", "USE_ROCM_AITER_", "USE_TRITON_W8A8_", "DEEP_NORMAL_MODE_", "TIMM_FUSED_",
)  # fmt: skip
"""Prefixes of environment variables that may change KV, such as SGLANG_USE_HND_KVCACHE."""

UNRELATED_WORDS = frozenset({
    "CI", "COREDUMP", "CRASH", "DIR", "DISAGG", "DISAGGREGATION", "DISTRIBUTED", "GRAMMAR", "GRPC", "HEALTH",
    "HICACHE", "HOST", "HTTP", "ID", "INTERVAL", "IP", "IPC", "LOG", "METRICS", "MOONCAKE", "NUMA", "PEERS", "PORT",
    "PROFILE", "PROFILER", "PYSPY", "RANK", "RAY", "SCHEDULER", "SOCKET", "TEST", "THREADS", "TIMEOUT", "TRACE", "URL",
    "VISIBLE", "WARMUP", "WATCHDOG", "ZMQ",
    "AUTH", "CREDENTIAL", "KEY", "PASSWORD", "SECRET",
})  # fmt: skip
"""Words in the names of environment variables that do not change KV, or whose values are secret."""

REFUSED_VARIABLES = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "kvtier does not identify the code of models from outside SGLang",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "kvtier does not identify the code of processors from outside SGLang",
}

CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json", "params.json")
"""Files of a checkpoint that describe the model."""

PATH_MAX = 4096

NO_MODEL = frozenset({"", "none", "dummy"})


def identify(leaf: Leaves, release: str) -> tuple[Fingerprint, dict[Path, FileVersion]]:
    """Return the fingerprint of this engine, which is equal in all of its processes, and the files that it digests.

    Args:
        leaf: the resolved server arguments.
        release: SGLang's release, such as ``0.5.23``.

    Returns:
        The fingerprint, and the version of each file whose digest is part of it.

    Raises:
        ConfigError: the model cannot be identified, or a setting is not supported. The message names the cause.
    """
    for name, why in REFUSED.items():
        value = _value(leaf, name, release)
        if value:
            raise ConfigError(f"SGLang's {name} = {value!r} is not supported: {why}. Serve this model without kvtier")
    if (mode := _value(leaf, "weight_cache_mode", release)) != "off":
        raise ConfigError(
            f"SGLang's weight_cache_mode = {mode!r} is not supported: kvtier cannot identify the weights of the "
            "cache's daemon; allowed: 'off'"
        )
    folder = _folder(leaf, release)
    weights = checkpoint_digest(folder, is_code_trusted=bool(_value(leaf, "trust_remote_code", release)))
    digested = dict(weights.versions)
    others: dict[str, object] = {name: plain(_value(leaf, name, release), frozenset()) for name in SETTINGS}
    fingerprint = Fingerprint(
        weights=weights.digest,
        dtype=str(_value(leaf, "dtype", release)),
        other={
            # The page layout and the numerics change between releases.
            "engine": ["sglang", release],
            "config": _model_config(folder),
            "settings": others,
            "adapters": _adapters(leaf, release, digested),
            "draft": _draft(leaf, release, digested),
            "environment": environment(os.environ),
        },
    )
    return fingerprint, digested


def model_files(leaf: Leaves) -> tuple[dict[Path, FileVersion], bool]:
    """Return the versions of the local files that SGLang reads for a model, its draft model and adapters.

    Returns:
        The versions, and whether SGLang may download more files.
    """
    files: dict[Path, FileVersion] = {}
    for find in (_folder, _draft_folder):
        with suppress(ConfigError):  # the model is not local yet
            files |= checkpoint_versions(find(leaf, ""), is_code_trusted=bool(leaf("trust_remote_code")))
    for adapter in cast("list[Any]", leaf("lora_paths") or []):
        files |= file_versions(_adapter_files(adapter))
    paths = [str(path) for path in (leaf("model_path"), leaf("speculative_draft_model_path")) if path]
    return files, not all(Path(path).expanduser().exists() for path in paths)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may change KV. If a value names a file, the file's digest replaces it.

    Raises:
        ConfigError: a variable adds code to SGLang that cannot be identified.
    """
    for name, why in REFUSED_VARIABLES.items():
        if variables.get(name):
            raise ConfigError(f"{name} = {variables[name]!r} (environment) is not supported: {why}")
    found: dict[str, str] = {}
    for name, value in sorted(variables.items()):
        if name.startswith(ENVIRONMENT) and UNRELATED_WORDS.isdisjoint(name.split("_")):
            file = Path(value)
            is_file = len(value) < PATH_MAX and os.path.isfile(file)  # noqa: PTH113 - returns False for a bad path, without an error
            found[name] = digest_files([file], home_cache()).digest.hex() if is_file else value
    return found


def _value(leaf: Leaves, name: str, release: str) -> object:
    try:
        return leaf(name)
    except ValueError as error:
        raise ConfigError(
            f"SGLang {release} has no server argument {name!r}, which kvtier needs to identify KV"
        ) from error


def _folder(leaf: Leaves, release: str) -> Path:
    """Return the checkpoint's folder, or its file.

    Raises:
        ConfigError: the settings name no model, or the model's files are not local.
    """
    name = str(_value(leaf, "model_path", release) or "")
    load_format = str(_value(leaf, "load_format", release)).rpartition(".")[2].lower()
    if name.lower() in NO_MODEL:
        raise ConfigError(
            f"SGLang's model_path = {name!r} names no model, so KV cannot be identified; allowed: the name or path of "
            "a model"
        )
    if load_format not in LOCAL_FORMATS:
        raise ConfigError(
            f"SGLang's load_format = {load_format!r}: weights that are not files of a folder cannot be identified; "
            f"allowed: {', '.join(sorted(LOCAL_FORMATS))}"
        )
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in {"1", "true", "yes", "y"} and not Path(name).exists():
        raise ConfigError(
            f"SGLANG_USE_MODELSCOPE (environment): kvtier does not identify the files of {name} in ModelScope's "
            "cache; set model_path to a local folder, or unset the variable"
        )
    revision, place = _value(leaf, "revision", release), _value(leaf, "download_dir", release)
    folder = local_folder(name, cast("str | None", revision), cast("str | None", place))
    if folder is None:
        raise ConfigError(f"the weights of {name} are not in a local folder, so its KV cannot be identified")
    return folder


def _model_config(folder: Path) -> dict[str, object]:
    """Return the description of the model that its checkpoint contains (`CONFIG_FILES`); empty for a single file.

    Raises:
        ConfigError: the checkpoint has no description, or the description is not JSON.
    """
    if folder.is_file():  # a format such as GGUF, which describes itself
        return {}
    found: dict[str, object] = {}
    for name in CONFIG_FILES:
        path = folder / name
        try:
            found[name] = plain(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not found:
        raise ConfigError(f"{folder} contains no description of its model; kvtier looked for {', '.join(CONFIG_FILES)}")
    return found


def _adapter_files(adapter: Any) -> list[Path]:  # noqa: ANN401 - SGLang's `LoRARef`
    path = getattr(adapter, "lora_path", None)
    folder = None if path is None else local_folder(str(path), None, None)
    return [] if folder is None or not folder.is_dir() else list(adapter_files(folder))


def _adapters(leaf: Leaves, release: str, digested: dict[Path, FileVersion]) -> list[object]:
    """Return the id and the digest of the files of each adapter named at start, and add the files to `digested`.

    An adapter that is loaded later has a random id, so it needs no digest.
    """
    found: list[object] = []
    for adapter in cast("list[Any]", _value(leaf, "lora_paths", release) or []):
        files = _adapter_files(adapter)
        if not files:
            raise ConfigError(
                f"SGLang's lora_paths: the files of adapter {adapter} are not in a local folder, so its KV cannot be "
                "identified; allowed: a local folder that contains the adapter"
            )
        digest = digest_files(files, home_cache())
        digested |= digest.versions
        found.append([str(adapter.lora_id), digest.digest.hex()])
    return sorted(found, key=str)


def _draft_folder(leaf: Leaves, release: str) -> Path | None:
    """Return the folder of the draft model; None if there is no draft model.

    Raises:
        ConfigError: the draft model's files are not local.
    """
    name = _value(leaf, "speculative_draft_model_path", release)
    if name is None:
        return None
    revision = cast("str | None", _value(leaf, "speculative_draft_model_revision", release))
    folder = local_folder(str(name), revision, cast("str | None", _value(leaf, "download_dir", release)))
    if folder is None:
        raise ConfigError(f"the draft model's weights {name} are not in a local folder, so KV cannot be identified")
    return folder


def _draft(leaf: Leaves, release: str, digested: dict[Path, FileVersion]) -> dict[str, object]:
    """Return what identifies speculative decoding: its algorithm and settings, and the draft model's weights."""
    algorithm = _value(leaf, "speculative_algorithm", release)
    if algorithm is None:
        return {}
    found: dict[str, object] = {"algorithm": str(algorithm)}
    found |= {name: plain(_value(leaf, name, release), frozenset()) for name in DRAFT_SETTINGS}
    folder = _draft_folder(leaf, release)
    if folder is not None:
        weights = checkpoint_digest(folder)
        digested |= weights.versions
        found |= {"weights": weights.digest.hex(), "config": _model_config(folder)}
    return found


def leaves(context: Any) -> Leaves:  # noqa: ANN401 - SGLang's runtime context
    """Return the function with which SGLang's runtime context looks up a resolved server argument.

    Raises:
        ConfigError: SGLang has published no arguments in this process.
    """
    try:
        context.server_args  # noqa: B018 - raises
    except ValueError as error:
        raise ConfigError(
            "SGLang has published no server arguments in this process, so its KV cannot be identified"
        ) from error
    return context.config_leaf
