"""A `VllmConfig` as far as the connector reads it, with the values that vLLM 0.32.0 gives a small Llama on a CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


class HfConfig:
    """A model's configuration. Only its plain form is read."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


def vllm_config(model: str | Path = "/nowhere", **changes: Any) -> Any:
    """Return the configuration of an engine.

    Args:
        model: folder of the checkpoint, or name of a repository.
        changes: fields of any section, named like ``model__dtype``. The model's own are like ``hf__rope_theta``.
    """
    hf = {**HF_CONFIG}
    sections = {
        "model": SimpleNamespace(
            model=str(model),
            model_weights="",
            revision=None,
            code_revision=None,
            hf_config=HfConfig(hf),
            hf_text_config=HfConfig(hf),
            get_total_num_kv_heads=lambda: hf["num_key_value_heads"],
            using_transformers_backend=lambda: False,
            architectures=["LlamaForCausalLM"],
            dtype="torch.bfloat16",
            quantization=None,
            quantization_config=None,
            model_impl="auto",
            trust_remote_code=False,
            max_model_len=4096,
            disable_sliding_window=False,
            runner_type="generate",
            is_encoder_decoder=False,
            multimodal_config=None,
            enable_sleep_mode=False,
            use_mla=False,
        ),
        "cache": SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            enable_prefix_caching=True,
            use_replayssm=False,
        ),
        "parallel": SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
        ),
        "load": SimpleNamespace(load_format="auto", download_dir=None),
        "attention": SimpleNamespace(hisparse_config=None, use_non_causal=False, backend=None),
        "device": SimpleNamespace(device_type="cpu"),
        "compilation": SimpleNamespace(is_custom_op_enabled=lambda op: op == "rotary_embedding"),
    }
    transfer = SimpleNamespace(
        kv_connector="KvtierConnector", kv_role="kv_both", kv_load_failure_policy="recompute", engine_id="engine-1"
    )
    config = SimpleNamespace(
        **{f"{name}_config": section for name, section in sections.items()},
        kv_transfer_config=transfer,
        speculative_config=None,
        weight_transfer_config=None,
        lora_config=None,
        ec_transfer_config=None,
        instance_id="1700000000",
        num_prefill_lookahead_tokens=0,
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if section == "hf":
            hf[field] = value
        else:
            setattr(getattr(config, f"{section}_config") if field else config, field or section, value)
    return config


def request(tokens: list[int], **changes: Any) -> Any:
    """Return a request as the scheduler knows it."""
    fields: dict[str, Any] = {
        "request_id": "r",
        "all_token_ids": tokens,
        "pooling_params": None,
        "resumable": False,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "prompt_embeds": None,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def with_draft(config: Any, model: str | Path, **changes: Any) -> Any:
    """Add an EAGLE head to `config`. `changes` are fields of its `ModelConfig`, or ``hf__`` for the head's own."""
    draft = vllm_config(model, **{(name if "__" in name else f"model__{name}"): it for name, it in changes.items()})
    config.speculative_config = SimpleNamespace(
        method="eagle",
        num_speculative_tokens=3,
        draft_model_config=draft.model_config,
        draft_load_config=None,
        kv_cache_dtype=None,
    )
    config.num_prefill_lookahead_tokens, config.num_speculative_tokens = 1, 3
    return config
