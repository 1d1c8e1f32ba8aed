"""Small checkpoints with random weights of normal scale, one for each way in which vLLM keeps KV.

vLLM's own dummy weights are so small that the output depends on the last token alone, which hides wrong KV. Here every
token counts, which `test_models.py` shows.
"""

import json
import math
from pathlib import Path
from typing import Any

VOCABULARY = 1024
FIRST_TOKEN = 3
"""Smaller numbers are special tokens."""

IMAGE = 1000
"""The token that stands for an image."""
IMAGE_SIDE = 112

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Full attention in every layer: one KV group, history.
    "llama": COMMON | {"model_type": "llama"},
    # Four layers, for pipeline stages of two each.
    "llama-deep": COMMON | {"model_type": "llama", "num_hidden_layers": 4},
    # One layer, which a draft model can repeat: see `make_draft`.
    "llama-shallow": COMMON | {"model_type": "llama", "num_hidden_layers": 1},
    # About 137 million parameters, for the benchmark: a prefill of 8,000 tokens takes seconds.
    "llama-137m": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # The layers of Llama-3.1-8B, for the benchmark on a GPU.
    "llama-8b": COMMON
    | {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    # One KV head, of which each of several ranks has a copy.
    "llama-mqa": COMMON | {"model_type": "llama", "num_key_value_heads": 1},
    # Five layers with a sliding window to one with full attention: six groups in vLLM, two rules.
    "gemma3": COMMON
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 256,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    # The same twice, for pipeline stages: of the last one, VLLM_PP_LAYER_PARTITION may take all layers of a vLLM group.
    "gemma3-deep": COMMON
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "sliding_window": 256,
        "query_pre_attn_scalar": 32,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    },
    # Three layers with a recurrent state (gated delta net) to one with full attention.
    "qwen3-next": COMMON
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
    },
    # Latent attention: one head of 576 elements for all.
    "deepseek": COMMON | DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "greedy"},
    # One dense layer of this kind, which a draft model can repeat.
    "deepseek-shallow": COMMON | DEEPSEEK | {"model_type": "deepseek_v3", "num_hidden_layers": 1},
}
"""By name: the configuration of each checkpoint, as the Transformers library writes it."""

SMALL = ("llama", "gemma3", "qwen3-next", "deepseek")


