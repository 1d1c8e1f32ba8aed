"""Identifies a vLLM engine: computes the fingerprint of its weights and of every setting that changes a token's KV.

All processes of one engine compute the same fingerprint. The weights' digest covers the files that the engine loaded.
If they cannot be read, the engine gets a private digest and shares KV with no other engine.

The fingerprint omits the attention backend, the CPU's vector instructions (`worker.pages`) and the rank, because every
object's name contains them. It also omits everything that belongs to single requests (`requests.keys`).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from kvtier.connect.fingerprint_exclusions import plain
from kvtier.connect.model_files import checkpoint_digest, local_folder
from kvtier.connect.vllm.installed_engine import release_of
from kvtier.connect.vllm.support import draft_model
from kvtier.connect.vllm.vllm_types import ConfigPart, VllmConfig, plain_name
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.weights import FileVersion, WeightsDigest

LOCAL_FORMATS = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "sharded_state",
})  # fmt: skip
"""Load formats that read only files of a checkpoint's folder. `npcache` is missing, because it reads files that an
earlier start has converted."""


class EngineIdentity(NamedTuple):
    """An engine's fingerprint, and how it was obtained."""

    fingerprint: Fingerprint
    weights: WeightsDigest | None
    """Digest of the weights, with the cost of computing it; None if the engine is private."""
    is_private: bool
    """Whether no other engine can ever use this KV. It then stays in host memory."""
    detail: str
    """Why the engine is private; empty if it is not."""
    versions: Mapping[Path, FileVersion] = {}
    """The versions of the files that the digests of the weights and of the draft model's weights cover."""

    def made_private(self, config: VllmConfig, detail: str) -> "EngineIdentity":
        """Return the private identity of an engine that may have read files other than those identified."""
        fingerprint = replace(self.fingerprint, weights=_own_digest(config))
        return EngineIdentity(fingerprint, None, is_private=True, detail=detail)


def identify(config: VllmConfig, engine_version: str, shares: int = 0) -> EngineIdentity:
    """Return the fingerprint of an engine.

    Args:
        config: the engine's configuration.
        engine_version: vLLM's version, such as ``0.32.0``.
        shares: see `DcpShards.shares`.

    Raises:
        ConfigError: a field of the model's configuration has no canonical form.
    """
    weights, detail = _weights(config.model_config, config.load_config)
    draft = draft_model(config)
    drafts: dict[str, object] = {}
    versions = {} if weights is None else dict(weights.versions)
    if draft is not None and weights is not None:
        own_draft, detail = _weights(draft, config.speculative_config.draft_load_config or config.load_config)
        weights = None if own_draft is None else weights
        drafts = {"drafts": None if own_draft is None else _drafts(config, own_draft)}
        versions |= {} if own_draft is None else own_draft.versions
    digest = _own_digest(config) if weights is None else weights.digest
    model, cache, stages = config.model_config, config.cache_config, config.parallel_config.pipeline_parallel_size
    settings = cast("Mapping[str, object]", model.hf_config.to_dict())
    fingerprint = Fingerprint(
        weights=digest,
        dtype=plain_name(model.dtype),
        rope={"model_len": model.max_model_len} if _depends_on_length(settings) else {},
        other={
            # The page layout and the numerics change between releases.
            "engine": ["vllm", *release_of(engine_version)],
            "architectures": plain(model.architectures),
            "config": plain(settings),
            "quantisation": [plain(_words(model.quantization)), plain(_words(model.quantization_config))],
            "code": [plain_name(model.model_impl), model.code_revision],
            "window_off": bool(model.disable_sliding_window),
            "kv": [plain_name(cache.cache_dtype), plain(cache.kv_cache_dtype_skip_layers)],
            "state": [plain_name(cache.mamba_cache_dtype), plain_name(cache.mamba_ssm_cache_dtype)],
            "multimodal": _multimodal(model.multimodal_config),
            # The number of ranks decides which heads and tokens each rank holds. Token shares do not depend on it.
            "ranks": shares_of_ranks(shares) if shares else _ranks(config.parallel_config),
            # An engine with other stages could use only some ranks' objects: what one rank finds, another would lack.
            **({"stages": stages} if stages > 1 else {}),
            **drafts,
        },
    )
    return EngineIdentity(fingerprint, weights, weights is None, detail, versions)


def shares_of_ranks(shares: int) -> list[str | int]:
    """Return what stands for the number of ranks in the fingerprint of an engine with token shares (`DcpShards`)."""
    return ["shares", shares]


def _ranks(parallel: ConfigPart) -> int | list[int]:
    """Return the number of TP ranks, or with context parallelism the shape [TP, PCP, DCP]."""
    sizes = [parallel.tensor_parallel_size, parallel.prefill_context_parallel_size]
    sizes.append(parallel.decode_context_parallel_size)
    return sizes if sizes[1:] != [1, 1] else sizes[0]


def _own_digest(config: VllmConfig) -> bytes:
    """Return 32 bytes that only this engine's processes share, in place of a digest of its weights."""
    return hashlib.sha256(f"kvtier.own\0{config.kv_transfer_config.engine_id}\0{config.instance_id}".encode()).digest()


def _drafts(config: VllmConfig, weights: WeightsDigest) -> dict[str, object]:
    """Return what determines the KV of draft layers. The number of drafted tokens does not."""
    settings, draft = config.speculative_config, config.speculative_config.draft_model_config
    return {
        "method": settings.method,
        "weights": weights.digest.hex(),
        "dtype": plain_name(draft.dtype),
        "architectures": plain(draft.architectures),
        "config": plain(draft.hf_config.to_dict()),
        "quantisation": [plain(_words(draft.quantization)), plain(_words(draft.quantization_config))],
        "code": [plain_name(draft.model_impl), draft.code_revision],
        "kv": plain_name(settings.kv_cache_dtype),
    }


def _multimodal(settings: ConfigPart) -> object:
    """Return the settings that change the embedding of an item."""
    if settings is None:
        return None
    names = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")
    return {name: plain(_words(getattr(settings, name, None))) for name in names}


def _words(value: object) -> object:
    """Return the fields of a settings object as a dict, and any other value unchanged."""
    fields = getattr(value, "__dict__", None)
    return value if fields is None or isinstance(value, type) else dict(fields)


def _depends_on_length(settings: Mapping[str, object]) -> bool:
    """Return whether RoPE depends on the engine's maximum length. ``longrope`` has long and short factors."""
    return any(
        (name in {"rope_type", "type"} and value in {"longrope", "su"})
        or (isinstance(value, Mapping) and _depends_on_length(cast("Mapping[str, object]", value)))
        for name, value in settings.items()
    )


def _weights(model: ConfigPart, load: ConfigPart) -> tuple[WeightsDigest | None, str]:
    """Return the digest of a checkpoint, given vLLM's `ModelConfig` and `LoadConfig`; or None and the reason."""
    name = str(model.model_weights or model.model)
    load_format = plain_name(load.load_format)
    if load_format == "dummy":
        return None, "its weights are random (load_format dummy)"
    if load_format not in LOCAL_FORMATS:
        return None, f"load_format {load_format!r} does not read files of a folder"
    folder = local_folder(name, model.revision, load.download_dir)
    if folder is None:
        return None, f"the weights of {name} are not in a local folder"
    try:
        return checkpoint_digest(folder, is_code_trusted=model.trust_remote_code), ""
    except ConfigError as error:
        return None, f"the weights of {name} cannot be identified: {error}"
