"""Judges of lossy KV: language models that compute exact KV and continue a text after exact or restored KV.

A checkpoint is a folder of Transformers or a GGUF file. Transformers would compute with a GGUF file's packed weights,
so this module unpacks them itself. Weights are rounded to bf16 once. The arithmetic is float32, or bf16 to show what an
engine's own arithmetic changes.
"""
# torch's own types are partly unknown:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from kvtier.errors import ConfigError

STEP_TOKENS = 1024
"""Most tokens of one forward pass over a long prefix."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of tensors in Transformers, by the names in a GGUF file."""


class Judge:
    """A model with full attention in all layers. Its KV is a tensor [layers, 2, KV heads, tokens, channels] in bf16.

    Args:
        path: a folder with a Transformers checkpoint, or a GGUF file of a Llama or Qwen2 model.
        name: name of the judge in results; empty means the name of the file or folder.

    Raises:
        ConfigError: the checkpoint cannot be read, or some layers do not have full attention.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or (path.stem if path.is_file() else path.resolve().name)
        try:
            self._net, self._tokenizer = _read_gguf(path) if path.is_file() else _read_folder(path)
            config = self._net.eval().config
            self._rounded = copy.deepcopy(self._net)
            for weights in self._rounded.parameters():  # not the buffers: engines compute rotations in float32
                weights.data = weights.data.bfloat16()
            self.positions: int = config.max_position_embeddings
            self.continued(None, torch.zeros(1, 1, dtype=torch.long))
        except (ImportError, OSError, ValueError, LookupError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"cannot be a judge: {error}",
                setting="--model",
                value=str(path),
                allowed="a folder with a Transformers checkpoint, or a GGUF file of a Llama or Qwen2 model",
            ) from error

    def tokens(self, text: str) -> torch.Tensor:
        """Return the token ids of a text, [1, tokens]."""
        return self._tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    def prefix_kv(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the exact KV of a prompt's beginning."""
        kv: torch.Tensor | None = None
        for part in tokens.split(STEP_TOKENS, 1):
            _, new = self.continued(kv, part)
            kv = new if kv is None else torch.cat((kv, new), 3)
        assert kv is not None
        return kv

    def continued(
        self,
        kv: torch.Tensor | None,
        tokens: torch.Tensor,
        *,
        scored: int | torch.Tensor = 1,
        lengths: Sequence[int] = (),
        is_rounded: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `tokens` after the prompt so far, and predict the tokens that follow.

        Args:
            kv: KV of the prompt so far; None at the beginning.
            tokens: the tokens that follow, [1, tokens].
            scored: positions in `tokens` whose next token is predicted, or the number of such positions at the end.
            lengths: if given, `tokens` are continuations of these lengths, which do not attend to each other.
            is_rounded: compute in bf16.

        Returns:
            Logarithms of the next token's probabilities, [scored, vocabulary], and the KV of `tokens`.
        """
        net = self._rounded if is_rounded else self._net
        start, cache = 0 if kv is None else kv.shape[3], cast("Any", DynamicCache())
        for layer, both in enumerate(() if kv is None else kv):
            keys, values = both[:, None].to(net.dtype)
            cache.update(keys, values, layer)
        apart: dict[str, torch.Tensor] = {}
        if lengths:
            number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            is_seen = (number[:, None] == number).tril()
            is_seen = torch.cat((torch.ones(len(number), start, dtype=torch.bool), is_seen), 1)
            positions = torch.cat([torch.arange(start, start + it) for it in lengths])
            apart = {"attention_mask": is_seen[None, None], "position_ids": positions[None]}
        with torch.inference_mode():
            logits = net(tokens, past_key_values=cache, use_cache=True, logits_to_keep=scored, **apart).logits[0]
            new = [torch.stack((it.keys[0, :, start:], it.values[0, :, start:])) for it in cache.layers]
            return logits.float().log_softmax(-1), torch.stack(new).bfloat16()


def _read_folder(path: Path) -> tuple[Any, Any]:
    net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).float()
    if set(getattr(net.config, "layer_types", None) or ()) - {"full_attention"}:
        raise ValueError("some layers do not have full attention")
    return net, AutoTokenizer.from_pretrained(path, local_files_only=True)


def _read_gguf(path: Path) -> tuple[Any, Any]:
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(path)
    fields = {name: it.contents() for name, it in reader.fields.items() if not name.startswith("tokenizer.")}
    weights = dict(_weights(reader, fields, gguf.dequantize))
    kind = fields["general.architecture"]
    if kind not in {"llama", "qwen2"}:
        raise ValueError(f"its architecture is {kind}")
    of = {name.removeprefix(f"{kind}."): value for name, value in fields.items()}
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(weights["model.embed_tokens.weight"]),
        hidden_size=of["embedding_length"],
        intermediate_size=of["feed_forward_length"],
        num_hidden_layers=of["block_count"],
        num_attention_heads=of["attention.head_count"],
        num_key_value_heads=of["attention.head_count_kv"],
        max_position_embeddings=of["context_length"],
        rms_norm_eps=of["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": of.get("rope.freq_base", 10000.0)},
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    net = AutoModelForCausalLM.from_config(config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    net.load_state_dict(weights)
    return net, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _weights(
    reader: Any,  # noqa: ANN401 - the package has no types
    fields: Mapping[str, Any],
    unpack: Callable[[Any, Any], Any],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with their names in Transformers, rounded to bf16 but held in float32."""
    kind = fields["general.architecture"]
    heads = {"attn_q": fields[f"{kind}.attention.head_count"], "attn_k": fields[f"{kind}.attention.head_count_kv"]}
    for tensor in reader.tensors:
        *block, short, suffix = tensor.name.split(".")
        numbers = np.array(unpack(tensor.data, tensor.tensor_type), np.float32)
        if kind == "llama" and short in heads:  # llama.cpp rotates adjacent channels, Transformers the halves of a head
            numbers = numbers.reshape(heads[short], -1, 2, numbers.shape[-1]).swapaxes(1, 2).reshape(numbers.shape)
        place = f"model.layers.{block[1]}." if block else ""
        weights = torch.from_numpy(np.ascontiguousarray(numbers))
        yield f"{place}{_NAMES[short]}.{suffix}", weights.bfloat16().float()
