"""An engine that cannot be served correctly is refused when it starts, with what was found and what to do."""

from types import SimpleNamespace

import pytest
from tests.vllm_config import vllm_config

from kvtier.connect.vllm import sides, support
from kvtier.errors import ConfigError, UnsupportedModelError


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"parallel__tensor_parallel_size": 8},
        {"cache__enable_prefix_caching": False},
        {"model__use_mla": True, "device__device_type": "cuda"},
        {"model__use_mla": True, "compilation__is_custom_op_enabled": lambda op: op != "rotary_embedding"},
        *(
            {"speculative_config": SimpleNamespace(method=method)}
            for method in ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
        ),
        *(
            {"speculative_config": SimpleNamespace(method=method), "num_prefill_lookahead_tokens": 1}
            for method in ("eagle", "eagle3", "mtp")
        ),
    ],
)
def test_engines_that_are_served(change):
    support.check_engine(vllm_config(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parallel__pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 is not supported. Use tensor"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size = 2 .* Set it to 1"),
        ({"parallel__prefill_context_parallel_size": 4}, "prefill_context_parallel_size = 4 .* Set it to 1"),
        ({"parallel__nnodes": 2}, "2 nodes is not supported.* Use one node per engine"),
        ({"model__is_encoder_decoder": True}, "encoder-decoder models are not supported.* Serve it without kvtier"),
        ({"model__runner_type": "pooling"}, "runner 'pooling' is not supported.* Use runner 'generate'"),
        ({"model__enable_sleep_mode": True}, "enable_sleep_mode is not supported.* Turn it off"),
        ({"weight_transfer_config": object()}, "weight_transfer_config is not supported.* Turn it off"),
        ({"attention__use_non_causal": True}, "non-causal attention is not supported"),
        ({"attention__hisparse_config": object()}, "HiSparse is not supported.* Turn it off"),
        ({"model__use_mla": True}, "MLA on a CPU .* --compilation-config .*-rotary_embedding"),
        ({"cache__use_replayssm": True}, "use_replayssm is not supported.* Turn it off"),
        *(
            ({"speculative_config": SimpleNamespace(method=method)}, f"decoding with '{method}'.* Use one of eagle")
            for method in ("draft_model", "dflash", "dspark", "extract_hidden_states", "a_new_one")
        ),
        (
            {"speculative_config": SimpleNamespace(method="eagle3", parallel_drafting=True)},
            "parallel_drafting is not supported.* Turn it off",
        ),
        (
            {
                "speculative_config": SimpleNamespace(method="mtp"),
                "num_prefill_lookahead_tokens": 3,
            },
            "'mtp' with several draft modules is not supported.* read 3 tokens ahead.* Set num_speculative_tokens to 1",
        ),
    ],
)
def test_engines_that_are_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        support.check_engine(vllm_config(**change))


def test_the_failure_policy_is_warned_of_by_name():
    transfer = vllm_config().kv_transfer_config
    assert support.warnings(transfer, "kv_both", has_shared=False) == []
    transfer.kv_load_failure_policy = "fail"
    (result,) = support.warnings(transfer, "kv_both", has_shared=False)
    assert '"kv_load_failure_policy": "recompute"' in result


@pytest.mark.parametrize(
    ("role", "policy"), [("kv_producer", "back"), ("kv_producer", "selective"), ("kv_both", "back")]
)
def test_a_prefill_engine_must_store_at_once(monkeypatch, role, policy):
    config = vllm_config()
    config.kv_transfer_config.kv_role = role
    config.kv_transfer_config.kv_connector_extra_config = {"store.write_policy": policy}
    monkeypatch.setattr(sides.installed, "check_engine", lambda: "0.32.0")
    if role == "kv_both":
        assert sides.check_start(config)[1] == "0.32.0"
        return
    with pytest.raises(ConfigError, match=f"store.write_policy = '{policy}'.*kv_producer.*allowed: 'through'"):
        sides.check_start(config)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_prefill_or_decode_engine_without_a_shared_tier_is_warned_of(role):
    transfer = vllm_config().kv_transfer_config
    (result,) = support.warnings(transfer, role, has_shared=False)
    assert result.startswith(f"kv_role is '{role}', but no other engine")
    assert support.warnings(transfer, role, has_shared=True) == []


def test_items_have_identifiers_of_their_content_unless_both_caches_are_off():
    settings = SimpleNamespace(mm_processor_cache_gb=0)
    assert support.has_content_identifiers(vllm_config(cache__enable_prefix_caching=False))
    assert support.has_content_identifiers(vllm_config(model__multimodal_config=settings))
    both_off = vllm_config(model__multimodal_config=settings, cache__enable_prefix_caching=False)
    assert not support.has_content_identifiers(both_off)


def test_the_length_at_which_vllm_stops_drafting_is_that_of_the_shorter_model():
    assert support.drafted_tokens(vllm_config()) > 1 << 40
    draft = SimpleNamespace(max_model_len=2048)
    settings = SimpleNamespace(method="eagle", draft_model_config=draft)
    config = vllm_config(speculative_config=settings, num_prefill_lookahead_tokens=1, num_speculative_tokens=3)
    assert support.drafted_tokens(config) == 2045
    draft.max_model_len = None
    assert support.drafted_tokens(config) == 4093
