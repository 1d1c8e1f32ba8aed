"""Sizes of models outside the catalogue, against figures computed by hand.

Each configuration has the fields of the published file that concern attention, heads, layers and states, and all that
look as if they did. Fields of training, vocabulary and tokens are left out. Where no copy of the file was at hand, the
fields are those that its class documents. Formulas are those of the modeling files of Transformers 5.23 or vLLM 0.32,
or of the code that is published beside the file.
"""

from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.tools import size
from kvtier.tools.size.catalogue import entries

BF16, FP32 = 2, 4
MAMBA2 = {"mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip


def mamba2(heads: int, dim: int, states: int, groups: int, kernel: int = 4) -> int:
    """Bytes of a Mamba-2 state: `mamba2_state_shape` in vLLM's mamba_utils, the matrix in 32 bits."""
    return heads * dim * states * FP32 + (kernel - 1) * (heads * dim + 2 * groups * states) * BF16


def types(text: str, full: str = "full_attention", other: str = "sliding_attention") -> list[str]:
    return [full if letter == "F" else other for letter in text]


GRANITE_H = {  # ibm-granite/granite-4.0-h-small
    "model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier": 0.0078125, "hidden_size": 4096,
    "layer_types": ["attention" if layer in {5, 15, 25, 35} else "mamba" for layer in range(40)], **MAMBA2,
    "mamba_chunk_size": 256, "mamba_n_heads": 128, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "position_embedding_type": "nope",
    "shared_intermediate_size": 1536, "num_local_experts": 72,
}  # fmt: skip

BERT = {  # google-bert/bert-base-uncased
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False, "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 512,
    "num_attention_heads": 12, "num_hidden_layers": 12, "position_embedding_type": "absolute", "use_cache": True,
}  # fmt: skip
T5 = {  # google-t5/t5-small
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "is_encoder_decoder": True, "n_positions": 512, "num_heads": 8, "num_layers": 6,
    "relative_attention_num_buckets": 32, "output_past": True,
}  # fmt: skip
RWKV4 = {  # RWKV/rwkv-4-169m-pile
    "model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "attention_hidden_size": 768, "context_length": 1024,
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "rescale_every": 6, "use_cache": True,
}  # fmt: skip

SIZES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # bytes of a token in 16 bits, bytes of the states of a session, and the configuration
    # stepfun-ai/step3, text_config; vLLM step3_text.py: one KV head of 256
    "step3": (61 * 2 * 1 * 256 * BF16, 0, {
        "model_type": "step3_text", "hidden_size": 7168, "num_attention_heads": 64, "num_attention_groups": 1,
        "num_hidden_layers": 61, "head_dim": 256, "share_q_dim": 2048, "max_seq_len": 65536,
        "max_position_embedding": 65536, "moe_layers_enum": "4,5,6,7,8,9", "norm_expert_weight": False,
    }),
    # stepfun-ai/Step-3.5-Flash: layer_types has three more entries, for its draft layers
    "step3.5": (45 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "step3p5", "hidden_size": 4096, "num_attention_heads": 64, "num_attention_groups": 8,
        "num_hidden_layers": 45, "head_dim": 128, "att_impl_type": "GQA", "sliding_window": 512,
        "layer_types": types("FSSS" * 12), "num_nextn_predict_layers": 3, "use_head_wise_attn_gate": True,
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8,
            "head_dim": 128, "true_head_dim": 128,
        },
        "max_position_embeddings": 262144, "share_expert_dim": 1280, "moe_layer_offset": 0,
    }),
    # stepfun-ai/Step-3.7-Flash as Transformers saves it: the windowed layers have as many KV heads
    "step3.7": (45 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "step3p5", "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 8,
        "num_hidden_layers": 45, "head_dim": 128, "sliding_window": 512, "layer_types": types("FSSS" * 11 + "F"),
        "num_sliding_attention_heads": 96, "num_nextn_predict_layers": 3, "mtp_layer_types": types("SSS"),
    }),
    # thinkingmachines/Inkling, text_config; vLLM 0.32 inkling: wide windows, and four convolutions of bfloat16
    "inkling": (
        (11 * 8 + 55 * 16) * 2 * 128 * BF16,
        3 * (11 * 2 * (8 * 128 + 6144) + 55 * 2 * (16 * 128 + 6144)) * BF16,
        {
            "model_type": "inkling_text", "hidden_size": 6144, "num_hidden_layers": 66, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16,
            "swa_head_dim": 128, "d_rel": 16, "rel_extent": 1024, "sliding_window_size": 512,
            "local_layer_ids": [layer for layer in range(66) if (layer + 1) % 6], "sconv_kernel_size": 4,
            "use_sconv": True, "log_scaling_n_floor": 128000, "log_scaling_alpha": 0.1, "model_max_length": 1048576,
            "dense_mlp_idx": 2, "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 2,
            "shared_expert_sink": True, "q_bias": False, "o_bias": False, "gate_activation": "sigmoid",
        },
    ),
    # inclusionAI/Ring-V2.5, by its class: lightning attention, and MLA in every fifth layer
    "ring-2.5-small": (4 * 576 * BF16, 16 * 16 * 128 * 128 * BF16, {
        "model_type": "bailing_hybrid", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "layer_group_size": 5, "group_norm_size": 4, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_window_layers": 20, "linear_silu": False, "max_position_embeddings": 32768,
    }),
    # Muse Glimmer in its flat form; vLLM muse_glimmer.py
    "muse-glimmer": (52 * 2 * 2 * 128 * BF16, 0, {
        "model_type": "muse_glimmer", "hidden_size": 6656, "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 16384, "qk_scale_factor": 43.78,
        "use_qk_norm": True, "use_attn_output_gate": True, "sliding_window": 2048, "vision_heads": 16,
        "layer_types": types("SSSF" * 13), "patch_token_id": 200092,
    }),
    # Qwen4-Exp, by its class, with the indexer and one layer of n-grams; vLLM 0.32 qwen4_exp
    "qwen4-exp": (
        10 * (2 * 2 * 256 + 128 // 4) * BF16,
        30 * (32 * 128 * 128 * FP32 + 3 * (2 * 16 + 32) * 128 * BF16) + 3 * 3 * 4 * 2048 * BF16,
        {
            "model_type": "qwen4_exp_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "layer_types": types("LLLF" * 10, "indexed_attention", "linear_attention"), "hc_count": 4,
            "hc_lowrank": 320, "ple_layer_ids": [2], "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8,
            "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
        },
    ),
    # zai-org/GLM-5.3-Flash, text_config, by its class; vLLM 0.32 glm5next: an index key for 16 tokens
    "glm-5.3": (11 * (512 + 128 // 16) * BF16, 34 * (64 * 128 * 128 * FP32 + 3 * 3 * 64 * 128 * BF16), {
        "model_type": "glm5_next_text", "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64,
        "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 0, "v_head_dim": 256,
        "qk_nope_head_dim": 256, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_kpool": 16,
        "index_kpool_always_select_tail": True, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "hc_mult": 4, "head_dim": 0,
        "layer_types": types("LLLF" * 11 + "L", "indexed_attention", "linear_attention"),
    }),
    # mistralai/Mistral-Large-4, text_config, by its class: two layers share a latent; an indexer in every fourth layer
    "mistral-large-4": (36 * 576 * BF16 + 19 * 128 * BF16, 0, {
        "model_type": "mistral_large4_text", "hidden_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64,
        "num_key_value_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 64, "head_dim": 64, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32,
        "index_topk_freq": 4, "index_skip_topk_offset": 2, "kv_source_layers": [layer // 2 * 2 for layer in range(72)],
    }),
    # LiquidAI/LFM3-1.7B, by its class: convolutions, windows and full attention
    "lfm3": (11 * 2 * 4 * 128 * BF16, 13 * 6 * 2048 * BF16, {
        "model_type": "lfm3", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 256, "conv_L_cache": 7, "conv_bias": False,
        "use_attention_gate": True, "use_sandwich_norm": True,
        "layer_types": ["full_attention" if layer % 4 == 2 else "conv" if layer % 4 or not layer else
            "sliding_attention" for layer in range(24)],
    }),
    # dots-studio/dots3-note-prev, text_config, by its class: windowed layers have wider latents and no indexer
    "dots3-note": (13 * (576 + 128) * BF16 + 33 * (1024 + 64) * BF16, 0, {
        "model_type": "dots3_note_text", "hidden_size": 5120, "num_hidden_layers": 46, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "head_dim": 256, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 64, "sliding_window": 512,
        "layer_types": ["indexed_attention" if layer < 2 or layer % 4 == 1 else "sliding_attention"
            for layer in range(46)],
        "per_layer_config": {str(layer): {
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024,
            "head_dim": 256, "qk_nope_head_dim": 192, "v_head_dim": 128, "qk_rope_head_dim": 64,
        } for layer in range(46) if layer >= 2 and layer % 4 != 1},
    }),
    # tiiuae/falcon-40b in its first form
    "falcon-40b": (60 * 2 * 8 * 64 * BF16, 0, {
        "model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60, "alibi": False,
        "attention_dropout": 0.0, "bias": False, "parallel_attn": True, "use_cache": True,
        "apply_residual_connection_post_layernorm": False,
    }),
    # tiiuae/falcon-7b in its first form
    "falcon-7b": (32 * 2 * 1 * 64 * BF16, 0, {
        "model_type": "RefinedWebModel", "hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True,
        "parallel_attn": True, "alibi": False, "bias": False,
    }),
    # bigcode/santacoder
    "santacoder": (24 * 2 * 1 * 128 * BF16, 0, {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadCustomModel"], "attention_head_type": "multiquery",
        "n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer": 24, "n_positions": 2048, "attn_pdrop": 0.1,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "reorder_and_upcast_attn": False,
    }),
    # the fields of Deci/DeciLM-7B's configuration_decilm.py; the numbers of the list are an example
    "decilm": ((24 * 4 + 6 * 2 + 2) * 2 * 128 * BF16, 0, {
        "model_type": "deci", "architectures": ["DeciLMForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "max_position_embeddings": 8192,
        "num_key_value_heads_per_layer": [4] * 24 + [2] * 6 + [1] * 2,
    }),
    # databricks/dbrx-base
    "dbrx": (40 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "max_seq_len": 32768, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
        "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_num_experts": 16, "moe_top_k": 4},
    }),
    # mosaicml/mpt-7b
    "mpt": (32 * 2 * 32 * 128 * BF16, 0, {
        "model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2048,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False,
            "qk_ln": False, "softmax_scale": None,
        },
    }),
    # params.json of mistralai/Mistral-Nemo-Instruct-2407
    "mistral-params": (40 * 2 * 8 * 128 * BF16, 0, {
        "dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
        "norm_eps": 1e-05, "vocab_size": 131072, "rope_theta": 1000000.0,
    }),
    # inclusionAI/Ring-mini-linear-2.0: lightning attention in four layers of five
    "ring-linear": (4 * 2 * 4 * 128 * BF16, 16 * 16 * 128 * 128 * BF16, {
        "model_type": "bailing_moe_linear", "architectures": ["BailingMoeLinearV2ForCausalLM"],
        "first_k_dense_replace": 1, "group_norm_size": 4, "head_dim": 128, "hidden_size": 2048, "layer_group_size": 5,
        "linear_silu": False, "max_position_embeddings": 131072, "n_group": 8, "num_attention_heads": 16,
        "num_experts_per_tok": 8, "num_hidden_layers": 20, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
        "num_shared_experts": 1, "partial_rotary_factor": 0.5, "topk_group": 4, "use_qk_norm": True,
        "use_qkv_bias": False, "use_cache": True,
    }),
    # inclusionAI/Ring-2.5-1T: MLA and lightning attention (vLLM bailing_moe_linear.py)
    "ring-2.5": (10 * (512 + 64) * BF16, 70 * 64 * 128 * 128 * BF16, {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV2_5ForCausalLM"], "group_norm_size": 8,
        "head_dim": 128, "hidden_size": 8192, "kv_lora_rank": 512, "layer_group_size": 8, "num_attention_heads": 64,
        "num_hidden_layers": 80, "num_key_value_heads": 64, "q_lora_rank": 1536, "qk_head_dim": 192,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1,
        "use_qk_norm": True, "linear_silu": False,
    }),
    # the defaults of BailingHybridConfig in Transformers 5.23: MLA and Kimi delta attention
    "ling-3": (7 * (512 + 64) * BF16, 35 * (32 * 128 * 128 * FP32 + 3 * 3 * 32 * 128 * BF16), {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "hidden_size": 2560,
        "head_dim": 128, "kv_lora_rank": 512, "layer_group_size": 6, "num_attention_heads": 32, "num_hidden_layers": 42,
        "num_key_value_heads": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "short_conv_kernel_size": 4,
        "v_head_dim": 128, "kda_safe_gate": True, "kda_lower_bound": -5.0,
    }),
    # ByteDance/Ouro-1.4B: every pass over the layers keeps KV of its own
    "ouro": (4 * 24 * 2 * 16 * 128 * BF16, 0, {
        "model_type": "ouro", "head_dim": 128, "hidden_size": 2048, "layer_types": ["full_attention"] * 24,
        "max_window_layers": 24, "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "sliding_window": None, "use_sliding_window": False, "total_ut_steps": 4, "early_exit_threshold": 1.0,
    }),
    # meta-llama/Llama-3.2-11B-Vision
    "llama-3.2-vision": (32 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "mllama", "image_token_index": 128256,
        "text_config": {
            "model_type": "mllama_text_model", "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        "vision_config": {
            "attention_heads": 16, "num_hidden_layers": 32, "num_global_layers": 8, "model_type": "mllama",
        },
    }),
    # zai-org/chatglm3-6b
    "chatglm3": (28 * 2 * 2 * 128 * BF16, 0, {
        "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "attention_softmax_in_fp32": True,
        "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False, "hidden_size": 4096,
        "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32,
        "num_layers": 28, "seq_length": 8192, "post_layer_norm": True, "original_rope": True, "pre_seq_len": None,
    }),
    # zai-org/chatglm-6b
    "chatglm": (28 * 2 * 32 * 128 * BF16, 0, {
        "model_type": "chatglm", "hidden_size": 4096, "inner_hidden_size": 16384, "max_sequence_length": 2048,
        "num_attention_heads": 32, "num_layers": 28, "position_encoding_2d": True, "quantization_bit": 0,
    }),
    # google/recurrentgemma-2b
    "recurrentgemma": (8 * 2 * 1 * 256 * BF16, 18 * (2560 * FP32 + 3 * 2560 * BF16), {
        "model_type": "recurrent_gemma", "attention_bias": False, "attention_window_size": 2048,
        "block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 4, "head_dim": 256, "hidden_size": 2560,
        "lru_width": 2560, "logits_soft_cap": 30.0, "num_attention_heads": 10, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "partial_rotary_factor": 0.5,
    }),
    # tencent/Tencent-Hunyuan-Large: two layers share the KV of the first, and engines keep a copy for each
    "hunyuan-large": (64 * 2 * 8 * 80 * BF16, 0, {
        "model_type": "hunyuan", "cla_share_factor": 2, "use_cla": True, "hidden_size": 6400, "num_attention_heads": 80,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "attention_head_dim": 80, "moe_topk": 1,
        "num_shared_expert": 1, "use_qk_norm": True, "use_mixed_mlp_moe": True, "max_position_embeddings": 131072,
    }),
    # tencent/HunyuanImage-2.1 reprompt, a HunYuanDenseV1: the factor stands there without being used
    "hunyuan-7b": (32 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "hunyuan_v1_dense", "attention_bias": False, "attention_head_dim": 128, "cla_share_factor": 2,
        "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "dense_list": [4096, 0], "pool_type": "last", "use_cla": False, "use_qk_norm": True,
    }),
    # Zyphra/Zamba2-7B: shared attention over twice the hidden size, before 13 of 81 layers
    "zamba2": (13 * 2 * 32 * 224 * BF16, 81 * mamba2(112, 64, 64, 2), {
        "model_type": "zamba2", "attention_head_dim": 224, "attention_hidden_size": 7168, "hidden_size": 3584,
        "hybrid_layer_ids": [6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77], "kv_channels": 112,
        "layers_block_type": ["hybrid" if each in {6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77} else "mamba"
            for each in range(81)],
        "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim": 64, "mamba_ngroups": 2,
        "n_mamba_heads": 112, "num_attention_heads": 32, "num_hidden_layers": 81, "num_key_value_heads": 32,
        "num_mem_blocks": 2, "num_query_groups": 32, "use_shared_attention_adapter": False,
        "use_shared_mlp_adapter": True, "use_mem_rope": True, "adapter_rank": 128,
    }),
    # ibm-ai-platform/Bamba-9B
    "bamba": (3 * 2 * 8 * 128 * BF16, 29 * mamba2(128, 64, 128, 1), {
        "model_type": "bamba", "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "hidden_size": 4096, **MAMBA2,
        "mamba_chunk_size": 256, "mamba_n_heads": 128, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    }),
    "granite-4-h": (4 * 2 * 8 * 128 * BF16, 36 * mamba2(128, 64, 128, 1), GRANITE_H),
    # ibm-granite/granite-4.0-micro: the same class, attention alone
    "granite-4": (40 * 2 * 8 * 64 * BF16, 0, {
        **GRANITE_H, "hidden_size": 2560, "layer_types": ["attention"] * 40, "num_attention_heads": 40,
        "mamba_n_heads": 128, "mamba_d_head": 40, "position_embedding_type": "rope", "num_local_experts": 0,
    }),
    # LiquidAI/LFM2-1.2B
    "lfm2": (6 * 2 * 8 * 64 * BF16, 10 * 2 * 2048 * BF16, {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "num_attention_heads": 32, "num_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "use_pos_enc": True,
    }),
    # the defaults of OlmoHybridConfig in Transformers 5.23, which are those of the 7B
    "olmo-hybrid": (8 * 2 * 30 * 128 * BF16, 24 * (30 * 96 * 192 * FP32 + 3 * (2 * 30 * 96 + 30 * 192) * BF16), {
        "model_type": "olmo_hybrid", "hidden_size": 3840, "num_hidden_layers": 32, "num_attention_heads": 30,
        "num_key_value_heads": 30, "layer_types": types("LLLF" * 8, other="linear_attention"),
        "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96,
        "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "linear_a_log_min": 0.0, "linear_a_log_max": 16.0,
        "linear_allow_neg_eigval": True, "linear_dt_min": 0.001,
    }),
    # LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct
    "exaone-3.5": (32 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "exaone", "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_layers": 32, "attention_dropout": 0.0, "embed_dropout": 0.0,
        "max_position_embeddings": 32768,
    }),
    # LGAI-EXAONE/EXAONE-4.0-32B
    "exaone-4": (64 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "exaone4", "head_dim": 128, "hidden_size": 5120, "layer_types": types("SSSF" * 16),
        "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG",
    }),
    # meituan-longcat/LongCat-Flash-Chat: two attentions in each of 28 layers
    "longcat": (2 * 28 * (512 + 64) * BF16, 0, {
        "model_type": "longcat_flash", "attention_method": "MLA", "hidden_size": 6144, "kv_lora_rank": 512,
        "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "num_attention_heads": 64, "num_layers": 28,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "zero_expert_num": 256,
    }),
    # mistral-community/pixtral-12b: the part repeats only what differs from the defaults of its class
    "pixtral": (40 * 2 * 8 * 128 * BF16, 0, {
        "model_type": "llava", "image_seq_length": 1, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "is_composition": True,
            "max_position_embeddings": 1024000, "num_hidden_layers": 40, "sliding_window": None,
        },
        "vision_config": {"head_dim": 64, "hidden_size": 1024, "model_type": "pixtral", "num_attention_heads": 16},
    }),
    # llava-hf/llava-1.5-7b-hf: all of Vicuna's shape is the default of class llama
    "llava": (32 * 2 * 32 * 128 * BF16, 0, {
        "model_type": "llava", "image_token_index": 32000, "vision_feature_layer": -2, "projector_hidden_act": "gelu",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model", "num_attention_heads": 16},
    }),
    # Qwen/Qwen2.5-Omni-7B
    "qwen2.5-omni": (28 * 2 * 4 * 128 * BF16, 0, {
        "model_type": "qwen2_5_omni", "enable_audio_output": True, "enable_talker": True,
        "talker_config": {"head_dim": 64, "num_hidden_layers": 24, "num_key_value_heads": 4},
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker", "position_id_per_seconds": 25, "seconds_per_chunk": 2,
            "audio_config": {"encoder_layers": 32, "encoder_attention_heads": 20, "n_window": 100},
            "text_config": {
                "model_type": "qwen2_5_omni_text", "hidden_size": 3584, "max_window_layers": 28,
                "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 32768,
                "use_sliding_window": False,
            },
            "vision_config": {
                "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "num_heads": 16, "window_size": 112,
            },
        },
        "token2wav_config": {"dit_config": {"head_dim": 64, "look_ahead_layers": [10]}},
    }),
    # bigscience/bloom
    "bloom": (70 * 2 * 112 * 128 * BF16, 0, {
        "model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "offset_alibi": 100, "skip_bias_add": True,
        "pretraining_tp": 4, "seq_length": 2048, "apply_residual_connection_post_layernorm": False,
    }),
    # EleutherAI/gpt-neo-1.3B
    "gpt-neo": (24 * 2 * 16 * 128 * BF16, 0, {
        "model_type": "gpt_neo", "attention_dropout": 0, "attention_layers": ["global", "local"] * 12,
        "attention_types": [[["global", "local"], 12]], "hidden_size": 2048, "max_position_embeddings": 2048,
        "num_heads": 16, "num_layers": 24, "window_size": 256,
    }),
    # google/gemma-3-4b-it: heads and head dimension are the defaults of class gemma3_text
    "gemma-3-4b": (34 * 2 * 4 * 256 * BF16, 0, {
        "model_type": "gemma3", "mm_tokens_per_image": 256, "boi_token_index": 255999,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_attention_heads": 16},
    }),
    # microsoft/Phi-3-mini-128k-instruct: the window is longer than the context
    "phi-3-128k": (32 * 2 * 32 * 96 * BF16, 0, {
        "model_type": "phi3", "hidden_size": 3072, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "sliding_window": 262144,
    }),
    # baichuan-inc/Baichuan2-7B-Base
    "baichuan-2": (32 * 2 * 32 * 128 * BF16, 0, {
        "model_type": "baichuan", "hidden_size": 4096, "model_max_length": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "_from_model_config": True, "z_loss_weight": 0, "use_cache": True,
    }),
    # Qwen/Qwen-7B
    "qwen-7b": (32 * 2 * 32 * 128 * BF16, 0, {
        "model_type": "qwen", "attn_dropout_prob": 0.0, "hidden_size": 4096, "kv_channels": 128, "no_bias": True,
        "num_attention_heads": 32, "num_hidden_layers": 32, "onnx_safe": None, "scale_attn_weights": True,
        "seq_length": 8192, "use_cache": True, "use_dynamic_ntk": True, "use_flash_attn": "auto", "use_logn_attn": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_size_by_hand(name):
    token, state, config = SIZES[name]
    kv = size.of(size.from_config(config, name))
    assert (kv.bytes_per_token, kv.state_bytes) == (token, state)


@pytest.mark.parametrize(
    ("name", "growing", "window"),
    [
        ("step3.5", 12 * 2 * 8 * 128 * BF16, 512),
        ("inkling", 11 * 2 * 8 * 128 * BF16, 512),
        ("lfm3", 6 * 2 * 4 * 128 * BF16, 256),
        ("dots3-note", 13 * (576 + 128) * BF16, 512),
        ("recurrentgemma", 0, 2048),
        ("exaone-4", 16 * 2 * 8 * 128 * BF16, 4096),
        ("gpt-neo", 12 * 2 * 16 * 128 * BF16, 256),
        ("gemma-3-4b", 5 * 2 * 4 * 256 * BF16, 1024),
        ("phi-3-128k", 32 * 2 * 32 * 96 * BF16, None),
    ],
)
def test_windows_by_hand(name, growing, window):
    token, state, config = SIZES[name]
    kv = size.of(size.from_config(config, name))
    assert kv.bytes_per_token_growing == growing
    assert kv.bytes_per_session_constant == state + (token - growing) * (window or 0)
    assert {layer.cache.window for layer in kv.layers} <= {None, window}


@pytest.mark.parametrize("is_shared", [True, False])
def test_hunyuan_says_where_layers_share(is_shared):
    right, _, config = SIZES["hunyuan-large"]
    found = size.from_config({**config, "use_cla": is_shared}, "hunyuan")
    assert size.of(found).bytes_per_token == right
    assert any("One layer of 2 computes KV" in each for each in found.notes) is is_shared


def test_mistrals_own_file_is_read_from_its_folder(tmp_path):
    (tmp_path / "params.json").write_text(
        '{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "sliding_window": 8}'
    )
    (layer,) = size.of(tmp_path).layers
    assert (layer.cache.kind, layer.bytes_per_token) == ("window", 2 * 2 * 2 * 16 * BF16)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("step3.5", "3 draft layers"),
        ("llama-3.2-vision", "8 layers attend to images"),
        ("qwen2.5-omni", "The talker"),
        ("gemma-3-4b", "omits num_attention_heads"),
    ],
)
def test_draft_layers_images_and_defaults_are_noted(name, note):
    assert any(note in it for it in size.from_config(SIZES[name][2], name).notes)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BERT, "encoder reads"),
        ({**LLAMA, "model_type": "bert"}, "encoder reads"),
        ({**LLAMA, "architectures": ["NovelForMaskedLM"]}, "encoder reads"),
        ({**LLAMA, "is_causal": False}, "encoder reads"),
        ({**LLAMA, "model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder reads"),
        (T5, "two lengths"),
        ({"model_type": "whisper", "is_encoder_decoder": True, "d_model": 512, "encoder_layers": 6}, "two lengths"),
        (RWKV4, "keep a state and no KV"),
        ({"model_type": "rwkv6", "num_hidden_layers": 32, "hidden_size": 4096}, "keep a state and no KV"),
        # States alone: the type is named, not a field that the file lacks.
        ({"model_type": "xlstm", "num_blocks": 3, "num_heads": 2}, "model_type is 'xlstm'; its layers keep a state"),
        ({"model_type": "gla", "num_hidden_layers": 24, "num_heads": 4}, "model_type is 'gla'; its layers keep"),
        ({"model_type": "rwkv7", "num_hidden_layers": 24}, "model_type is 'rwkv7'; its layers keep a state and no KV"),
        ({"d_model": 2560, "n_layer": 64, "ssm_cfg": {}}, "a model of package mamba_ssm .* state and no KV"),
    ],
)  # fmt: skip
def test_models_without_kv_are_refused_with_the_reason(config, reason):
    with pytest.raises(ConfigError, match=f"^mine: .*{reason}|^mine: {reason}") as raised:
        size.from_config(config, "mine")
    assert "\n" not in str(raised.value)


