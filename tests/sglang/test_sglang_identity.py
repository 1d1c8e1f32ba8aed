"""Which engines share pages: the same model, settings, release and layout. Anything else is a miss, or is refused."""

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import PAGE, Engine, checkpoint, engine, mha, mla, published, resolved
from sglang.srt.runtime_context import get_context
from tests.refusals import refuses

from kvtier.connect.sglang import checkpoint_reads, identity, weight_updates
from kvtier.connect.sglang.identity import SETTINGS, identify, leaves
from kvtier.errors import ConfigError

pytestmark = pytest.mark.sglang_core

PROMPT = range(4 * PAGE)
Start = Callable[..., Engine]


def stored(store: Path, model: Path, **pools: Any) -> int:
    """Tokens that an engine stores."""
    with published(model), engine({"tiers": [f"directory:{store}"]}, **pools) as first:
        return first.backup(PROMPT)[0]


def hit(store: Path, model: Path, changes: dict[str, object] | None = None, **pools: Any) -> int:
    """Tokens that another engine finds."""
    with published(model):
        resolved(**(changes or {}))
        with engine({"tiers": [f"directory:{store}"]}, **pools) as second:
            found = second.prefetch(PROMPT)
            assert found.completed == found.hit
            return found.hit


@pytest.mark.parametrize(
    ("changes", "is_shared"),
    [
        ({}, True),
        ({"use_cache": False}, True),
        ({"content": b"others!"}, False),
        ({"rope_theta": 5e5}, False),
    ],
    ids=["a copy", "a field that changes no KV", "weights", "rope theta"],
)
def test_a_copy_of_the_model_shares_and_another_model_does_not(
    tmp_path: Path, changes: dict[str, Any], is_shared: bool
) -> None:
    """Whatever the path."""
    model = checkpoint(tmp_path / "a")
    assert stored(tmp_path / "store", model) == len(PROMPT)
    for place in (tmp_path / "b", model):
        assert hit(tmp_path / "store", checkpoint(place, **changes)) == (len(PROMPT) if is_shared else 0)


def test_another_setting_is_a_miss(tmp_path: Path) -> None:
    """Each server argument that changes KV has a part in the fingerprint."""
    model = checkpoint(tmp_path / "model")
    assert stored(tmp_path / "store", model) == len(PROMPT)
    assert hit(tmp_path / "store", model, {"kv_cache_dtype": "another"}) == 0
    digests = {digest(model)}
    for name in sorted(set(SETTINGS) - {"trust_remote_code"}):
        digests.add(digest(model, {name: "another"}))
    assert len(digests) == len(SETTINGS)


def digest(model: Path, changes: dict[str, object] | None = None) -> bytes:
    """An engine's fingerprint."""
    with published(model):
        resolved(**(changes or {}))
        return identify(leaves(get_context()), "0.5.23")[0].digest


