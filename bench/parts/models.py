"""Models with the shape of well-known ones and random weights, made on the device. Imports torch.

Nothing is downloaded: time does not depend on the weights. They have the usual normal scale, so nothing overflows and
tokens differ. The KV of a token is what Transformers keeps, which for multi-head latent attention is the keys and
values of every head.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers

from kvtier.connect.transformers import Attachment, attach
from kvtier.errors import ConfigError
from kvtier.tools.run_record import processor

_LENGTH = 1 << 20
"""Positions of every shape: random weights were trained for no length."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
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
    "small": (
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
    "llama-3.1-8b": (
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
    "qwen3-8b": (
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
    "gpt-oss-20b": (
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
    "deepseek-v2-lite": (
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
}
"""Name to configuration class and fields."""


def device_name(device: str) -> str:
    """The name of the GPU, or of the processor."""
    return cast("Any", torch.cuda).get_device_name(device) if device.startswith("cuda") else processor()


def check_device(device: str) -> None:
    """Raises ConfigError if torch cannot use `device`."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {device}: torch sees no CUDA device; allowed here: cpu")


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
    check_device(device)
    cast("Any", torch).manual_seed(seed)
    config_class, fields = SHAPES[name]
    config = getattr(transformers, config_class)(
        max_position_embeddings=_LENGTH, bos_token_id=None, eos_token_id=None, pad_token_id=0, **fields
    )
    with torch.device(device):
        model = cast("Any", transformers.AutoModelForCausalLM).from_config(config, dtype=number)
    return model.eval()


@contextmanager
def skip_out_of_memory(what: str, skipped: list[str]) -> Generator[None]:
    """Continue after the device runs out of memory; `skipped` then names `what` and the reason."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        skipped.append(f"{what}: {str(error).splitlines()[0]}")
        torch.cuda.empty_cache()


def attach_locked(model: Any, skip: Callable[[str], None], **options: Any) -> Attachment:  # noqa: ANN401 - see `build`
    """Attach kvtier, with host memory that is page-locked before anything is measured.

    Where that fails, the memory stays pageable, and `skip` is told the reason.
    """
    try:
        return attach(model, host__page_lock="on", **options)
    except ConfigError as error:
        if "page_lock" not in str(error):
            raise
        skip(str(error))
        return attach(model, host__page_lock="off", **options)