def test_without_a_known_field_for_kv_heads_nothing_is_assumed():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    with pytest.raises(ConfigError, match=r"KV heads is not known; not understood: 'kv_groups'"):
        size.from_config({**config, "model_type": "novel", "kv_groups": 8}, "mine")
    assert size.of(size.from_config(config, "mine")).bytes_per_token == 32 * 2 * 32 * 128 * BF16


def test_two_names_of_a_field_that_disagree():
    with pytest.raises(ConfigError, match=r"num_key_value_heads is 8; it contradicts n_head_kv, which is 4"):
        size.from_config({**LLAMA, "n_head_kv": 4}, "mine")


def test_a_windowed_type_states_its_window_or_null():
    config = {**LLAMA, "model_type": "mistral"}
    with pytest.raises(ConfigError, match="sliding_window is missing; models of type 'mistral' state it"):
        size.from_config(config, "mine")
    assert not size.of(size.from_config({**config, "sliding_window": None}, "mine")).bytes_per_session_constant


def test_a_field_beside_the_part_of_the_language_model_is_not_ignored():
    beside = {"model_type": "some_vl", "text_config": LLAMA, "vision_config": {"num_heads": 4}}
    assert size.from_config(beside, "mine")
    assert size.from_config({**beside, "num_key_value_heads": 8}, "mine")  # the same value
    with pytest.raises(ConfigError, match=r"not understood .*'num_key_value_heads'"):
        size.from_config({**beside, "num_key_value_heads": 4}, "mine")


