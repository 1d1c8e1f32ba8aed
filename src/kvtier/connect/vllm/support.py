"""Checks whether engines, kinds of KV, and requests are supported.

An unsupported engine is refused at start. The message says what was found and what to do. An unsupported request is
computed without the cache. Kinds of KV are identified by the exact names of vLLM's classes, because a subclass may mean
something else.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from reprlib import repr as short

from kvtier.config.machine_checks import refuse_unusable
from kvtier.config.sections import Config
from kvtier.config.tier_list import SettingOrigin
from kvtier.connect.vllm.vllm_types import ConfigPart, KvCacheConfig, KvCacheSpec, Request, VllmConfig, plain_name
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.layout import History, Loss, State, Validity, Window
from kvtier.tier.registry import built_in, by_name, kind_of

DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Methods of speculative decoding whose drafts have no KV."""

DRAFTS_WITH_KV = frozenset({"eagle", "eagle3", "mtp"})
"""Methods whose draft KV at a position also depends on the token after that position (`SpecDecodeBaseProposer`, vLLM
0.32 and 0.33). Chunk keys cover that token; see `looks_ahead`."""

QUANTISATIONS = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Supported KV quantizations. Others store scales separately, and vLLM recomputes some scales at the first forward."""

BLOCK_TOKENS = 16
"""A divisor of the block sizes of all attention backends of vLLM. The size itself is known only once the weights are
loaded."""

SHUTDOWN = (
    "at shutdown vLLM kills its engine at once, and chunks that wait to be written are lost: start the "
    "server with --shutdown-timeout 60, too"
)

ROLES = ("kv_both", "kv_producer", "kv_consumer")

_ADVICE = {
    "ChunkedLocalAttentionSpec": ". Start vLLM with --disable-hybrid-kv-cache-manager: it then keeps all blocks "
    "of these layers, which is supported",
}


def check_engine(config: VllmConfig) -> None:
    """Refuse an unsupported engine by its configuration.

    Raises:
        UnsupportedModelError: the engine is refused. The message says what was found and what to do.
    """
    parallel, model, attention = config.parallel_config, config.model_config, config.attention_config
    _refuse_if(
        parallel.nnodes > 1,
        f"an engine on {parallel.nnodes} nodes is not supported: scheduler and workers communicate over local "
        "sockets. Use one node per engine",
    )
    _refuse_if(
        model.is_encoder_decoder,
        "encoder-decoder models are not supported: their KV depends on the encoder's input. Serve the "
        "model without kvtier",
    )
    _refuse_if(
        model.runner_type != "generate",
        f"runner {model.runner_type!r} is not supported: a pooling model's requests leave no reusable KV. "
        "Use runner 'generate', or serve the model without kvtier",
    )
    _refuse_if(
        getattr(attention, "use_non_causal", False),
        "non-causal attention is not supported: KV then depends on later tokens. Serve the model without kvtier",
    )
    is_cpu = config.device_config.device_type == "cpu"
    _refuse_if(
        model.use_mla and is_cpu and config.compilation_config.is_custom_op_enabled("rotary_embedding"),
        "MLA on a CPU with vLLM's own rotary kernel is not supported: the kernel's numbers depend on the length of "
        "the batch, so restored KV would change the tokens. Turn the kernel off: "
        """--compilation-config '{"custom_ops": ["-rotary_embedding"]}'""",
    )
    _check_drafts(config)
    _refuse_if(
        getattr(config.cache_config, "use_replayssm", False),
        "use_replayssm is not supported: a page then holds only a part of a state. Turn it off",
    )
    _refuse_if(
        getattr(attention, "hisparse_config", None) is not None,
        "HiSparse is not supported: it moves KV to host memory itself. Turn it off",
    )


def _check_drafts(config: VllmConfig) -> None:
    drafts = config.speculative_config
    if drafts is None:
        return
    known = DRAFTS_WITHOUT_KV | DRAFTS_WITH_KV
    _refuse_if(
        drafts.method not in known,
        f"speculative decoding with {drafts.method!r} is not supported: its KV depends on more than a chunk and the "
        f"token after it. Use one of {', '.join(sorted(known))}, or none",
    )
    _refuse_if(
        getattr(drafts, "parallel_drafting", False),
        "parallel_drafting is not supported: its draft layers read masks in place of tokens. Turn it off",
    )
    tokens = config.num_prefill_lookahead_tokens
    _refuse_if(
        tokens > 1,
        f"{drafts.method!r} with several draft modules is not supported: they read {tokens} tokens ahead, and a "
        "chunk's key covers one. Set num_speculative_tokens to 1",
    )


def check_others(others: Iterable[object]) -> None:
    """Refuse other connectors of a `MultiConnector` that would store wrong KV if kvtier is present.

    Args:
        others: names of the other connectors' classes.

    Raises:
        UnsupportedModelError: a connector is refused. The message names it.
    """
    for name in others:
        _refuse_if(
            name == "OffloadingConnector",
            f"{name} beside kvtier in a MultiConnector is not supported: it reads blocks that vLLM has given to a load "
            "of kvtier, and would store wrong KV (vllm#46951). Use one of the two",
        )


def check_alone(others: Iterable[object], loss: Loss) -> None:
    """Refuse a lossy class (`store.loss`) beside other connectors, because their names for KV do not contain the class.

    Raises:
        ConfigError: the engine has a lossy class, and there is another connector. The message names it.
    """
    for name in others:
        if loss != "none":
            raise ConfigError(
                f"{name} beside kvtier would pass lossy KV on to other engines, whose store.loss is unknown",
                setting="store.loss",
                value=loss,
                allowed="none; or any class with kvtier as the only connector",
            )


def looks_ahead(config: VllmConfig) -> bool:
    """Return whether the KV at a position depends on the next token, because a draft model reads it."""
    return config.num_prefill_lookahead_tokens == 1


def draft_model(config: VllmConfig) -> ConfigPart | None:
    """Return the `ModelConfig` of draft layers that have KV, or None if there are none."""
    return config.speculative_config.draft_model_config if looks_ahead(config) else None


def drafted_tokens(config: VllmConfig) -> int:
    """Return the maximum length, in tokens, of a request for which vLLM still runs the draft model.

    A step with a longer request leaves the draft KV of all its requests unwritten (`_input_fits_in_drafter`, vLLM
    0.32).
    """
    model = draft_model(config)
    if model is None:
        return sys.maxsize
    return (model.max_model_len or config.model_config.max_model_len) - config.num_speculative_tokens


def check_settings(
    config: Config,
    origins: Mapping[str, SettingOrigin] | None = None,
    file: Path | None = None,
    *,
    is_start: bool = False,
) -> None:
    """Refuse settings that cannot work, before the weights are loaded; see `refuse_unusable`.

    Raises:
        ConfigError: a setting is refused. The message names it.
    """
    if config.store.chunk_tokens % BLOCK_TOKENS:
        raise ConfigError(
            "does not fit any block size of vLLM",
            setting="store.chunk_tokens",
            value=str(config.store.chunk_tokens),
            origin=(origins or {}).get("store.chunk_tokens", ""),
            allowed=f"0, or a multiple of {BLOCK_TOKENS}",
        )
    others = [it.label for it in config.tiers if kind_of(it).keeps_memory]
    if config.vllm.sleep_frees_host and others:
        kinds = [it for it in built_in() if not by_name(it).keeps_memory]
        raise ConfigError(
            f"{', '.join(others)} may have registered host memory with a device",
            setting="vllm.sleep_frees_host",
            value="true",
            origin=(origins or {}).get("vllm.sleep_frees_host", ""),
            allowed=f"false, or tiers of the kinds {', '.join(kinds)}",
        )
    refuse_unusable(config, origins, file, is_start=is_start)


def check_role(role: object, write_policy: str) -> None:
    """Refuse an unknown `kv_role`, and a prefill engine that would store late or never.

    Raises:
        ConfigError: the role or the write policy is refused. The message names the setting.
    """
    if role not in ROLES:
        raise ConfigError(setting="kv_role", value=short(role), allowed=", ".join(map(repr, ROLES)))
    if role == "kv_producer" and write_policy != "through":
        raise ConfigError(
            f"other engines wait for what a prefill engine (kv_role {role!r}) stores",
            setting="store.write_policy",
            value=repr(write_policy),
            allowed="'through'",
        )


def transfer_warnings(transfer: ConfigPart, role: str, *, has_shared: bool) -> list[str]:
    """Return warnings about settings that work but are probably not what the user wants.

    Args:
        transfer: vLLM's `KVTransferConfig`.
        role: its `kv_role`, as the user gave it.
        has_shared: whether another engine can see what this engine stores, in a tier that nodes share.
    """
    found: list[str] = []
    if transfer.kv_load_failure_policy == "fail":
        found.append(
            "kv_load_failure_policy is 'fail', vLLM's default: a request whose KV cannot be loaded ends with an error "
            'instead of being computed. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if role != "kv_both" and not has_shared:
        other = "loads what this engine stores" if role == "kv_producer" else "stores what this engine loads"
        found.append(
            f"kv_role is {role!r}, but no other engine {other}, because no tier is shared. Add a shared tier, or set "
            "kv_role to 'kv_both'"
        )
    return found


def check_groups(config: KvCacheConfig) -> None:
    """Refuse KV that is stored or used in an unknown way.

    Raises:
        UnsupportedModelError: a group is refused. The message names it.
    """
    _refuse_if(config.kv_cache_layout is None, "vLLM does not name its KV layout (kv_cache_layout is not set)")
    _refuse_if(not config.kv_cache_groups, "the model keeps no KV. Serve it without kvtier")
    for number, group in enumerate(config.kv_cache_groups):
        role = plain_name(group.role)
        first, *rest = group.layer_names or ["no layer of this pipeline stage"]
        where = f"KV group {number} ({first} and {len(rest)} more layers)"
        is_other = group.host_resident or not group.enable_kv_transfer or role != "DEFAULT"
        _refuse_if(is_other, f"{where}: its role {role}, or its use, is not supported")


def specs_of(spec: KvCacheSpec) -> list[KvCacheSpec]:
    """Return the specs of a group's layers: one per layer, or one for all."""
    return list(spec.kv_cache_specs.values()) if type(spec).__name__ == "UniformTypeKVCacheSpecs" else [spec]


