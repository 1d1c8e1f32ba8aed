"""The sizes of `kvtier size` equal the caches of Transformers, byte for byte.

Two habits of Transformers are allowed for: of a window of W tokens it keeps the W - 1 that the next token will see, and
of a convolution's inputs all `kernel` instead of the last `kernel` - 1.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvtier.tools import size
from kvtier.tools.size.families import all_class_defaults

pytestmark = pytest.mark.engine

TOKENS = 40
WINDOW, KERNEL = 16, 4

BASE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EIGHT = {**BASE, "num_hidden_layers": 8}
DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": KERNEL,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": KERNEL,
    "mamba_expand": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # full attention: GQA, MHA, MQA
    "llama": ("Llama", BASE),
    "llama-mha": ("Llama", {**BASE, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {**BASE, "head_dim": 32}),
    "falcon": ("Falcon", {**BASE, "multi_query": True, "alibi": False}),
    "gpt_bigcode": ("GPTBigCode", {"vocab_size": 32, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "bloom": ("Bloom", {"vocab_size": 32, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "mpt": ("Mpt", {"vocab_size": 32, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128}),
    "dbrx": (
        "Dbrx",
        {
            "vocab_size": 32, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
        },
    ),
    "hunyuan": ("HunYuanDenseV1", {**BASE, "head_dim": 16, "cla_share_factor": 2}),
    "longcat": (
        "LongcatFlash",
        {
            "vocab_size": 32, "hidden_size": 64, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "num_layers": 2,
            "num_attention_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2,
        },
    ),
    # windows, by each rule
    "exaone4": ("Exaone4", {**EIGHT, "sliding_window": WINDOW}),
    "mistral": ("Mistral", {**BASE, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {**BASE, "head_dim": 32, "sliding_window": WINDOW}),
    "cohere2": ("Cohere2", {**EIGHT, "sliding_window": WINDOW}),
    "olmo3": ("Olmo3", {**EIGHT, "sliding_window": WINDOW}),
    "gpt_oss": (
        "GptOss",
        {**BASE, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama4": ("Llama4", {**BASE, "head_dim": 16, "attention_chunk_size": WINDOW, "num_local_experts": 2}),
    # shared between layers, and wider heads in some of them
    "gemma3n": (
        "Gemma3n",
        {
            **BASE, "num_hidden_layers": 10, "head_dim": 32, "sliding_window": WINDOW, "num_kv_shared_layers": 5,
            "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "altup_num_inputs": 2,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **BASE, "num_hidden_layers": 12, "head_dim": 32, "global_head_dim": 64, "sliding_window": WINDOW,
            "num_kv_shared_layers": 6, "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8,
        },
    ),
    # one projection for keys and values, which are kept both
    "gemma4-tied": (
        "Gemma4",
        {
            **BASE, "num_hidden_layers": 6, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1,
            "attention_k_eq_v": True, "sliding_window": WINDOW, "vocab_size_per_layer_input": 32,
            "hidden_size_per_layer_input": 8,
        },
    ),
    # states
    "qwen3_next": ("Qwen3Next", {**BASE, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5", {**BASE, **DELTA}),
    "falcon_h1": (
        "FalconH1",
        {
            **BASE, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
            "mamba_d_state": 16, "mamba_d_conv": KERNEL,
        },
    ),
    "bamba": ("Bamba", {**BASE, **MAMBA2, "attn_layer_indices": [1]}),
    "granite": (
        "GraniteMoeHybrid",
        {
            **BASE, **MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2,
            "num_experts_per_tok": 1, "shared_intermediate_size": 32,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **BASE, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16,
            "mamba_d_conv": KERNEL, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 4, "use_mem_rope": False,
        },
    ),
    "lfm2": ("Lfm2", {**BASE, "full_attn_idxs": [1, 3], "conv_L_cache": KERNEL}),
    "lfm3": ("Lfm3", {**EIGHT, "head_dim": 16, "sliding_window": WINDOW, "conv_L_cache": KERNEL}),
    "olmo_hybrid": ("OlmoHybrid", {**BASE, **DELTA, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "bailing_hybrid": (
        "BailingHybrid",
        {
            **BASE, "num_key_value_heads": 4, "layer_group_size": 2, "head_dim": 16, "short_conv_kernel_size": KERNEL,
            "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "num_local_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    "jamba": ("Jamba", {**EIGHT, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8}),
    "mamba": ("Mamba", {"vocab_size": 32, "hidden_size": 32, "state_size": 16, "num_hidden_layers": 3}),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": 32, "hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2,
            "num_hidden_layers": 3, "chunk_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **{key: value for key, value in BASE.items() if key != "num_hidden_layers"}, "head_dim": 16, "n_groups": 2,
            "layers_block_type": ["mamba", "attention", "mamba", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 16,
            "ssm_state_size": 16, "conv_kernel": KERNEL, "chunk_size": 16, "n_routed_experts": 2,
            "num_experts_per_tok": 1, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "minimax": ("MiniMax", {**BASE, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "kimi_linear": (
        "KimiLinear",
        {
            **BASE, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16, "num_experts": 2, "num_experts_per_token": 1, "moe_intermediate_size": 32,
            "linear_attn_config": {
                "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": KERNEL, "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
            },
        },
    ),
}  # fmt: skip

CONVOLUTIONS = {"linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache", "short_conv_kernel_size"}


def tensors(found: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors of a cache."""
    if isinstance(found, torch.Tensor):
        if found.dim() > 1:  # positions and flags are none of the KV
            yield found
        return
    if id(found) in seen or isinstance(found, str | bytes | int | float | torch.dtype | torch.device):
        return
    seen.add(id(found))
    inner = found if isinstance(found, list | tuple) else getattr(found, "__dict__", found)
    for each in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else ():
        yield from tensors(each, seen)


def kept(family: str, settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Bytes of the cache after `TOKENS` tokens, and its configuration as Transformers would save it."""
    kind = next(name for name in (f"{family}TextConfig", f"{family}Config") if hasattr(transformers, name))
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        output = model(torch.randint(1, 32, (1, TOKENS)), use_cache=True)
    cache = output.get("past_key_values") or output["cache_params"]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(cache, set())), config.to_dict()


def as_transformers_keeps_it(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the sizes of the caches of Transformers."""
    changed = dict(config)
    for key in CONVOLUTIONS & config.keys():
        changed[key] = config[key] + 1
    for key in ("sliding_window", "attention_chunk_size"):
        if config.get(key):
            changed[key] = config[key] - 1
    if config.get("linear_attn_config"):
        changed["linear_attn_config"] = as_transformers_keeps_it(config["linear_attn_config"])
    return changed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_what_the_engine_keeps(name):
    actual, config = kept(*MODELS[name])
    kv = size.of(size.from_config(as_transformers_keeps_it(config), name))
    assert kv.session_bytes(TOKENS) == actual


def test_class_defaults_are_those_of_the_classes():
    for model_type, fields in all_class_defaults().items():
        if model_type not in CONFIG_MAPPING:
            continue  # code that is published beside the model
        kind = CONFIG_MAPPING[model_type]
        names = kind.attribute_map
        for name, value in fields.items():
            found = kind.__dataclass_fields__.get(names.get(name, name))
            default = None if found is None else found.default
            assert default == (None if isinstance(value, str) else value), (model_type, name)
