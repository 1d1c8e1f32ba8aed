"""Configurations: which fields are read, and errors that name each missing, wrong or contradictory field."""

import json

import pytest

from kvtier import size
from kvtier.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
}
QWEN = {
    **LLAMA,
    "model_type": "qwen3_next",
    "head_dim": 32,
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
KIMI = {
    **MLA,
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
}


def of(config, **settings):
    return size.of(size.from_config(config, "mine"), **settings)


def test_a_file_and_its_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for given in (file, str(file), tmp_path, str(tmp_path)):
        found = size.model(given)
        assert (found.name, found.date, len(found.layers)) == (tmp_path.name, "", 4)
        assert size.of(found).bytes_per_token == 4 * 2 * 2 * 16 * 2


def test_the_language_models_part_is_read():
    assert of({"model_type": "some_vl", "text_config": LLAMA}).bytes_per_token == of(LLAMA).bytes_per_token


def test_only_fields_in_use_are_listed():
    assert dict(size.from_config({**LLAMA, "vocab_size": 9}, "mine").fields) == {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    assert "linear_attn_config.num_heads" in size.from_config(KIMI, "mine").fields


def test_the_head_dimension_is_read_and_divided_only_where_absent():
    assert of({**LLAMA, "head_dim": 128}).bytes_per_token == 4 * 2 * 2 * 128 * 2


def test_without_kv_heads_every_head_has_its_own():
    assert of({**LLAMA, "num_key_value_heads": None}).bytes_per_token == 4 * 2 * 4 * 16 * 2


def test_older_names_of_the_same_fields():
    gpt = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128}
    assert of(gpt).bytes_per_token == 2 * 2 * 64 * 2
    assert size.from_config(gpt, "mine").tokens_max == 128
    assert of({**gpt, "model_type": "gpt_bigcode"}).bytes_per_token == 2 * 2 * 16 * 2


def test_windows_by_each_rule():
    windowed = {**LLAMA, "sliding_window": 8}
    kinds = {
        "mistral": ["window"] * 4,
        "gemma2": ["window", "full"] * 2,
        "cohere2": ["window"] * 3 + ["full"],
    }
    for model_type, expected in kinds.items():
        found = size.from_config({**windowed, "model_type": model_type}, "mine")
        assert [cache.kind for (cache,) in found.layers] == expected
    named = {**windowed, "layer_types": ["full_attention", "sliding_attention"] * 2}
    assert [cache.kind for (cache,) in size.from_config(named, "mine").layers] == ["full", "window"] * 2
    qwen2 = {**windowed, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}
    assert [cache.kind for (cache,) in size.from_config(qwen2, "mine").layers] == ["full"] * 3 + ["window"]
    assert not of({**qwen2, "use_sliding_window": False}).bytes_per_session_constant


def test_layers_with_changes_of_their_own():
    changed = {**LLAMA, "per_layer_config": {"03": {"head_dim": 64}, "0": {"num_key_value_heads": 4}}}
    assert of(changed).bytes_per_token == 2 * 2 * (2 * 2 * 16 + 4 * 16 + 2 * 64)


def test_layers_found_by_search():
    nas = {
        "model_type": "nemotron-nas", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2, "no_op": False}},
            {"attention": {"n_heads_in_group": None, "no_op": True}},
            {"attention": {"n_heads_in_group": 4, "no_op": False}},
        ],
    }  # fmt: skip
    assert of(nas).bytes_per_token == 2 * 2 * (2 + 1) * 16


