"""An engine that cannot be served correctly is refused when it starts, with what was found and what to do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.refusals import refuses
from tests.vllm_config import vllm_config

from kvtier.connect.sglang.identity import REFUSED, REFUSED_VARIABLES
from kvtier.connect.vllm import engine_setup, support
from kvtier.connect.vllm.tiering import engine_setup as tiering_setup
from kvtier.errors import UnsupportedModelError

TOP = Path(__file__).parents[3]
CONNECT = TOP / "src" / "kvtier" / "connect"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"parallel__tensor_parallel_size": 8, "parallel__decode_context_parallel_size": 4},
        {"parallel__prefill_context_parallel_size": 2},
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
        ({"parallel__nnodes": 2}, "2 nodes is not supported.* Use one node per engine"),
        (
            {"model__is_encoder_decoder": True},
            "encoder-decoder models are not supported.* Serve the model without kvtier",
        ),
        ({"model__runner_type": "pooling"}, "runner 'pooling' is not supported.* Use runner 'generate'"),
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
    assert support.transfer_warnings(transfer, "kv_both", has_shared=False) == []
    transfer.kv_load_failure_policy = "fail"
    (result,) = support.transfer_warnings(transfer, "kv_both", has_shared=False)
    assert '"kv_load_failure_policy": "recompute"' in result


@pytest.mark.parametrize(
    ("role", "policy"), [("kv_producer", "back"), ("kv_producer", "selective"), ("kv_both", "back")]
)
def test_a_prefill_engine_must_store_at_once(monkeypatch, role, policy):
    config = vllm_config()
    config.kv_transfer_config.kv_role = role
    config.kv_transfer_config.kv_connector_extra_config = {"store.write_policy": policy}
    monkeypatch.setattr(engine_setup.installed_engine, "check_release", lambda: "0.32.0")
    if role == "kv_both":
        assert engine_setup.check_start(config)[1] == "0.32.0"
        return
    with refuses("store.write_policy", "kv_producer", value=repr(policy), allowed="'through'"):
        engine_setup.check_start(config)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_prefill_or_decode_engine_without_a_shared_tier_is_warned_of(role):
    transfer = vllm_config().kv_transfer_config
    (result,) = support.transfer_warnings(transfer, role, has_shared=False)
    assert result.startswith(f"kv_role is '{role}', but no other engine")
    assert support.transfer_warnings(transfer, role, has_shared=True) == []


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


@pytest.mark.parametrize("way", ["pipeline", "decode_context", "prefill_context"])
def test_stages_and_shares_of_tokens_below_vllms_offloading_are_refused(monkeypatch, tmp_path, way):
    monkeypatch.setattr(tiering_setup.installed_engine, "check_release", lambda: "0.32.0")
    config = vllm_config(**{f"parallel__{way}_parallel_size": 2})
    with pytest.raises(
        UnsupportedModelError, match=f"{way}_parallel_size = 2 below vLLM's offloading is not supported"
    ):
        tiering_setup.setup_of({"tiers": [f"directory:{tmp_path}"]}, None, config, None, 1 << 20, [])


@pytest.mark.parametrize("loss", ["int4", "k8v4", "none"])
def test_a_class_below_vllms_offloading_is_refused(monkeypatch, tmp_path, loss):
    """vLLM passes each chunk of its host memory to all secondary tiers, under names that lack the class."""
    monkeypatch.setattr(tiering_setup.installed_engine, "check_release", lambda: "0.32.0")
    config = vllm_config(parallel__pipeline_parallel_size=2)
    settings = {"tiers": [f"directory:{tmp_path}"], "store.loss": loss}
    with (
        pytest.raises(UnsupportedModelError, match="pipeline_parallel_size")  # which is checked next
        if loss == "none"
        else refuses("store.loss", "does not define the arrangement", value=loss, allowed="kvtier as the connector")
    ):
        tiering_setup.setup_of(settings, None, config, None, 1 << 20, [])


@pytest.mark.parametrize("others", [["NixlConnector"], ["LMCacheConnectorV1"], []])
def test_a_class_is_refused_beside_another_connector(others):
    support.check_alone(others, "none")
    if not others:
        support.check_alone(others, "int4")
        return
    with refuses(
        "store.loss",
        f"{others[0]} beside kvtier",
        value="int4",
        allowed="none; or any class with kvtier as the only connector",
    ):
        support.check_alone(others, "int4")


TABLE = (TOP / "docs" / "internals" / "shapes.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.count("|") == 5]
SOURCES = {
    "vLLM": ("vllm/support.py", "vllm/geometry.py", "vllm/tiering/engine_setup.py"),
    "SGLang": ("sglang/storage.py", "sglang/host_pools.py", "sglang/identity.py"),
    "Transformers": ("transformers/support.py",),
}
OTHER = (
    *(
        "store.chunk_tokens",
        "sleep_frees_host",
        "kv_role",
        "store.write_policy",
        "no tier is configured",
        "interface_v1",
    ),
    *("prefix_caching_hash_algo", "names no model", "in a local folder", "not files of a folder", "MODELSCOPE"),
    *("has no server argument", "cannot be read as JSON", "contains no description of its model"),
    *("published no server arguments", "no host pool with bytes"),
)
"""Refusals that are not about a shape."""


def words_of(node: ast.expr | None, names: dict[str, str]) -> str:
    """The text of an expression; ``…`` for what is not known before it runs."""
    if isinstance(node, ast.JoinedStr):
        return "".join(words_of(it, names) for it in node.values)
    if isinstance(node, ast.FormattedValue):
        return words_of(node.value, names)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return names.get(node.id, "…") if isinstance(node, ast.Name) else "…"


def refusals(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """The words of each refusal in a part of a source file; those in a loop over constants once for each of them."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and isinstance(node.target, ast.Tuple):
        for row in node.iter.elts:
            values = {it.id: words_of(value, {}) for it, value in zip(node.target.elts, row.elts, strict=True)}
            for inner in node.body:
                yield from refusals(inner, names | values)
        return
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        names[node.targets[0].id] = words_of(node.value, names)
    is_raised = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    call = node.exc if is_raised else node
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {
        "_refuse_if",
        *(("ConfigError", "UnsupportedModelError") if is_raised else ()),
    }:
        setting = [it.value for it in call.keywords if it.arg == "setting"]
        yield ": ".join(words_of(it, names) for it in (*setting, *call.args[-1:]))
        return
    for inner in ast.iter_child_nodes(node):
        yield from refusals(inner, names)


@pytest.mark.parametrize("engine", SOURCES)
def test_the_table_of_shapes_names_every_refusal_and_nothing_else(engine):
    words = [
        found
        for file in SOURCES[engine]
        for found in refusals(ast.parse((CONNECT / file).read_text(encoding="utf-8")), {})
        if found.strip("…: ") and not any(it in found for it in OTHER)
    ]
    assert len(words) > 5
    refused = [row for row in ROWS if row[1:3] == [engine, "refused"]]
    named = [it for row in refused for it in re.findall(r"`([^`]+)`", row[3])]
    assert [it for it in words if not any(name in it for name in named)] == []
    assert [name for name in named if not any(name in it for it in words)] == []
    for name in (*REFUSED, *REFUSED_VARIABLES) if engine == "SGLang" else ():
        assert f"`{name}`" in TABLE


def test_each_shape_that_runs_names_its_tests():
    ran = [row for row in ROWS if row[1] in SOURCES and row[2] != "refused"]
    assert len(ran) > 10
    for row in ran:
        files = row[3].split(", ")
        assert all((TOP / it).is_file() and re.fullmatch(r"tests/[\w/]+\.py", it) for it in files), row
