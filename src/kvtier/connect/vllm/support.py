"""What can be served correctly: which engines, which kinds of KV, and which requests.

An engine that cannot be is refused when it starts, with what was found and what to do. A request that cannot be is
computed as if kvtier were not there. Kinds of KV are told apart by the exact names of vLLM's classes: a subclass of a
kind we know may mean something else.
"""

from kvtier.connect.vllm.vllm_types import KvCacheConfig, KvCacheSpec, Request, VllmConfig, plain_name
from kvtier.errors import UnsupportedModelError
from kvtier.layout import History, State, Validity, Window

DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Ways of speculative decoding that keep no KV of their own. The others' KV depends on tokens that follow the chunk,
which its key does not cover."""

QUANTISATIONS = frozenset({"NONE", "FP8_PER_TENSOR"})
"""Of KV. Others keep scales beside the numbers, and vLLM writes some of those anew at the first forward pass."""

_KINDS = "full attention, MLA, sliding window and Mamba-like states"
_ADVICE = {
    "ChunkedLocalAttentionSpec": ". With --disable-hybrid-kv-cache-manager vLLM keeps all blocks of these layers, "
    "which is supported",
}


def check_engine(config: VllmConfig) -> None:
    """Refuse an engine that cannot be served, by how it was started.

    Raises:
        UnsupportedModelError: the message says what was found, and what to do.
    """
    _check_ranks(config.parallel_config)
    _check_model(config)
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in DRAFTS_WITHOUT_KV:
        raise UnsupportedModelError(
            f"speculative decoding with {speculative.method!r} is not supported: the draft layers' KV depends on "
            f"tokens after the chunk that it belongs to. Use one of {', '.join(sorted(DRAFTS_WITHOUT_KV))}, or none"
        )
    cache = config.cache_config
    if getattr(cache, "use_replayssm", False):
        raise UnsupportedModelError(
            "use_replayssm is not supported: a state's page is then not the whole state. Leave it off"
        )
    if getattr(config.attention_config, "hisparse_config", None) is not None:
        raise UnsupportedModelError("HiSparse is not supported: it moves KV to host memory itself. Leave it off")


def _check_ranks(parallel: VllmConfig) -> None:
    for name, told in (
        ("pipeline_parallel_size", "Use tensor parallelism"),
        ("decode_context_parallel_size", "Leave it at 1"),
        ("prefill_context_parallel_size", "Leave it at 1"),
    ):
        size = getattr(parallel, name)
        if size > 1:
            raise UnsupportedModelError(f"{name} = {size} is not supported. {told}")
    if parallel.nnodes > 1:
        raise UnsupportedModelError(
            f"an engine on {parallel.nnodes} nodes is not supported: scheduler and workers talk over sockets of one "
            "machine. Use one node for each engine"
        )


def _check_model(config: VllmConfig) -> None:
    model = config.model_config
    if model.is_encoder_decoder:
        raise UnsupportedModelError(
            "encoder-decoder models are not supported: their KV depends on the encoder's input. Leave kvtier off"
        )
    if model.runner_type != "generate":
        raise UnsupportedModelError(
            f"runner {model.runner_type!r} is not supported: a pooling model's requests leave no KV to come back to. "
            "Use runner 'generate', or serve the model without kvtier"
        )
    if model.enable_sleep_mode or config.weight_transfer_config is not None:
        name = "enable_sleep_mode" if model.enable_sleep_mode else "weight_transfer_config"
        raise UnsupportedModelError(
            f"{name} is not supported: KV or weights are replaced while the engine runs, and nothing tells kvtier. "
            "Leave it off"
        )
    if getattr(config.attention_config, "use_non_causal", False):
        raise UnsupportedModelError("non-causal attention is not supported: no prefix has a KV of its own")


def warnings(config: VllmConfig) -> list[str]:
    """What works, but not as its user may expect; one sentence each."""
    told: list[str] = []
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy == "fail":
        told.append(
            "kv_load_failure_policy is 'fail', vLLM's default: a request whose KV cannot be loaded ends with an error "
            'instead of being computed. Set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if transfer.kv_role != "kv_both":
        told.append(f"kv_role is {transfer.kv_role!r}; kvtier both stores and loads, which vLLM calls 'kv_both'")
    return told


def check_groups(config: KvCacheConfig) -> None:
    """Refuse KV that lies, or is used, in a way that we do not know.

    Raises:
        UnsupportedModelError: the message names the group.
    """
    if config.kv_cache_layout is None:
        raise UnsupportedModelError("vLLM does not say how it lays KV out (kv_cache_layout is not set)")
    if not config.kv_cache_groups:
        raise UnsupportedModelError("the model keeps no KV. Serve it without kvtier")
    for number, group in enumerate(config.kv_cache_groups):
        where = f"KV group {number} ({group.layer_names[0]} and {len(group.layer_names) - 1} more layers)"
        if group.host_resident or not group.enable_kv_transfer or plain_name(group.role) != "DEFAULT":
            raise UnsupportedModelError(f"{where}: role {plain_name(group.role)} is not supported")
        if group.is_eagle_group:
            raise UnsupportedModelError(
                f"{where} belongs to a draft model, whose KV depends on tokens after the chunk that it belongs to. "
                "Use speculative decoding without KV of its own, or none"
            )


def specs_of(spec: KvCacheSpec) -> list[KvCacheSpec]:
    """The specs of a group's layers: of each where a worker has one for each, or the one that all share."""
    return list(spec.kv_cache_specs.values()) if type(spec).__name__ == "UniformTypeKVCacheSpecs" else [spec]