def test_the_reader_of_falcon():
    falcon = {"model_type": "falcon", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    assert of(falcon).layers[0].cache.kv_heads == 1
    assert of({**falcon, "multi_query": False}).layers[0].cache.kv_heads == 4
    assert of({**falcon, "new_decoder_architecture": True, "num_kv_heads": 2}).layers[0].cache.kv_heads == 2


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers is True"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({**LLAMA, "num_attention_heads": None}, "num_attention_heads is missing"),
        ({**LLAMA, "num_attention_heads": -4}, "num_attention_heads is -4"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads"),
        ({**LLAMA, "num_key_value_heads": 8}, "num_key_value_heads is 8; it must divide num_attention_heads"),
        ({**LLAMA, "hidden_size": 66}, "hidden_size is 66; without head_dim"),
        ({**LLAMA, "hidden_size": None}, "hidden_size is missing"),
        ({**LLAMA, "head_dim": 1.5}, "head_dim is 1.5"),
        ({**LLAMA, "model_type": 7}, "model_type is 7"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types .* it must have num_hidden_layers = 4"),
        ({**LLAMA, "layer_types": ["odd_attention"] * 4}, "layer_types .*'odd_attention' is not known"),
        ({**LLAMA, "layer_types": "full_attention"}, "layer_types is 'full_attention'; it must be a list"),
        ({**LLAMA, "layer_types": [1, 2, 3, 4]}, "layer_types .* list of texts"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 4}, "attention_chunk_size is missing"),
        ({**LLAMA, "sliding_window": 8}, "sliding_window is 8; layer_types or sliding_window_pattern"),
        ({**LLAMA, "num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
        ({**LLAMA, "model_type": "gemma2", "sliding_window": 8, "num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({**LLAMA, "attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ({**LLAMA, "per_layer_config": {"9": {}}}, "per_layer_config .*'9' is none of the 4 layers"),
        ({**LLAMA, "per_layer_config": {"0": 3}}, "per_layer_config.0 must be an object"),
        ({**QWEN, "per_layer_config": {"0": {"head_dim": 8}}}, "not understood .*: .*'per_layer_config.0.head_dim'"),
        ({**LLAMA, "model_type": "novel", "compress_ratios": [4]}, "not understood .*'novel': 'compress_ratios'"),
        ({**LLAMA, "model_type": "novel", "mamba_d_state": 16}, "not understood .*'novel': 'mamba_d_state'"),
        ({**MLA, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ({**MLA, "index_head_dim": 16, "indexer_types": ["full"]}, "indexer_types"),
        ({**QWEN, "layer_types": ["full_attention"] * 4}, "layer_types .* contradicts"),
        ({**QWEN, "linear_num_value_heads": None}, "linear_num_value_heads is missing"),
        ({**QWEN, "mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype is 'int4'"),
        ({**KIMI, "num_hidden_layers": 5}, "kda_layers .* each of the layers 1 to 5 once"),
        ({**KIMI, "linear_attn_config": None}, "linear_attn_config must be an object"),
        ({**LLAMA, "num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
    ],
)  # fmt: skip
def test_the_wrong_field_is_named(config, named):
    with pytest.raises(ConfigError, match=f"mine: {named}|mine: .*: {named}"):
        of(config)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON"),
    ],
)
def test_files_that_are_not_configurations(tmp_path, text, named):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=named) as raised:
        size.model(file)
    assert str(file) in str(raised.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        size.model(tmp_path / "nowhere" / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        size.model(tmp_path)
    (tmp_path / "large.json").write_bytes(b" " * ((4 << 20) + 1))
    with pytest.raises(ConfigError, match="more than 4194304 bytes"):
        size.model(tmp_path / "large.json")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tp": 0}, "tp: 0 is not allowed"),
        ({"tp": 3}, "tp: 3 ranks cannot share the 4 attention heads"),
        ({"tp": 8}, "tp: 8 ranks cannot share the 4 attention heads"),
        ({"tp": 10**6}, "tp: 1000000 is not allowed; it must be from 1 to 1024"),
        ({"pp": 0}, "pp: 0 is not allowed"),
        ({"pp": 5}, "pp: 5 is not allowed; mine has 4 layers"),
        ({"chunk_tokens": 0}, "chunk-tokens: 0"),
        ({"chunk_tokens": 1 << 21}, "chunk-tokens: 2097152"),
        ({"dtype": "fp12"}, "dtype: unknown format 'fp12'; known are fp32, bf16"),
        ({"dtype": "int4:g0"}, "dtype: unknown format 'int4:g0'"),
        ({"dtype": "int4:g99999"}, "dtype: unknown format"),
        ({"dtype": "fp8_ds_mla"}, "dtype: fp8_ds_mla packs MLA latents, and mine has none"),
        ({"index_dtype": "fp8"}, "index-dtype: fp8 is for the keys of indexers, and mine has none"),
    ],
)
def test_settings_that_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        of(LLAMA, **settings)


def test_ranks_that_cannot_share_a_state():
    uneven = {**QWEN, "num_attention_heads": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 4}
    assert of(uneven).state_bytes
    with pytest.raises(ConfigError, match="tp: 4 ranks cannot share the 1 heads of mine's gated_delta_net layers"):
        of(uneven, tp=4)


def test_too_large_a_chunk_for_a_frame():
    with pytest.raises(ConfigError, match="chunk-tokens: 1048576 tokens make too large a chunk"):
        size.of("llama-3.1-405b", chunk_tokens=1 << 20)


@pytest.mark.parametrize(("tokens", "users"), [(0, 1), (-1, 1), (1, 0), (10**13, 1), (1, 10**13)])
def test_numbers_of_sessions_that_are_refused(tokens, users):
    with pytest.raises(ConfigError, match="must be from 1 to 1000000000000"):
        of(LLAMA).total(tokens, users)
