"""Tiny models of the Transformers library, made from configurations with random weights large enough to matter."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# One thread: the order of additions, and with it the last bit, must not depend on the machine's load.
torch.set_num_threads(1)

VOCABULARY = 200
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.35,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _made(model: str, config: str, layers: int, *, seed: int = 7, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = SIZES | {"num_hidden_layers": layers} | fields
    settings = getattr(transformers, config)(**{name: value for name, value in sizes.items() if value is not ...})
    built = getattr(transformers, model)(settings).eval()
    # Some classes start their projections or norms at special values; this makes every token count.
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.copy_(1.0 + 0.1 * torch.randn_like(parameter))
    return built


def llama(**fields: Any) -> PreTrainedModel:
    """Full attention, grouped queries, rotary positions."""
    return _made("LlamaForCausalLM", "LlamaConfig", 3, **fields)


def mistral(**fields: Any) -> PreTrainedModel:
    """A sliding window in every layer."""
    return _made("MistralForCausalLM", "MistralConfig", 3, **({"sliding_window": 24, "head_dim": 12} | fields))


def gemma3(**fields: Any) -> PreTrainedModel:
    """Five layers with a sliding window to one with full attention."""
    # With tied embeddings a random model only repeats its last token.
    own = {"head_dim": 12, "sliding_window": 24, "tie_word_embeddings": False}
    return _made("Gemma3ForCausalLM", "Gemma3TextConfig", 7, **(own | fields))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "mistral": mistral,
    "gemma3": gemma3,
    "qwen3": lambda: _made("Qwen3ForCausalLM", "Qwen3Config", 3, head_dim=12),
    "gpt2": lambda: _made("GPT2LMHeadModel", "GPT2Config", 3, n_positions=2048),
    "gemma2": lambda: _made("Gemma2ForCausalLM", "Gemma2Config", 4, head_dim=12, sliding_window=24),
    "phi3": lambda: _made("Phi3ForCausalLM", "Phi3Config", 3, sliding_window=40),
    "gpt_neox": lambda: _made("GPTNeoXForCausalLM", "GPTNeoXConfig", 3),
    "bloom": lambda: _made("BloomForCausalLM", "BloomConfig", 3, n_head=4),
    "opt": lambda: _made("OPTForCausalLM", "OPTConfig", 3, ffn_dim=64, word_embed_proj_dim=48),
    "mixtral": lambda: _made("MixtralForCausalLM", "MixtralConfig", 3, num_local_experts=4),
    "gpt_oss": lambda: _made(
        "GptOssForCausalLM", "GptOssConfig", 4, head_dim=12, sliding_window=24, num_local_experts=4
    ),
    "gemma4": lambda: _made(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        6,
        head_dim=12,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "deepseek_v3": lambda: _made(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        3,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
}
"""By name: every kind of attention and of positions that the adapter serves."""


def tokens(count: int, seed: int) -> list[int]:
    """Tokens without a special meaning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def batch(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask) of rows padded on the left."""
    columns = max(map(len, rows))
    padded = [[0] * (columns - len(row)) + row for row in rows]
    mask = [[0] * (columns - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(padded), torch.tensor(mask)