def test_the_environment_is_identified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables decide the order of bytes in a page, too; those of logs, ports and secrets do not."""
    model, file = checkpoint(tmp_path / "model"), tmp_path / "scales.json"
    digests = {digest(model)}
    for name in (
        "SGLANG_LOG_MS",
        "SGLANG_RUN_ID",
        "SGLANG_CPU_OMP_THREADS_BIND",
        "SGLANG_IS_FIRST_RANK_ON_NODE",
        "SGLANG_HICACHE_TMA_TRANSFER",
        "SGLANG_ADMIN_API_KEY",
        "PATH_OF_IT",
    ):
        monkeypatch.setenv(name, "1")
    assert {digest(model)} == digests
    for name, value in (("SGLANG_USE_HND_KVCACHE", "1"), ("SGLANG_OPT_DSV41_BF16_INDEX_LOGITS", "1")):
        monkeypatch.setenv(name, value)
        digests.add(digest(model))
    monkeypatch.setenv("SGLANG_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    for content in ("{}", '{"bits": 4}'):
        file.write_text(content)
        digests.add(digest(model))
    assert len(digests) == 5
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "mine")
    with pytest.raises(ConfigError, match="SGLANG_EXTERNAL_MODEL_PACKAGE"):
        digest(model)


def test_another_page_size_is_a_miss(tmp_path: Path) -> None:
    """Pages of 16 and of 8 tokens."""
    model = checkpoint(tmp_path / "model")
    assert stored(tmp_path / "store", model) == len(PROMPT)
    assert hit(tmp_path / "store", model, pools=mha("page_first", page=8)) == 0


def test_a_changed_adapter_is_a_miss(tmp_path: Path) -> None:
    """SGLang makes the id of an adapter of its name and path, whatever its files hold."""
    model, adapter = checkpoint(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"a" * 100)
    named = {"lora_paths": [SimpleNamespace(lora_id="1234", lora_name="it", lora_path=str(adapter))]}
    settings = {"tiers": [f"directory:{tmp_path / 'store'}"]}
    with published(model):
        resolved(**named)
        with engine(settings) as first:
            assert first.backup(PROMPT)[0] == len(PROMPT)
    assert hit(tmp_path / "store", model, named) == len(PROMPT)
    (adapter / "adapter_model.safetensors").write_bytes(b"b" * 100)
    assert hit(tmp_path / "store", model, named) == 0


def rewritten(path: Path) -> None:
    """Other bytes in the same file, of the same size and with the same modification time."""
    about = path.stat()
    path.write_bytes(path.read_bytes().swapcase())
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def moved(path: Path) -> None:
    """As rsync and downloads replace a file."""
    new = path.with_name("new")
    new.write_bytes(path.read_bytes().swapcase())
    new.replace(path)


def linked(path: Path) -> None:
    """A link that is made to point to another file."""
    other = path.parent / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(path.read_bytes().swapcase())
    path.unlink()
    path.symlink_to(other)


def added(path: Path) -> None:
    """A further file, which the next engine will read instead."""
    path.with_name("model-00001-of-00001.safetensors").write_bytes(b"others")


def untouched(path: Path) -> None:
    """However new a file is, its age decides nothing."""
    path.read_bytes()


@pytest.mark.parametrize(
    ("replace", "name"),
    [
        *((replace, "model.safetensors") for replace in (untouched, rewritten, moved, linked, added)),
        (moved, "config.json"),
        (moved, "hf_quant_config.json"),
        (moved, "adapter/adapter_model.safetensors"),
        (moved, "draft/model.safetensors"),
        (moved, "modeling_own.py"),
    ],
)
def test_files_that_change_while_sglang_starts_name_nothing(
    replace: Callable[[Path], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang has read the old ones, and kvtier would digest the new ones: another engine would get wrong KV."""
    model = checkpoint(tmp_path / "model")
    (model / "hf_quant_config.json").write_text("{}")
    (model / "modeling_own.py").write_text("# code")
    checkpoint(model / "draft")
    (model / "adapter").mkdir()
    (model / "adapter" / "adapter_model.safetensors").write_bytes(b"a" * 100)
    named = {
        "lora_paths": [SimpleNamespace(lora_id="1234", lora_name="it", lora_path=str(model / "adapter"))],
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(model / "draft"),
        "trust_remote_code": True,
    }
    is_same = replace is untouched
    with published(model):
        resolved(**named)
        replace(model / name)
        with engine({"tiers": [f"directory:{tmp_path / 'store'}"]}) as first:
            assert first.backup(PROMPT)[0] == (len(PROMPT) if is_same else 0)
            assert first.prefetch(PROMPT).hit == (len(PROMPT) if is_same else 0)
    assert ("has changed since SGLang began to read it" in caplog.text) != is_same
    assert hit(tmp_path / "store", model, named) == (len(PROMPT) if is_same else 0)