def validity_of(spec: KvCacheSpec, where: str) -> Validity:
    """Return the rule of validity for pages of one kind.

    To resume after n tokens, vLLM's sliding window manager requires the last ``sliding_window - 1`` of them, because
    the window includes the next token (`SlidingWindowManager.get_num_skipped_tokens`, vLLM 0.32 and 0.33).

    Args:
        spec: the spec of one layer, or of all layers of a group.
        where: names the layers in an error.

    Raises:
        UnsupportedModelError: the kind, or its use, is not supported. The message names it and says what to do.
    """
    kind = type(spec).__name__
    _refuse_if(
        kind not in _CHECKS,
        f"{where} has KV of kind {kind}, which is not supported; allowed: full attention, MLA, sliding window and "
        f"Mamba-like states{_ADVICE.get(kind, '')}",
    )
    _refuse_if(not spec.prefix_cacheable, f"{where}: vLLM itself never reuses this KV. Serve the model without kvtier")
    return _CHECKS[kind](spec, where)


def _full_attention(spec: KvCacheSpec, where: str) -> Validity:
    _check_attention(spec, where)
    _refuse_if(
        spec.non_causal, f"{where} attends to later tokens, so KV depends on them. Serve the model without kvtier"
    )
    # Without the hybrid allocator, layers with a window or a local chunk keep all blocks, as full attention does.
    return History()


