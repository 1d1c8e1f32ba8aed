"""Makes the checkpoint of `kvtier bench serve`, with much KV for little compute, random weights, and words as tokens.

On one core a common small model computes KV more slowly than any drive reads it, so offloading would always win. In
this checkpoint a token has 32 KiB of KV in 4 layers of few parameters. Attention dominates: for each byte of KV, it
takes as many operations as the context has tokens. Wide heads keep the softmax's share small.

vLLM's Python, which has torch and Transformers, runs this module: ``python checkpoint.py DIRECTORY``. It imports
nothing from kvtier.
"""

import json
import math
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = range(len(SPECIAL), 1024)
"""Numbers of the tokens that are words. Word ``t3`` is token 3."""
ROLES = ("system", "user", "assistant")
VOCABULARY = 1088

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
}
"""Fields of the model's configuration. A token has 32 KiB of KV, which is much for the model's compute."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
"""The chat template. It only appends, so a conversation is a prefix of its next prompt, token for token."""

CONTEXT_TOKENS = 32768


def kv_bytes_per_token(shape: dict[str, Any] = SHAPE) -> int:
    """Return the bytes of one token's K and V in all layers, in bfloat16."""
    return 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def make_checkpoint(directory: Path, seed: int = 7, shape: dict[str, Any] = SHAPE) -> None:
    """Write a Llama of `shape` with random weights, a tokenizer of words and a chat template.

    Equal seeds give equal bytes. `directory` appears with all files or not at all.
    """
    torch, transformers = import_module("torch"), import_module("transformers")
    special = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=CONTEXT_TOKENS, dtype="bfloat16", **special, **shape
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            weight.copy_(_drawn(torch, label, weight))
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        model.to(torch.bfloat16).save_pretrained(temporary)
        _write_tokenizer(temporary)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _drawn(torch: Any, label: str, weight: Any) -> Any:  # noqa: ANN401 - torch is optional
    """Draw weights that neither vanish nor explode, and that make attention sharp enough to tell tokens apart."""
    noise = torch.randn(weight.shape)
    if weight.ndim == 1:
        return weight + 0.1 * noise
    if "embed" in label:
        return noise
    gain = 1.5 if ".q_proj" in label or ".k_proj" in label else 2.0 if "attn" in label or "lm_head" in label else 1.0
    drawn = noise * gain / math.sqrt(weight.shape[-1])
    if "lm_head" in label:
        drawn[: WORDS.start] = drawn[WORDS.stop :] = 0.0  # never the largest logit, so answers have only words
    return drawn


def _write_tokenizer(directory: Path) -> None:
    words = [*SPECIAL, *(f"t{number}" for number in WORDS), *ROLES]
    numbers = {word: number for number, word in enumerate(words)}
    kinds = import_module("tokenizers.models"), import_module("tokenizers.pre_tokenizers")
    tokenizer = import_module("tokenizers").Tokenizer(kinds[0].WordLevel(numbers, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = kinds[1].WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]))
