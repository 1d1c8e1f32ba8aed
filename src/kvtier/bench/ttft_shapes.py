"""Models by the shape of well-known ones, with random weights made where they will be used. Imports torch.

Nothing is downloaded: time does not depend on what the weights say. They have the usual normal scale, so that nothing
overflows and tokens differ. What a model keeps per token is what the Transformers library keeps for it, which for
multi-head latent attention is the keys and values of every head.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers

from kvtier.errors import ConfigError

_LENGTH = 1 << 20
"""Positions that a shape allows; with random weights a model has no length it was trained for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's configuration by name."""

    name: str
    config_class: str
    fields: dict[str, Any]

    def config(self) -> Any:  # noqa: ANN401 - depends on the class
        """The library's configuration."""
        make = cast("Callable[..., Any]", getattr(transformers, self.config_class))
        return make(
            max_position_embeddings=_LENGTH, bos_token_id=None, eos_token_id=None, pad_token_id=0, **self.fields
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "tiny",
            "LlamaConfig",
            {
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "initializer_range": 0.2,
            },
        ),
        Shape(
            "small",
            "LlamaConfig",
            {
                "vocab_size": 4096,
                "hidden_size": 384,
                "intermediate_size": 1024,
                "num_hidden_layers": 6,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "initializer_range": 0.05,
            },
        ),
        Shape(
            "llama-3.1-8b",
            "LlamaConfig",
            {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
        ),
        Shape(
            "qwen3-8b",
            "Qwen3Config",
            {
                "vocab_size": 151936,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
        ),
        Shape(
            "gpt-oss-20b",
            "GptOssConfig",
            {
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
            },
        ),
        Shape(
            "deepseek-v2-lite",
            "DeepseekV2Config",
            {
                "vocab_size": 102400,
                "hidden_size": 2048,
                "intermediate_size": 10944,
                "moe_intermediate_size": 1408,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "n_routed_experts": 64,
                "n_shared_experts": 2,
                "num_experts_per_tok": 6,
                "first_k_dense_replace": 1,
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
        ),
    )
}


def build(name: str, device: str, dtype: str, seed: int) -> Any:  # noqa: ANN401 - the class depends on the shape
    """A model of that shape, in evaluation mode, with weights drawn on `device`.

    Raises:
        ConfigError: no such shape, dtype or device.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape = {name}: unknown; allowed: {', '.join(SHAPES)}")
    number = getattr(torch, dtype, None)
    if not isinstance(number, torch.dtype) or not number.is_floating_point:
        raise ConfigError(f"dtype = {dtype}: unknown; allowed: bfloat16, float16, float32")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {device}: torch sees no CUDA device; allowed here: cpu")
    cast("Any", torch).manual_seed(seed)
    auto = cast("Any", transformers.AutoModelForCausalLM)
    with torch.device(device):
        model = auto.from_config(SHAPES[name].config(), dtype=number)
    return model.eval()


@contextmanager
def if_it_fits(what: str, skipped: list[str]) -> Generator[None]:
    """Go on without what the device has no memory for; `skipped` then names it, with the reason."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        skipped.append(f"{what}: {str(error).splitlines()[0]}")
        torch.cuda.empty_cache()
