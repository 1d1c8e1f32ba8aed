"""Position encodings that depend on how long a text is: their KV is a function of more than the tokens before it.

With ``dynamic`` and ``longrope`` scaling, a text beyond the original length is computed with other frequencies, from
its first token on. Such a text's KV must not serve a shorter one, nor the other way round. So a call is cached only
when it stays on one side of that length to its last token, and the side is part of its keys.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from kvtier.connect.transformers.upstream import PREPARE_INPUTS, Model, ModelConfig

_ROPE_FIELDS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def rope_settings(config: ModelConfig) -> dict[str, object]:
    """Everything that a decoder's configuration says of its rotary position encoding."""
    told = {field: getattr(config, field, None) for field in _ROPE_FIELDS}
    return {field: value for field, value in told.items() if value is not None}


@dataclass(frozen=True, slots=True)
class MovingRope:
    """A position encoding that changes with the length of the text."""

    original_tokens: int
    """The length up to which the frequencies are the original ones."""
    has_long_side: bool
    """Whether all longer texts have the same frequencies, so that they can be cached among themselves."""

    def side(self, prompt_tokens: int, total_tokens: int) -> str | None:
        """``short`` or ``long``: the side that a call is on; None when it crosses over or cannot be cached.

        Args:
            prompt_tokens: of the longest row, without its padding.
            total_tokens: the most it can grow to.
        """
        # One token less than the length: there, "dynamic" scaling keeps what it had, which depends on earlier calls.
        if total_tokens < self.original_tokens:
            return "short"
        return "long" if self.has_long_side and prompt_tokens > self.original_tokens else None


def moving_rope(model: Model) -> MovingRope | None:
    """How the model's position encoding depends on the length; None when it does not."""
    config = model.config.get_text_config(decoder=True)
    kinds = {(kind, length) for kind, length in _kinds(config) if kind in {"dynamic", "longrope"}}
    if not kinds:
        return None
    # A model with its own way to prepare inputs may throw the cache away at the crossing, as Phi-3 does.
    is_plain = cast("Model", type(model)).prepare_inputs_for_generation is PREPARE_INPUTS
    lengths = {length for _, length in kinds}
    has_long_side = is_plain and len(lengths) == 1 and all(kind == "longrope" for kind, _ in kinds)
    return MovingRope(min(lengths), has_long_side)


def _kinds(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """(kind of scaling, original length) of each set of frequencies; some models have one for each type of layer."""
    found: object = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return
    told = cast("Mapping[str, object]", found)
    nested = [cast("Mapping[str, object]", value) for value in told.values() if isinstance(value, Mapping)]
    for settings in nested or [told]:
        kind = str(settings.get("rope_type") or settings.get("type") or "default")
        original = settings.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        # "dynamic" scaling begins where the model's own maximum ends, whatever else is written down.
        length = original if original and kind != "dynamic" else getattr(config, "max_position_embeddings", 0)
        yield kind, int(cast("int", length))
