"""Configurations: which fields are read, and errors that name each missing, wrong or contradictory field."""

import json

import pytest

from kvtier.errors import ConfigError
from kvtier.tools import size

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
NOVEL = {**LLAMA, "model_type": "novel"}
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


def test_only_fields_in_use_are_listed():
    assert dict(size.from_config({**LLAMA, "vocab_size": 9}, "mine").fields) == {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    assert "linear_attn_config.num_heads" in size.from_config(KIMI, "mine").fields


NAS = {
    "model_type": "nemotron-nas", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
    "block_configs": [
        {"attention": {"n_heads_in_group": 2, "no_op": False}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"n_heads_in_group": 4, "no_op": False}},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "elements"),
    [
        ({"model_type": "some_vl", "text_config": LLAMA}, 4 * 2 * 2 * 16),  # the language model's part
        ({**LLAMA, "head_dim": 128}, 4 * 2 * 2 * 128),  # without head_dim, hidden size / heads
        ({**LLAMA, "num_key_value_heads": None}, 4 * 2 * 4 * 16),  # every head has its own
        (
            {**LLAMA, "per_layer_config": {"03": {"head_dim": 64}, "0": {"num_key_value_heads": 4}}},
            2 * (2 * 2 * 16 + 4 * 16 + 2 * 64),
        ),
        (NAS, 2 * (2 + 1) * 16),
    ],
)
def test_elements_of_a_token(config, elements):
    assert of(config).bytes_per_token == elements * 2


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
        ({**LLAMA, "layer_types": [1, 2, 3, 4]}, "layer_types .* list of strings"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_window is missing"),
        ({**LLAMA, "layer_types": ["chunked_attention"] * 4}, "attention_chunk_size is missing"),
        ({**LLAMA, "sliding_window": 8}, "sliding_window is 8; layer_types or sliding_window_pattern"),
        ({**LLAMA, "sliding_window": 8, "sliding_window_pattern": ""}, "sliding_window_pattern is ''"),
        ({**LLAMA, "num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
        ({**LLAMA, "model_type": "gemma2", "sliding_window": 8, "num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({**LLAMA, "attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ({**LLAMA, "per_layer_config": {"9": {}}}, "per_layer_config .*'9' is not one of the 4 layers"),
        ({**LLAMA, "per_layer_config": {"0": 3}}, "per_layer_config.0 must be an object"),
        ({**QWEN, "per_layer_config": {"0": {"head_dim": 8}}}, "not understood .*: .*'per_layer_config.0.head_dim'"),
        ({**MLA, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        ({**MLA, "index_head_dim": 16, "indexer_types": ["full"]}, "indexer_types"),
        ({**QWEN, "layer_types": ["full_attention"] * 4}, "layer_types .* contradicts"),
        ({**QWEN, "linear_num_value_heads": None}, "linear_num_value_heads is missing"),
        ({**QWEN, "mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype is 'int4'"),
        ({**KIMI, "num_hidden_layers": 5}, "kda_layers .* each of the layers 1 to 5 once"),
        ({**KIMI, "linear_attn_config": None}, "linear_attn_config must be an object"),
        ({**LLAMA, "num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({**LLAMA, "model_type": "lfm2", "conv_L_cache": 1, "full_attn_idxs": [0]}, "conv_L_cache is 1; .* from 2 to"),
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
        ({"dtype": "fp8_ds_mla"}, "dtype: fp8_ds_mla packs MLA latents, but mine has none"),
        ({"index_dtype": "fp8"}, "index-dtype: fp8 is for the keys of indexers, but mine has none"),
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


HARMLESS = {
    # field: (value, the configuration that it is added to)
    "lm_head": (True, {**LLAMA, "model_type": "deepseek_v2"}),
    "global_view_pos": ("head", LLAMA),
    "is_moe_layer": ([False, True, True, True], LLAMA),
    "num_expert_groups": (1, {**LLAMA, "model_type": "afmoe"}),
    "num_limited_groups": (1, {**LLAMA, "model_type": "afmoe"}),
    "use_flash_attention": (True, LLAMA),
    "_flash_attn_2_enabled": (True, LLAMA),
    "is_decoder": (True, LLAMA),
    "pre_allocate_kv_cache": (True, {**LLAMA, "model_type": "gpt_bigcode"}),
    "use_cache_kernel": (True, LLAMA),
    "headwise_attn_output_gate": (True, LLAMA),
    "max_attn_value": (30.0, LLAMA),
    "num_ln_in_parallel_attn": (2, {**LLAMA, "model_type": "falcon"}),
    "order_of_interleaved_layers": ("local_attn_first", {**LLAMA, "model_type": "cohere2", "sliding_window": 8}),
    "num_attention_heads_per_layer": ([4, 8, 4, 8], {**LLAMA, "model_type": "laguna", "sliding_window": None}),
    "keep_window_size": (2048, {**LLAMA, "model_type": "doge"}),
    "select_layer": (-1, LLAMA),
    "query_num": (64, {**LLAMA, "model_type": "minicpmv"}),
    "use_decoder_only_language_model": (True, LLAMA),
    "prefix_dense_sliding_window_pattern": (
        1,
        {**LLAMA, "model_type": "cohere2_moe", "layer_types": ["full_attention"] * 4, "sliding_window": 8},
    ),
    "qformer_config": ({"num_hidden_layers": 12, "num_attention_heads": 12}, LLAMA),
    "no_repeat_ngram_size": (3, LLAMA),
    "gated_mla": (True, MLA),
    "use_attention_gate": (True, LLAMA),
    "latent_patch_size": (2, LLAMA),
    "timm_override_act_layers": (["quick_gelu", None], LLAMA),
    "prefix_attn": (730, {**LLAMA, "model_type": "moondream3_text"}),
    "rswa_window": (128, {**LLAMA, "model_type": "unlimited-ocr"}),
    "max_window_layers": (4, {**LLAMA, "model_type": "bailing_moe"}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_field_that_only_sounds_like_a_cache_changes_no_size(name):
    value, config = HARMLESS[name]
    assert of({**config, name: value}).layers == of(config).layers


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (LLAMA, "use_flash_attention", {"window": 128}),
        (LLAMA, "lm_head", 8),
        ({**LLAMA, "model_type": "cohere2", "sliding_window": 8}, "prefix_dense_sliding_window_pattern", 2),
        (LLAMA, "is_decoder", [1, 0]),
        (LLAMA, "num_attention_heads_per_layer", [4, 8, 4, 8]),
        (LLAMA, "keep_window_size", 64),
        (LLAMA, "query_num", 64),
        (LLAMA, "prefix_attn", 730),
        (LLAMA, "rswa_window", 128),
        (LLAMA, "gated_mla", 2),
        (LLAMA, "num_ln_in_parallel_attn", 2),
        ({**LLAMA, "model_type": "cohere2", "sliding_window": 8}, "order_of_interleaved_layers", "global_attn_first"),
        (LLAMA, "kv_heads_per_layer", [2, 1, 2, 1]),
        (LLAMA, "n_key_value_heads", 1),
        (LLAMA, "local_attention_pattern", "LG"),
        (LLAMA, "attention_window_layers", [0, 2]),
        (LLAMA, "use_kv_sharing", True),
        (LLAMA, "kv_source_layers", [0, 0, 2, 2]),
        (LLAMA, "cross_layer_attention", True),
        (LLAMA, "latent_kv_rank", 64),
        (LLAMA, "num_moe_attention_heads", 2),
        (LLAMA, "expert_kv_groups", 2),
        (NOVEL, "num_key_value_groups", 4),
        (NOVEL, "linear_key_dim", 4),
        (NOVEL, "cross_layers", [1]),
        (NOVEL, "layer_group_size", 4),
        (NOVEL, "total_ut_steps", 4),
        (NOVEL, "ssm_state", 16),
        (NOVEL, "short_conv", 4),
        (NOVEL, "compress_ratios", [4]),
        (NOVEL, "mamba_d_state", 16),
        (NOVEL, "attention", {"kv": {"count": 2}}),
        (LLAMA, "num_key_value_heads_per_layers", [8] * 4),
        ({**LLAMA, "model_type": "qwen3"}, "layer_group_size", 4),
        (MLA, "layer_group_size", 4),
    ],
)
def test_a_field_that_may_change_a_size_is_refused_by_name(config, name, value):
    with pytest.raises(ConfigError, match=f"not understood .*'{name}"):
        of({**config, name: value})


NEO = {
    "model_type": "gpt_neo", "num_layers": 2, "num_heads": 4, "hidden_size": 64,
    "attention_layers": ["global", "local"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "context", "beyond"),
    [
        ({**LLAMA, "sliding_window": 64}, 64, "refused"),  # no rule for the layers is needed
        ({**LLAMA, "model_type": "gemma2", "sliding_window": 64}, 64, "window"),
        ({**NEO, "window_size": 64}, 64, "window"),
        ({**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 64}, 64, "chunked"),
        ({**LLAMA, "model_type": "recurrent_gemma", "attention_window_size": 64, "conv1d_width": 4}, 64, "window"),
    ],
)
def test_a_window_as_long_as_the_context_is_full_attention(config, context, beyond):
    def kinds(most):
        found = size.from_config({**config, "max_position_embeddings": most}, "mine")
        return {cache.kind for layer in found.layers for cache in layer} - {"rg_lru"}

    assert kinds(context) == kinds(context - 1) == {"full"}
    if beyond == "refused":
        with pytest.raises(ConfigError, match="layer_types or sliding_window_pattern must say"):
            kinds(context + 1)
    else:
        assert beyond in kinds(context + 1)


@pytest.mark.parametrize("name", ["kv_source_layers", "attention", "extra.kv_window"])
def test_an_ignored_field_is_read_as_if_it_were_not_there(name):
    fields = {"kv_source_layers": [0, 0, 2, 2], "attention": {"kv": {"count": 2}}, "extra": {"kv_window": 4}}
    config = {**LLAMA, name.partition(".")[0]: fields[name.partition(".")[0]]}
    with pytest.raises(ConfigError, match="--ignore FIELD"):
        of(config)
    for whole in (config, {"model_type": "llava", "text_config": config}):
        found = size.from_config(whole, "mine", [name])
        assert set(found.ignored) == {name}
        assert size.of(found).layers == of(LLAMA).layers


def test_layer_types_that_are_not_known_can_be_ignored():
    config = {**LLAMA, "layer_types": ["full_attention", "gated_slot_attention"] * 2}
    with pytest.raises(ConfigError, match=r"'gated_slot_attention' is not known here .*--ignore FIELD"):
        of(config)
    assert size.of(size.from_config(config, "mine", ["layer_types"])).layers == of(LLAMA).layers


def test_a_field_that_is_not_there_cannot_be_ignored():
    with pytest.raises(ConfigError, match="mine: --ignore kv_heads: there is no such field"):
        size.from_config(LLAMA, "mine", ["kv_heads"])
    deep = {"text_config": LLAMA}
    for _ in range(800):
        deep = {"text_config": deep}
    with pytest.raises(ConfigError, match="--ignore kv_heads"):
        size.from_config(deep, "mine", ["kv_heads"])


def test_a_true_head_dimension_of_another_size_is_refused():
    other = {
        "attention_type": "sliding_attention", "num_key_value_heads": 2, "head_dim": 16, "true_head_dim": 12,
    }  # fmt: skip
    config = {
        **LLAMA, "model_type": "step3p5", "sliding_window": 8, "layer_types": ["sliding_attention"] * 4,
        "attention_other_setting": other,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="true_head_dim is 12"):
        of(config)


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"index_topk_freq": 4}, [0, 1, 5]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 0}, [2, 5]),
        ({"index_topk_pattern": "FSSFSS"}, [0, 3]),
        ({"index_topk_pattern": "FSSFSS", "indexer_types": ["full"] * 6}, list(range(6))),
    ],
)
def test_layers_that_use_an_earlier_indexer_keep_no_index_keys(more, own):
    config = {**MLA, "num_hidden_layers": 6, "index_head_dim": 8, "index_topk": 16, **more}
    layers = size.from_config(config, "mine").layers
    assert [number for number, layer in enumerate(layers) if len(layer) == 2] == own


@pytest.mark.parametrize("sources", [[1, 0, 2], [0, 0, 1], [0, 1, 9], [0, 1]])
def test_layers_that_share_name_an_earlier_one_with_kv_of_its_own(sources):
    with pytest.raises(ConfigError, match="kv_source_layers is"):
        of({**MLA, "kv_source_layers": sources})
    (latents, shared) = of({**MLA, "kv_source_layers": [0, 0, 2]}).layers
    assert (latents.count, shared.count, shared.cache.kind) == (2, 1, "shared")


def ints(bits: int) -> dict:
    return {"num_bits": bits, "type": "float"}


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": ints(8)}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": ints(4)}}}, "fp4"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": ints(8)}, "bf16"),
        ({"quant_method": "fp8", "kv_cache_scheme": ints(4)}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache": ints(4), "quant_algo": "FP8"}}, "fp8"),
        ({"config_groups": {"group_0": {"weights": ints(8), "input_activations": ints(4)}}}, "fp8"),
        ({"config_groups": {"group_0": {"weights": None, "output_activations": ints(8)}}}, "bf16"),
    ],
)
def test_the_format_of_the_weights_is_not_that_of_kv_or_activations(quantization, weights):
    assert size.from_config({**LLAMA, "quantization_config": quantization}, "mine").weights == weights


@pytest.mark.parametrize("ignore", [(), ("id2label.0",)])
def test_fields_of_an_object_may_be_numbered(ignore):
    found = size.from_config({**LLAMA, "id2label": {0: "no", 1: "yes"}}, "mine", ignore)
    assert list(found.ignored) == list(ignore)