def test_a_model_that_is_downloaded_is_shared_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a download wrote is no difference."""
    place = tmp_path / "hub" / "model"
    monkeypatch.setattr(identity, "local_folder", lambda *_: place if place.exists() else None)
    with published(checkpoint(tmp_path / "settings")):
        resolved(model_path="somebody/model")
        checkpoint(place)
        with engine({"tiers": [f"directory:{tmp_path / 'store'}"]}) as first:
            assert first.backup(PROMPT)[0] == len(PROMPT)


def test_without_the_plug_in_nothing_is_stored(
    server: None, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has looked at the files before SGLang read them."""
    monkeypatch.setattr(checkpoint_reads, "_before", [])
    engine = start()
    assert (engine.backup(PROMPT)[0], engine.prefetch(PROMPT).hit) == (0, 0)
    assert "has not loaded kvtier's plug-in" in caplog.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_path": ""}, "names no model"),
        ({"model_path": "dummy"}, "names no model"),
        ({"model_path": "nobody/nothing"}, "not in a local folder"),
        ({"load_format": "dummy"}, "load_format = 'dummy'"),
        ({"dllm_algorithm": "LLaDA"}, "depends on later tokens"),
        ({"kt_weight_path": "somewhere"}, "cannot identify"),
        ({"weight_cache_mode": "client"}, "weight_cache_mode = 'client'"),
        ({"forward_hooks": [{"name": "mine"}]}, "cannot identify"),
        ({"custom_weight_loader": ["mine.load"]}, "cannot identify"),
        ({"lora_paths": [SimpleNamespace(lora_id="1", lora_path="missing/adapter")]}, "files of adapter"),
    ],
)
def test_an_engine_that_cannot_be_identified_is_refused(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    """Nothing is stored under a guess."""
    with published(checkpoint(tmp_path / "model")):
        resolved(**changes)
        with pytest.raises(ConfigError, match=expected), engine({"tiers": [f"directory:{tmp_path / 'store'}"]}):
            pass
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
@pytest.mark.parametrize("loss", ["none", "int4"])
def test_a_class_is_refused_where_kv_goes_to_engines_of_an_unknown_class(tmp_path: Path, loss: str, mode: str) -> None:
    """The other engine would store what it computes from lossy KV under exact names."""
    settings = {"tiers": [f"directory:{tmp_path / 'store'}"], "store.loss": loss}
    with published(checkpoint(tmp_path / "model")):
        resolved(disaggregation_mode=mode)
        refusal = refuses("store.loss", f"disaggregation_mode = {mode!r}", value="int4", allowed="none")
        with (
            refusal if (loss != "none" and mode != "null") else nullcontext(),
            engine(settings, pools=mha("page_first")) as first,
        ):
            assert first.backup(PROMPT)[0] == len(PROMPT)


def test_another_release_is_refused(server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is allowed; and then its pages are its own."""
    monkeypatch.setattr("kvtier.connect.sglang.storage.installed", lambda: "0.5.24")
    settings = {"tiers": [f"directory:{tmp_path / 'store'}"]}
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.24 is not supported"), engine(settings):
        pass
    with engine({**settings, "sglang": {"unsupported": "allow"}}) as newer:
        assert newer.backup(PROMPT)[0] == len(PROMPT)
    monkeypatch.undo()
    with engine(settings) as older:
        assert older.prefetch(PROMPT).hit == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "tiers"),
        ({"tiers": ["directory:{store}"], "interface_v1": 0}, "interface_v1"),
        ({"tiers": ["directory:{store}"], "tirs": 1}, "tirs"),
        ({"tiers": ["directory:{store}"], "host": {"staging_bytes": "many"}}, "host.staging_bytes"),
    ],
)
def test_wrong_settings_are_refused(server: None, tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    """With the name of the value and of the option that gave it."""
    given = {**settings}
    if "tiers" in given:
        given["tiers"] = [f"directory:{tmp_path / 'store'}"]
    with refuses(expected, origin="--hicache-storage-backend-extra-config"), engine(given):
        pass


@pytest.mark.parametrize("what", ["class", "layout"])
def test_an_unknown_pool_is_refused(server: None, tmp_path: Path, what: str) -> None:
    """A class of the same bytes, which might mean others; a layout that SGLang has added."""
    device, host = mha("page_first")
    if what == "class":
        host.__class__ = type("MyHostPool", (type(host),), {"__module__": "sglang.mine"})
    else:
        host.layout = "page_spiral"
    settings = {"tiers": [f"directory:{tmp_path / 'store'}"]}
    refused = pytest.raises(ConfigError, match=r"sglang\.mine\.MyHostPool|page_spiral")
    with refused, engine(settings, pools=(device, host)):
        pass
    assert not (tmp_path / "store").exists()


def test_a_private_tier_of_a_replicated_cache_is_refused(model: Path, tmp_path: Path) -> None:
    """SGLang lets rank 0 write for all ranks, and rank 1 would never find it."""
    settings = {"tiers": [f"disk:{tmp_path / 'store'}"]}
    refused = pytest.raises(ConfigError, match="lets one rank write the KV of this model for all")
    with published(model, ranks=(1, 2)), refused, engine(settings, pools=mla("page_first")):
        pass


def test_replaced_weights_end_the_use(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang replaces weights in place: from then on nothing is stored or found, until the process ends."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    engine = start()
    assert engine.backup(PROMPT)[0] == len(PROMPT)
    assert engine.prefetch(PROMPT).completed == len(PROMPT)
    try:
        with caplog.at_level(logging.ERROR), pytest.raises(AttributeError):
            WeightUpdater.update_weights_from_tensor(SimpleNamespace(), [])
        assert "weights were replaced" in caplog.text
        assert engine.prefetch(PROMPT).hit == 0
        assert engine.backup(range(700, 700 + PAGE))[0] == 0
        with pytest.raises(ConfigError, match="weights were replaced"):
            start()
    finally:
        WeightUpdater._kvtier_has_changed_weights = False  # the process goes on here


def test_weights_that_were_replaced_before_the_backend_is_attached_are_noticed(start: Start) -> None:
    """It may be attached to a running server: the checkpoint does not identify the weights any more."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    try:
        with pytest.raises(AttributeError):
            WeightUpdater.update_weights_from_tensor(SimpleNamespace(), [])
        with pytest.raises(ConfigError, match="weights were replaced"):
            start()
    finally:
        WeightUpdater._kvtier_has_changed_weights = False  # the process goes on here


def test_methods_that_replace_weights_are_known() -> None:
    """A method that SGLang adds must be watched, too."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    words = ("update", "load_weights", "receive")
    found = {name for name in vars(WeightUpdater) if any(word in name for word in words) and not name.startswith("_")}
    harmless = {"init_weights_update_group", "destroy_weights_update_group", "end_weight_update", "update_model_fields"}
    assert found - harmless == set(weight_updates.UPDATES)


def test_pieces_lie_in_the_pool(start: Start) -> None:
    """The memory that is read and written is the pool's, at the page's place."""
    engine = start()
    engine.fill(1)
    pool = engine.storage._pools["kv"]
    (first,) = pool.pieces(torch.arange(PAGE, 2 * PAGE))
    assert b"".join(bytes(piece) for piece in first) == bytes(
        engine.host.get_data_page(PAGE).contiguous().view(torch.uint8).numpy()
    )