def make_checkpoint(name: str, directory: Path, seed: int = 7, device: str = "cpu") -> None:
    """Write checkpoint `name` of `CONFIGS` to `directory`: configuration, weights, a tokenizer that spells ``t7``.

    The same seed writes the same bytes on the same kind of `device`, which draws them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(CONFIGS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            weight.copy_(_drawn(label, weight))
        if name == "gemma3":  # which multiplies what it embeds by the root of the hidden size
            model.get_input_embeddings().weight.div_(math.sqrt(config.hidden_size))
    model.to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)


def make_llava(directory: Path, seed: int = 7) -> None:
    """Write a checkpoint of llama's sizes that sees images of `IMAGE_SIDE` pixels, each as 64 tokens."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=IMAGE_SIDE, patch_size=IMAGE_SIDE // 8, **sizes)
    text = LlamaConfig(**{name: it for name, it in CONFIGS["llama"].items() if name != "model_type"})
    torch.manual_seed(seed)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_token_id=IMAGE)
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            weight.copy_(_drawn(label, weight))
    model.to(torch.bfloat16).save_pretrained(directory)
    file, old, new = directory / "model.safetensors", "vision_tower.", "vision_tower.vision_model."
    weights = {(name if new in name else name.replace(old, new)): it for name, it in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})  # by the names that vLLM knows
    _write_tokenizer(directory)
    square = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    pixels = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": IMAGE_SIDE}, "crop_size": square}
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels), encoding="utf-8")
    fields = {"processor_class": "LlavaProcessor", "image_token": f"t{IMAGE}", "patch_size": IMAGE_SIDE // 8}
    fields |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    (directory / "processor_config.json").write_text(json.dumps(fields), encoding="utf-8")


def make_adapter(checkpoint: Path, directory: Path, seed: int) -> None:
    """Write a LoRA adapter for a checkpoint of Llama's kind: all attention projections, rank 8, far from zero."""
    import torch
    from safetensors.torch import save_file

    sizes = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] * sizes["head_dim"]
    shared = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes = {"q_proj": (hidden, heads), "k_proj": (hidden, shared), "v_proj": (hidden, shared)}
    shapes["o_proj"] = (heads, hidden)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, inputs, generator=generator) / math.sqrt(inputs)
            weights[f"{place}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) / math.sqrt(8)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": sorted(shapes), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


DRAFTED = {"eagle": "llama-shallow", "eagle3": "llama", "mtp": "deepseek-shallow"}
"""What each method drafts for."""


def make_drafts(place: Path) -> None:
    """Write the models of `DRAFTED`, by name, and draft models for them, by method; two of EAGLE."""
    for method, model in DRAFTED.items():
        make_checkpoint(model, place / model)
        make_draft(method, place / model, place / method)
    make_draft("eagle", place / DRAFTED["eagle"], place / "eagle-2", seed=2)


def make_draft(method: str, checkpoint: Path, directory: Path, seed: int = 1) -> None:
    """Write a draft model for a checkpoint: an ``eagle`` or ``eagle3`` head, or the checkpoint with an ``mtp`` layer.

    Its layer repeats the model's first one, on the shifted tokens. A little of the model's hidden states is mixed in,
    by `seed`. For a model of one layer many guesses of ``eagle`` and ``mtp`` are right; those of ``eagle3`` are wrong.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    layer = {name.removeprefix("model.layers.0."): it for name, it in model.items() if ".layers.0." in name}
    norm, head, embedding = (model[it] for it in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"))
    hidden, ones = len(norm), torch.ones_like(norm)
    generator = torch.Generator().manual_seed(seed)

    def little(rows: int) -> Any:
        return (torch.randn(rows, hidden, generator=generator) * 0.1 / math.sqrt(hidden)).to(norm.dtype)

    mixed = torch.cat([torch.eye(hidden, dtype=norm.dtype), little(hidden)], dim=1)
    if method == "eagle":
        weights = {f"layers.0.{name}": it for name, it in layer.items() if name != "input_layernorm.weight"}
        weights["fc.weight"] = mixed
    elif method == "eagle3":
        wide = ("q_proj", "k_proj", "v_proj")  # they read the token and the hidden states side by side
        weights = {
            f"midlayer.{name}": torch.cat([it, little(len(it))], dim=1) if name.split(".")[1] in wide else it
            for name, it in layer.items()
        }
        weights |= {"midlayer.hidden_norm.weight": ones, "norm.weight": norm, "lm_head.weight": head}
        weights["fc.weight"] = torch.cat([little(hidden)] * 3, dim=1)
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    else:
        place = f"model.layers.{config['num_hidden_layers']}"
        added = {"eh_proj": mixed, "enorm": ones, "hnorm": ones, "shared_head.norm": norm, "shared_head.head": head}
        weights = model | {f"{place}.{name}": it for name, it in layer.items()}
        weights |= {f"{place}.{name}.weight": it for name, it in (added | {"embed_tokens": embedding}).items()}
        config["num_nextn_predict_layers"] = 1
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: it.clone() for name, it in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def make_all(directory: Path) -> None:
    """Write every small checkpoint, by name, and two adapters for llama: ``adapter-1`` and ``adapter-2``."""
    for name in SMALL:
        make_checkpoint(name, directory / name)
    for seed in (1, 2):
        make_adapter(directory / "llama", directory / f"adapter-{seed}", seed)


def _drawn(label: str, weight: Any) -> Any:
    """Weights that neither vanish nor explode, and attention sharp enough to tell tokens apart."""
    import torch

    noise = torch.randn(weight.shape, device=weight.device)
    if label.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.0 + weight + 0.1 * noise  # the scores' only scale: the projections before it do not count
    if label.endswith("A_log"):
        return -6.0 + 0.5 * noise  # a state that remembers some hundred tokens; fresh ones forget within two
    if weight.ndim == 1:
        return weight + 0.1 * noise  # norms and biases stay near what they start from
    if "embed" in label:
        return noise
    gain = 1.5 if ".q_proj" in label or ".k_proj" in label else 2.0 if "attn" in label or "lm_head" in label else 1.0
    return noise * gain / math.sqrt(weight.shape[-1])


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    words = special + [f"t{number}" for number in range(FIRST_TOKEN, VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": special[0],
        "bos_token": special[1],
        "eos_token": special[2],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
