"""What a call asks for: its tokens, checked, and whose they are; or why it cannot be served."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from transformers.generation.configuration_utils import GenerationConfig

from kvtier.connect.transformers.call import extras_of
from kvtier.connect.transformers.rows import left_padding
from kvtier.connect.transformers.support import Options, padding_mask, reason_against
from kvtier.connect.transformers.upstream import Argument, Model
from kvtier.errors import ConfigError
from kvtier.keys.chain import Extra
from kvtier.types import NextTurn


class Prompt(NamedTuple):
    """The prompt of a call that the cache can serve."""

    input_ids: torch.Tensor
    """[rows, columns] tokens."""
    mask: torch.Tensor
    padding: tuple[int, ...]
    """Columns before each row."""
    extras: list[Extra]
    end_tokens: frozenset[int]


def prompt_of(
    model: Model,
    inputs: Argument,
    given: GenerationConfig | None,
    arguments: dict[str, Argument],
    *,
    accepts_padding: bool,
) -> Prompt | str:
    """The prompt among the arguments of `generate`; or why the call goes without the cache."""
    options = Options(arguments, given, model.generation_config)
    reason = reason_against(model, options)
    if reason:
        return reason
    input_ids = inputs if inputs is not None else arguments.get("input_ids")
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or input_ids.shape[1] == 0:
        return "the prompt is no tensor input_ids [rows, columns]"
    mask = padding_mask(input_ids, options)
    if mask.shape != input_ids.shape:
        return f"attention_mask has shape {tuple(mask.shape)}; allowed: that of input_ids, {tuple(input_ids.shape)}"
    padding = left_padding(mask)
    if padding is None:
        return "attention_mask pads on the right, has holes or hides a whole row; allowed: padding on the left"
    if any(padding) and not accepts_padding:
        return f"{type(model).__name__} takes no position_ids: KV of a padded row may depend on its padding"
    extras = extras_of(model, options, input_ids.shape[1], padding)
    if isinstance(extras, str):
        return extras
    return Prompt(input_ids, mask, padding, extras, options.tokens("eos_token_id"))


def session_names(session: object, rows: int) -> tuple[Sequence[str | None], str]:
    """The session of each row, and what is wrong: then it is as good as none, since nothing depends on it."""
    nobody = [None] * rows
    if session is None:
        return nobody, ""
    told = cast("Sequence[object]", session) if isinstance(session, list | tuple) else [session]
    names = [it for it in told if it is None or isinstance(it, str)]
    if len(names) == len(told) == rows:
        return names, ""
    return nobody, f"session = {session!r}; allowed: a text, or one for each of {rows} rows"


def checked_turn(session: object, next_turn: object) -> NextTurn | None:
    """Who goes on.

    Raises:
        ConfigError: `session` is no text, or `next_turn` says nothing.
    """
    if not isinstance(session, str):
        raise ConfigError(f"session is {session!r}; allowed: a text")
    try:
        return None if next_turn is None else NextTurn(next_turn)
    except ValueError:
        allowed = ", ".join(repr(it.value) for it in NextTurn)
        raise ConfigError(f"next_turn is {next_turn!r}; allowed: {allowed}, None") from None
