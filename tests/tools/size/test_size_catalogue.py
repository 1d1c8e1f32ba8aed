"""The catalogue: at least 40 models, every kind of attention, complete entries, and lookup by any spelling."""

import re
from datetime import date

import pytest

from kvtier.errors import ConfigError
from kvtier.tools import size
from kvtier.tools.size.catalogue import entries, find


def test_at_least_forty_models():
    assert len(size.names()) >= 40
    assert size.names() == sorted(size.names())


@pytest.mark.parametrize("name", size.names())
def test_every_entry_is_complete_and_can_be_sized(name):
    entry, kv = entries()[name], size.of(name)
    assert entry.name == name == entry.name.lower()
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository)
    assert entry.via
    assert date(2026, 1, 1) <= date.fromisoformat(entry.date) <= date(2100, 1, 1)
    assert kv.bytes_per_token > 0 or kv.state_bytes > 0
    assert kv.model.attention_heads or not kv.bytes_per_token
    assert all(layer.formula and layer.cache.source and layer.cache.expression for layer in kv.layers)
    assert entry.active_billion is None or entry.active_billion < entry.parameters_billion


def test_every_kind_of_attention_is_there():
    runs = [(name, cache) for name in size.names() for cache, _ in size.model(name).runs]
    heads = {name: size.model(name).attention_heads for name in size.names()}
    kinds = {cache.kind for _, cache in runs}
    assert kinds == {
        "full", "window", "chunked", "mla", "compressed", "indexer", "shared",
        "mamba1", "mamba2", "gated_delta_net", "kda", "linear_attention",
    }  # fmt: skip
    full = [(cache.kv_heads, heads[name]) for name, cache in runs if cache.kind == "full"]
    assert any(kept == 1 and all_heads > 1 for kept, all_heads in full)  # MQA
    assert any(kept == all_heads for kept, all_heads in full)  # MHA
    assert any(1 < kept < all_heads for kept, all_heads in full)  # GQA
    assert all(len(cache.parts) == 2 for _, cache in runs if cache.kind in {"full", "chunked"})  # K = V, too


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama3-8B", "llama-3.1-8b"),
        ("QWEN/qwen3-235b-a22b", "qwen3-235b-a22b"),
        ("qwen3-235b", "qwen3-235b-a22b"),
        ("Qwen3-Next", "qwen3-next-80b-a3b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("DeepSeek-R1-685B", "deepseek-r1"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
    ],
)
def test_lookup_ignores_case_organisation_and_suffix(written, meant):
    assert size.model(written).name == meant


def test_names_and_aliases_are_unique():
    for entry in entries().values():
        for name in (entry.name, entry.repository, *entry.aliases):
            assert find(name) is entry, name


@pytest.mark.parametrize(
    ("written", "offered"),
    [
        ("lama-3.1-8b", "the nearest names are .*llama-3.1-8b"),
        ("gemma3-27", "the nearest names are .*gemma3-27b"),
        ("Qwen/Qwen3-9B", "the nearest names are .*qwen3-8b"),
        ("zzz", "known are .* more"),
    ],
)
def test_the_nearest_names_are_offered(written, offered):
    with pytest.raises(ConfigError, match=f"unknown model '{written}'; {offered}"):
        size.model(written)


def test_repeat_is_expanded_to_all_layers():
    twenty = entries()["gpt-oss-20b"].config
    assert twenty["layer_types"] == ["sliding_attention", "full_attention"] * 12