def _mla(spec: KvCacheSpec, where: str) -> Validity:
    role = plain_name(spec.cache_role)
    _refuse_if(
        spec.model_version is not None or role != "SPARSE",
        f"{where}: MLA with model_version {spec.model_version} and cache_role {role} is not supported. "
        "Serve the model without kvtier",
    )
    return _full_attention(spec, where)


def _sliding_window(spec: KvCacheSpec, where: str) -> Validity:
    _check_attention(spec, where)
    tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
    _refuse_if(tokens < 1, f"{where} has a sliding window of {spec.sliding_window}; allowed: at least 2 tokens")
    return Window(tokens)


def _state(spec: KvCacheSpec, where: str) -> Validity:
    _refuse_if(
        spec.mamba_cache_mode != "align",
        f"{where} keeps recurrent states in mode {spec.mamba_cache_mode!r}, without a state at the end of a "
        "chunk. Turn prefix caching on (--enable-prefix-caching)",
    )
    drafts = f"{where}: recurrent states with speculative decoding are not supported. Turn speculative decoding off"
    _refuse_if(spec.num_speculative_blocks > 0, drafts)
    return State()


def _check_attention(spec: KvCacheSpec, where: str) -> None:
    quantisation = plain_name(spec.kv_quant_mode)
    _refuse_if(
        quantisation not in QUANTISATIONS,
        f"{where}: KV quantized as {quantisation} is not supported. Use --kv-cache-dtype auto or fp8",
    )
    _refuse_if(
        spec.tokens_per_state != 1,
        f"{where} keeps one state per {spec.tokens_per_state} tokens, which is not supported. Serve the model "
        "without kvtier",
    )


def _refuse_if(applies: object, reason: str) -> None:
    if applies:
        raise UnsupportedModelError(reason)


_CHECKS = {
    "FullAttentionSpec": _full_attention,
    "MLAAttentionSpec": _mla,
    "SlidingWindowSpec": _sliding_window,
    "MambaSpec": _state,
}


def reason_against(request: Request, config: VllmConfig) -> str:
    """Return why a request cannot be cached; empty if it can."""
    if request.pooling_params is not None:
        return "it is a pooling request"
    if request.resumable:
        # vLLM may remove tokens when the next part of the input arrives.
        return "its input is streamed, so tokens may be removed again"
    if request.prompt_embeds is not None:
        return "its prompt is embeddings instead of tokens"
    if request.mm_features and not has_content_identifiers(config):
        return (
            "vLLM numbers its images or other items instead of identifying their content; turn on prefix caching or "
            "the multimodal processor cache (mm_processor_cache_gb)"
        )
    if request.mm_features and config.ec_transfer_config is not None:
        return (
            "another engine may encode its images or other items, and kvtier cannot check that their identifiers match"
        )
    return ""


def has_content_identifiers(config: VllmConfig) -> bool:
    """Return whether vLLM identifies images and other items by their content.

    It does so only if prefix caching or its multimodal cache is on (renderers/base.py).
    """
    settings = config.model_config.multimodal_config
    return config.cache_config.enable_prefix_caching or settings is None or settings.mm_processor_cache_gb > 0