def validity_of(spec: KvCacheSpec, where: str) -> Validity:
    """The rule by which vLLM uses pages of one kind.

    At a boundary of n tokens vLLM's sliding window manager needs the last ``sliding_window - 1`` tokens, since the next
    token is itself in its window (`SlidingWindowManager.get_num_skipped_tokens`, vLLM 0.32 and 0.33).

    Args:
        spec: of one layer, or of all layers of a group.
        where: what an error calls them.

    Raises:
        UnsupportedModelError: a kind we do not know, or a way of using it; the message says which and what to do.
    """
    kind = type(spec).__name__
    check = _CHECKS.get(kind)
    if check is None:
        advice = _ADVICE.get(kind, "")
        raise UnsupportedModelError(f"{where} has KV of kind {kind}, which is not supported; allowed: {_KINDS}{advice}")
    if not spec.prefix_cacheable:
        raise UnsupportedModelError(f"{where}: vLLM itself never uses this KV for a second request")
    if getattr(spec, "is_draft", False):
        raise UnsupportedModelError(f"{where} belongs to a draft model. Use speculative decoding without KV, or none")
    return check(spec, where)


def _full_attention(spec: KvCacheSpec, where: str) -> Validity:
    _check_attention(spec, where)
    if spec.non_causal:
        raise UnsupportedModelError(f"{where} attends to later tokens, so no prefix has a KV of its own")
    # With the hybrid allocator off, layers with a window or a local chunk keep all blocks, like full attention.
    return History()


def _mla(spec: KvCacheSpec, where: str) -> Validity:
    if spec.model_version is not None or plain_name(spec.cache_role) != "SPARSE":
        told = f"model_version {spec.model_version}, cache_role {plain_name(spec.cache_role)}"
        raise UnsupportedModelError(f"{where}: MLA with {told} is not supported. Serve the model without kvtier")
    return _full_attention(spec, where)


def _sliding_window(spec: KvCacheSpec, where: str) -> Validity:
    _check_attention(spec, where)
    tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
    if tokens < 1:
        raise UnsupportedModelError(f"{where} has a sliding window of {spec.sliding_window}; allowed: at least 2")
    return Window(tokens)


def _state(spec: KvCacheSpec, where: str) -> Validity:
    if spec.mamba_cache_mode != "align":
        raise UnsupportedModelError(
            f"{where} keeps recurrent states in mode {spec.mamba_cache_mode!r}, which leaves none at the end of a "
            "chunk. Turn prefix caching on (--enable-prefix-caching)"
        )
    if spec.num_speculative_blocks:
        raise UnsupportedModelError(f"{where}: states with speculative decoding are not supported. Leave it off")
    return State()


def _check_attention(spec: KvCacheSpec, where: str) -> None:
    quantisation = plain_name(spec.kv_quant_mode)
    if quantisation not in QUANTISATIONS:
        raise UnsupportedModelError(
            f"{where}: KV quantised as {quantisation} is not supported. Use --kv-cache-dtype auto or fp8"
        )
    if spec.tokens_per_state != 1:
        raise UnsupportedModelError(f"{where} keeps one state for {spec.tokens_per_state} tokens, not supported")


_CHECKS = {
    "FullAttentionSpec": _full_attention,
    "MLAAttentionSpec": _mla,
    "SlidingWindowSpec": _sliding_window,
    "MambaSpec": _state,
}


def reason_against(request: Request, config: VllmConfig) -> str:
    """Why a request is neither looked up nor stored; empty when nothing is against it."""
    if request.pooling_params is not None:
        return "it asks for pooling"
    if request.resumable:
        # vLLM takes tokens back when the next piece of the input arrives.
        return "its input comes in pieces, and tokens that were seen may be taken back"
    if request.mm_features and not has_content_identifiers(config):
        return (
            "its images or other items are numbered, not identified by content; turn on prefix caching or the "
            "multimodal processor cache (mm_processor_cache_gb)"
        )
    return ""


def has_content_identifiers(config: VllmConfig) -> bool:
    """Whether vLLM identifies multimodal items by content: not with both of its caches off (renderers/base.py)."""
    settings = config.model_config.multimodal_config
    return config.cache_config.enable_prefix_caching or settings is None or settings.mm_processor_cache_gb > 0
