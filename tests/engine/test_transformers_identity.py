"""A model that has changed in any way that matters shares no KV with what it was; one that has not, does."""

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attaching import Attach
from tiny_transformers import batch, gemma3, llama, mistral, tokens
from transformers import LlamaForCausalLM

from kvtier.connect.transformers import identity
from kvtier.connect.transformers.identity import ModelWatch, fingerprint, fixed_rope_tokens, weights_digest
from kvtier.connect.transformers.weight_comparison import difference
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.keys.weights import checkpoint_files, digest_files

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
    for reason in ("kvtier failed: planned", "can no longer be served: planned"):
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


def rewritten(path: Path, source: Path) -> None:
    """Other bytes in the same file, of the same size and with the same modification time."""
    about = path.stat()
    path.write_bytes(source.read_bytes())
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def moved(path: Path, source: Path) -> None:
    """As rsync and downloads replace a file."""
    new = path.with_name("new")
    shutil.copy(source, new)
    new.replace(path)


def linked(path: Path, source: Path) -> None:
    """As the cache of a hub does."""
    path.unlink()
    path.symlink_to(source)


@pytest.mark.parametrize("replaced", [rewritten, moved, linked])
def test_a_checkpoint_that_is_replaced_after_it_was_loaded_names_nothing(
    replaced: Callable[[Path, Path], None],
    attached: Attach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else the old weights' KV would have the new ones' name: a correct model then gets wrong tokens."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model, other = tmp_path / "model", tmp_path / "other"
    llama().save_pretrained(model)
    llama(seed=8).save_pretrained(other)
    loaded = copy.deepcopy(LlamaForCausalLM.from_pretrained(model))  # on a CPU the tensors are the file's pages
    replaced(model / "model.safetensors", other / "model.safetensors")
    fill(attached, loaded, checkpoint=model)
    assert "model.embed_tokens.weight has other values" in caplog.text
    assert restored(attached, LlamaForCausalLM.from_pretrained(model), checkpoint=model) == 0
    # The tensors in memory are named instead.
    assert restored(attached, loaded) == 96


@pytest.mark.parametrize("position", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_one_other_weight_is_enough(name: str, position: float, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    files = digest_files(checkpoint_files(tmp_path))
    assert not difference(model, files)
    weight = dict(model.named_parameters())[name].data.view(-1)
    weight[int(position * (weight.numel() - 1)) // 48 * 48] += 1.0
    assert difference(model, files) == f"{name} has other values"


def test_weights_of_another_type_and_tied_ones_are_those_of_the_files(tmp_path: Path) -> None:
    half, single = torch.bfloat16, torch.float32
    for stored, dtype, is_tied in ((single, half, False), (half, single, False), (single, torch.float16, True)):
        folder = tmp_path / f"{stored} {dtype}"
        llama(tie_word_embeddings=is_tied).to(stored).save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        assert loaded.dtype == dtype
        assert not difference(loaded, digest_files(checkpoint_files(folder)))


def test_a_base_model_s_files_are_compared_with_and_without_its_prefix(tmp_path: Path) -> None:
    model = llama()
    model.model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "whole")
    base, whole = (digest_files(checkpoint_files(tmp_path / name)) for name in ("base", "whole"))
    assert not difference(model.model, whole)
    assert not difference(model.model, base)
    assert difference(model, base) == "lm_head.weight is in none of the files"


def test_files_that_cannot_be_compared_name_nothing(tmp_path: Path) -> None:
    model = llama()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    files = digest_files(checkpoint_files(tmp_path))
    assert "contains no *.safetensors files" in difference(model, files)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert "the comparison failed" in difference(model, digest_files(checkpoint_files(tmp_path)))
    model.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    files = digest_files(checkpoint_files(tmp_path))
    assert not difference(model, files)
    (tmp_path / "model.safetensors").touch()
    assert "has changed during the comparison" in difference(model, files)
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.data.as_subclass(WithoutSlices))
    assert difference(model, files) == "the comparison failed: no slices"


class WithoutSlices(torch.Tensor):
    """Quantised and distributed tensors are subclasses, which support what they like."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            raise TypeError("no slices")
        return super().__torch_function__(function, types, args, kwargs)


def test_weights_that_nobody_can_identify_are_cached_in_host_memory_alone(
    attached: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(identity, "_content", refuse)
    for _ in range(2):
        kv = attached(model, checkpoint=tmp_path)
        for wanted in (0, 96):
            assert torch.equal(kv.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
            assert kv.last.restored_tokens == wanted
            assert kv.flush()
        kv.close()
    assert "KV is kept in host memory only" in caplog.text
    with pytest.raises(UnsupportedModelError):
        attached(model)


def refuse(name: str, tensor: torch.Tensor) -> memoryview:
    raise UnsupportedModelError(f"the bytes of weight {name!r} ({tensor.dtype}) cannot be read")


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
