"""Mutated configurations end in the right size or in an error that names the field, never in another size.

Fields are removed, set to null, renamed, given another type, moved into an object, and added. The seed fixes all of it.
"""

import copy
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from tests.tools.size.test_size_named import SIZES

from kvtier.errors import ConfigError
from kvtier.tools import size
from kvtier.tools.size.families import class_defaults

UNKNOWN = (
    "kv_groups", "num_groups_of_heads", "linear_heads", "cross_layer_share", "layer_group", "inner_ut_steps",
    "ssm_dims", "kv_channel_count", "conv_taps", "window_tokens", "recurrent_width", "latent_kv_dim", "mamba_lanes",
    "loop_passes",
)  # fmt: skip
"""Names of fields that no model has, and that would describe a cache."""

VALUES: tuple[Any, ...] = (
    "8", "", 8.5, 8.0, -1, 0, 3, 10**18, True, [], [8], [[8]], ["full_attention"], {}, {"value": 8}, "\ud800", 1e308,
)  # fmt: skip

Figure = tuple[float, float, float, float]


def figure(config: dict[str, Any]) -> Figure | None:
    """The sizes of `config`; None where it is refused."""
    try:
        kv = size.of(size.from_config(config, "mutant"))
    except ConfigError:
        return None
    return kv.bytes_per_token, kv.bytes_per_token_growing, kv.bytes_per_session_constant, kv.state_bytes


def objects(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of a configuration that are about its language model."""
    yield config
    for key, value in config.items():
        if isinstance(value, dict) and key not in ASIDE:
            yield from objects(value)


CONTEXT = {"max_position_embeddings", "max_seq_len", "seq_length", "n_positions"}
"""Fields without which a window is not known to be longer than the context."""
BY_RULE = {"index_topk_freq": 1, "index_skip_topk_offset": 2}
"""What a class takes for a missing field without stating it as a default: no sharing."""
ASIDE = {"audio_config", "vision_config", "talker_config", "token2wav_config", "ffn_config", "rope_scaling"}
"""Objects about other things."""


def mutants(seed: int, count: int) -> Iterator[tuple[str, Figure | None, set[Figure | None]]]:
    """What was done to which model, the figure, and the figures that are right."""
    draw = random.Random(seed)
    originals = {name: (config, figure(config)) for name, (*_, config) in SIZES.items()}
    for _ in range(count):
        name = draw.choice(list(originals))
        original, right = originals[name]
        config = copy.deepcopy(original)
        part = draw.choice(list(objects(config)))
        key = draw.choice(list(part))
        without = {figure(each) for each in by_class(config, part, key)}
        kind = draw.choice(("remove", "null", "rename", "retype", "move", "add"))
        allowed: set[Figure | None] = {None, right}
        match kind:
            case "remove" | "null":
                allowed |= without
                part.pop(key)
                if kind == "null":
                    part[key] = None
            case "rename" | "move":
                if part[key] is None or key in CONTEXT:
                    allowed |= without
                value = part.pop(key)
                other = draw.choice((f"x_{key}", f"{key}_x", key.replace("_", "x"), key.upper()))
                part |= {other: value} if kind == "rename" else {"inner": {key: value}}
            case "retype":
                part[key] = draw.choice([it for it in VALUES if type(it) is not type(part[key])])
                if not part[key] or key in CONTEXT:  # as good as absent
                    allowed |= without
            case _:
                key = draw.choice(UNKNOWN)
                part[key] = draw.choice((8, "grouped", True, [1, 2], {"size": 8}))
                allowed = {None}
        yield f"{name}: {kind} {key} -> {part.get(key)!r}", figure(config), allowed


def by_class(config: dict[str, Any], part: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """`config` with each value that the class of the model may put in place of the missing field `key`."""
    model_type = part.get("model_type")
    stated = class_defaults(model_type if isinstance(model_type, str) else "", is_part=True)
    heads = next((part[it] for it in ("num_attention_heads", "n_head", "n_heads") if it in part), None)
    heads = heads or stated.get("num_attention_heads")
    hidden = next((part[it] for it in ("hidden_size", "n_embd", "d_model", "dim") if it in part), None)
    values: list[Any] = [False, True]
    values += [heads if isinstance(stated[key], str) else stated[key]] if key in stated else []
    values += [hidden // heads] if heads and hidden and "head" in key else []
    values += [2**20] if key in CONTEXT else []
    values += [BY_RULE[key]] if key in BY_RULE else []
    values += [None] if key == "sliding_window" else []
    values += ["multihead"] if key == "attention_head_type" else []
    value = part[key]
    for each in values:
        if value is None or each is None or isinstance(each, bool) == isinstance(value, bool):
            part[key] = each
            yield copy.deepcopy(config)
    part[key] = value


def check(seed: int, count: int) -> None:
    for what, found, allowed in mutants(seed, count):
        assert found in allowed, what


def test_mutants_are_right_or_refused():
    check(14, 800)


def test_a_model_without_any_one_field_is_right_or_refused():
    for name, (*_, original) in SIZES.items():
        right, drawn = figure(original), [(part, key) for part in objects(original) for key in part]
        for index, null in product(range(len(drawn)), (False, True)):
            config = copy.deepcopy(original)
            part, key = [(part, key) for part in objects(config) for key in part][index]
            value = part.pop(key)
            part |= {key: None} if null else {}
            found = figure(config)
            if found not in {None, right}:
                part[key] = value
                assert found in {figure(each) for each in by_class(config, part, key)}, f"{name}: {key}, {null=}"


@pytest.mark.nightly
def test_ten_thousand_mutants_are_right_or_refused():
    check(1414, 10_000)
