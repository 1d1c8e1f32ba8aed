"""Names for what comes from the library and cannot be typed here: its attributes depend on the model's class."""

from typing import Any, TypeAlias, cast

import torch
from transformers.generation.utils import GenerationMixin

Model: TypeAlias = Any
"""A `PreTrainedModel` that generates."""

ModelConfig: TypeAlias = Any
"""A `PreTrainedConfig`, mostly the decoder's."""

Layer: TypeAlias = Any
"""A layer of the library's cache."""

Output: TypeAlias = Any
"""What `generate` returns: a tensor of sequences, or an object that has one as `sequences`."""

Argument: TypeAlias = Any
"""An argument that is only passed on."""

GENERATE: Argument = vars(GenerationMixin)["generate"]
"""The library's own `generate`."""

PREPARE_INPUTS: Argument = vars(GenerationMixin)["prepare_inputs_for_generation"]
"""The library's own way to prepare the inputs of a step; a model may have another."""


def integers(tensor: torch.Tensor) -> list[int]:
    """The values of a one-dimensional tensor of integers."""
    return cast("Argument", tensor).tolist()
