"""The model of the demo: shaped like Llama, made here from a seed, downloaded from nowhere.

Its weights are random, so its answers mean nothing; but it computes exactly what a trained model of this shape would,
at the same cost, and its keys and values depend on every token before them. That is all that a KV cache can see.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvtier.bench.demo_trace import VOCABULARY

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

POSITIONS = 16384
"""Longest prompt with its answer, in tokens; the trace's longest is under half of that."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama: grouped-query attention (fewer KV heads than heads), float32."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 4

    def as_dict(self) -> dict[str, int]:
        """The sizes by name."""
        return asdict(self)


SHAPES = {
    "tiny": ModelShape(hidden=64, layers=2, intermediate=176, heads=4, kv_heads=2),
    "small": ModelShape(hidden=384, layers=6, intermediate=1024, heads=6, kv_heads=2),
    "medium": ModelShape(hidden=512, layers=8, intermediate=1408, heads=8, kv_heads=2),
}

WHY = {
    "tiny": "for a quick look that everything works; too small for the times to mean anything",
    "small": "the smallest at which computing the prompt, not generating, takes most of the time on two cores",
    "medium": "about three times the work of 'small', for a machine with more cores",
}


def build_model(shape: ModelShape, seed: int) -> "LlamaForCausalLM":
    """A model with normally distributed random weights from `seed`; the same seed gives the same weights.

    The standard deviation is 1/sqrt(hidden), so that a layer's output is about as large as its input and attention
    has something to choose between. With the usual 0.02 a model as narrow as this nearly ignores its context.
    """
    import torch  # noqa: PLC0415  an extra, wanted only here
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
        # No token ends an answer, so that every answer has the same length.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()