PUBLISHED: dict[str, dict[str, Any]] = {
    # fields of the published files that the catalogue leaves out (aiconfigurator, model_configs, at 095f58a5)
    "deepseek-v4-pro": {
        "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 16,
        "o_lora_rank": 1024, "q_lora_rank": 1536, "index_n_heads": 64, "index_topk": 1024, "hc_mult": 4,
        "compress_rope_theta": 160000, "n_shared_experts": 1, "use_cache": True,
    },
    "glm-5.2": {
        "index_share_for_mtp_iteration": True, "index_topk_freq": 4, "index_skip_topk_offset": 3, "index_n_heads": 32,
        "index_topk": 2048, "q_lora_rank": 2048, "indexer_rope_interleave": True, "first_k_dense_replace": 3,
    },
    "kimi-k3": {
        "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "mla_use_nope": True, "num_beam_groups": 1,
        "mla_use_output_gate": True, "use_grouped_topk": True, "ignore_index": -100, "q_lora_rank": 1536,
    },
    "minimax-m2.5": {"mtp_transformer_layers": 1, "num_mtp_modules": 3, "use_qk_norm": True, "use_routing_bias": True},
    "mimo-v2-flash": {"sliding_window_size": 128, "attention_chunk_size": 128, "swa_num_attention_heads": 64},
    "nemotron-3-super-120b-a12b": {
        "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1, "mamba_proj_bias": False, "expand": 2,
        "mamba_num_groups": 0, "use_mamba_kernels": True, "n_group": 1, "topk_group": 1, "attention_bias": False,
    },
    "gemma-4-26b-a4b": {
        "enable_moe_block": True, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
    },
    "llama-3.3-70b": {
        "attention_bias": False, "pretraining_tp": 1, "rope_scaling": {"original_max_position_embeddings": 8192},
        "quantization_config": {"group_size": 128, "ignore": ["lm_head"], "kv_cache_scheme": None},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_fields_of_a_published_file_are_understood(name):
    config = {"sliding_window": None, **entries()[name].config}
    fields = {key: value for key, value in PUBLISHED[name].items() if key not in config}
    whole, part = (size.of(size.from_config(each, name)) for each in ({**config, **fields}, config))
    assert whole.layers == part.layers


def test_every_entry_of_the_catalogue_could_be_a_file():
    """Nothing in the catalogue needs the leniency that a published file would not get."""
    for name, entry in entries().items():
        assert size.from_config({"sliding_window": None, **entry.config}, name)
