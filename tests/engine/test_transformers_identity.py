"""A model that has changed in any way that matters shares no KV with what it was; one that has not, does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attaching import Attach
from tiny_transformers import batch, gemma3, llama, mistral, tokens
from transformers import LlamaForCausalLM

from kvtier.connect.transformers.identity import ModelWatch, fingerprint, fixed_rope_tokens, weights_digest
from kvtier.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
PROMPT = batch(tokens(100, 1))[0]


def digest(model: Any, **settings: Any) -> bytes:
    return fingerprint(model, weights_digest(model, None, None).digest, **settings).digest


def fill(attached: Attach, model: Any, **settings: Any) -> None:
    kv = attached(model, **settings)
    kv.generate(PROMPT, **GREEDY)
    assert kv.last.stored_chunks
    kv.close()


def restored(attached: Attach, model: Any, **settings: Any) -> int:
    kv = attached(model, **settings)
    plain = model.generate(PROMPT, **GREEDY)
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    tokens_restored = kv.last.restored_tokens
    kv.close()
    return tokens_restored


def test_the_same_model_built_again_is_the_same(attached: Attach) -> None:
    fill(attached, llama())
    assert restored(attached, llama()) == 96


def test_a_saved_model_is_the_model_that_was_saved(attached: Attach, tmp_path: Path) -> None:
    for make in (llama, gemma3):
        model = make()
        model.save_pretrained(tmp_path / make.__name__)
        loaded = type(model).from_pretrained(tmp_path / make.__name__)
        assert digest(loaded) == digest(model)


@pytest.mark.parametrize(
    ("make", "fields", "dtype"),
    [
        (llama, {"seed": 8}, torch.float32),
        (llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, torch.float32),
        (llama, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, torch.float32),
        (llama, {"rms_norm_eps": 1e-4}, torch.float32),
        (llama, {"attn_implementation": "eager"}, torch.float32),
        (mistral, {"sliding_window": 32}, torch.float32),
        (mistral, {}, torch.bfloat16),
    ],
    ids=["weights", "rope theta", "rope scaling", "norm", "attention", "window", "dtype"],
)
def test_a_model_that_differs_shares_nothing(
    make: Any, fields: dict[str, Any], dtype: torch.dtype, attached: Attach
) -> None:
    fill(attached, make())
    assert restored(attached, make(**fields).to(dtype)) == 0
    assert restored(attached, make()) == 96, "and disturbs nothing"


def test_a_revision_keeps_apart_what_the_weights_do_not(attached: Attach) -> None:
    model = llama()
    fill(attached, model, revision="a")
    assert restored(attached, model, revision="b") == 0
    assert restored(attached, model, revision="a") == 96


def test_names_and_dropout_and_end_tokens_do_not_count() -> None:
    model = llama()
    before = digest(model)
    for field, value in {
        "_name_or_path": "elsewhere",
        "eos_token_id": 9,
        "use_cache": False,
        "attention_dropout": 0.5,
    }.items():
        setattr(model.config, field, value)
    assert digest(model) == before
    model.config.rms_norm_eps = 0.5
    assert digest(model) != before


@pytest.mark.parametrize("way", ["in place", "through data", "replaced", "one layer"])
def test_weights_changed_under_an_attachment_are_noticed(way: str, kv: Any) -> None:
    kv.generate(PROMPT, **GREEDY)
    before = kv.fingerprint
    parameter = kv.model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        if way == "in place":
            parameter.mul_(1.5)
        elif way == "replaced":
            kv.model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(parameter * 1.5)
        elif way == "one layer":
            kv.model.model.layers[2].mlp.down_proj.weight[3, 4] += 0.5
        else:
            for each in kv.model.parameters():
                each.data = each.data * 1.0
                each.data.mul_(1.5)
    plain = kv.model.generate(PROMPT, **GREEDY)
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    assert kv.last.restored_tokens == 0
    assert kv.last.uncached_reason == ""
    assert kv.fingerprint != before
    assert torch.equal(kv.generate(PROMPT, **GREEDY), plain)
    assert kv.last.restored_tokens == 96


def test_a_silent_change_of_all_weights_shows_in_the_samples() -> None:
    model = llama()
    watch = ModelWatch(model)
    assert not watch.has_changed()
    versions = [parameter._version for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    assert [parameter._version for parameter in model.parameters()] == versions, "the version does not tell"
    assert watch.has_changed()


def test_a_model_that_only_computes_has_not_changed() -> None:
    for model in (
        llama(),
        llama(rope_parameters=LONGROPE | {"rope_theta": 1e4, "original_max_position_embeddings": 64}),
    ):
        watch = ModelWatch(model)
        model.generate(PROMPT, **GREEDY)
        assert not watch.has_changed()
    with torch.no_grad():
        model.lm_head.weight[3, 4] = float("nan")
    assert watch.has_changed()
    assert not ModelWatch(model).has_changed(), "not a number is no change"


def test_a_changed_model_that_cannot_be_served_is_computed_without_the_cache(
    kv: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(_: Any) -> Any:
        raise UnsupportedModelError("planned")

    monkeypatch.setattr("kvtier.connect.transformers.open.inspect_cache", refuse)
    with torch.no_grad():
        kv.model.lm_head.weight.mul_(1.5)
    for reason in ("kvtier failed: UnsupportedModelError: planned", "cannot be served any more: planned"):
        assert torch.equal(kv.generate(PROMPT, **GREEDY), kv.model.generate(PROMPT, **GREEDY))
        assert reason in kv.last.uncached_reason


class Adapted(torch.nn.Linear):
    """An adapter layer as the peft library makes them, as far as its state goes."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False)
        self.weight = inner.weight
        self.lora = torch.nn.Parameter(torch.randn_like(inner.weight), requires_grad=False)
        self.active_adapters = ["a"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False
        self.scaling = {"a": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = super().forward(x)
        if self.disable_adapters or not self.active_adapters:
            return plain
        return plain + self.scaling["a"] * x @ self.lora.T


def test_an_adapter_that_is_switched_off_or_scaled_is_another_model(attached: Attach) -> None:
    torch.manual_seed(1)
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.v_proj = Adapted(attention.v_proj)
    kv = attached(model)
    kv.generate(PROMPT, **GREEDY)
    for field, value in (("disable_adapters", True), ("disable_adapters", False), ("scaling", {"a": 0.7})):
        setattr(attention.v_proj, field, value)
        assert torch.equal(kv.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
        assert kv.last.restored_tokens == (96 if (field, value) == ("disable_adapters", False) else 0)


def test_scaling_that_depends_on_the_length_is_told_by_the_settings() -> None:
    """Its frequencies move while the model computes, so that they cannot be digested."""
    rope = LONGROPE | {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    assert digest(llama(rope_parameters=rope)) == digest(llama(rope_parameters=rope))
    assert digest(llama(rope_parameters=rope)) != digest(llama(rope_parameters=rope | {"long_factor": [4.0] * 6}))


def test_a_named_checkpoint_is_digested_instead_of_the_tensors(
    attached: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    llama().save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    kv = attached(model, checkpoint=tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert kv.weights.total_bytes == size
    kv.generate(PROMPT, **GREEDY)
    kv.close()
    assert restored(attached, model, checkpoint=tmp_path / "model") == 96
    # A change in memory makes the checkpoint a false witness.
    kv = attached(model, checkpoint=tmp_path / "model")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(0.1)
    kv.generate(PROMPT, **GREEDY)
    assert kv.last.restored_tokens == 0
    with pytest.raises(ConfigError, match="cannot be read"):
        attached(model, checkpoint=tmp_path / "nowhere")


def test_the_cost_of_the_digest_is_told(kv: Any) -> None:
    # Tied or not, each tensor once; and the inverse frequencies, which no checkpoint has.
    assert kv.weights.hashed_bytes >= sum(parameter.nbytes for parameter in kv.model.parameters())
    assert kv.weights.seconds > 0


def test_weights_that_are_not_in_memory_are_refused(attached: Attach) -> None:
    model = llama()
    with pytest.raises(UnsupportedModelError, match="checkpoint=PATH"):
        weights_digest(model.to("meta"), None, None)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [3.0] * 6, "factor": 8.0}


@pytest.mark.parametrize(
    ("rope", "maximum"),
    [
        (LONGROPE | {"rope_theta": 10000.0, "original_max_position_embeddings": 64}, 2048),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 64),
    ],
    ids=["longrope", "dynamic"],
)
def test_positions_that_depend_on_the_length_serve_short_texts_only(
    rope: dict[str, Any], maximum: int, attached: Attach
) -> None:
    model = llama(rope_parameters=rope, max_position_embeddings=maximum)
    assert fixed_rope_tokens(model) == 64
    kv = attached(model)
    text = tokens(140, 1)
    for length in (40, 60, 90, 140):
        input_ids, _ = batch(text[:length])
        plain = model.generate(input_ids, **GREEDY)
        output = kv.generate(input_ids, **GREEDY)
        # Beyond the length, "dynamic" frequencies depend on the calls before: the library itself repeats nothing.
        assert length > 40 or torch.equal(output, plain)
        assert kv.last.restored_tokens == 0
        assert ("the text may reach" in kv.last.uncached_reason) == (length > 40)
    short, _ = batch(text[:40])
    kv.generate(short, **GREEDY)
    assert kv.last.restored_tokens == 32
    assert fixed_rope_tokens(llama()) is None
