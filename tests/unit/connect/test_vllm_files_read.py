"""What vLLM reads of a checkpoint while it starts is compared with what is identified later; differences are found."""

import copy
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm_config import vllm_config

from kvtier.connect.model_files import adapter_versions, checkpoint_digest
from kvtier.connect.vllm.checkpoint_reads import AdapterRead, AdaptersRead, doubt, look_early
from kvtier.connect.vllm.engine_hooks import watch_loaders

NAMES = ("config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "model"
    place.mkdir()
    for name in NAMES:
        (place / name).write_bytes(name.encode())
    return place


class Loaders:
    """vLLM's, with their classes made anew for each test."""

    def __init__(self) -> None:
        class Loader:
            def __init__(self, load_config: Any) -> None:
                self.load_config = load_config

            def _prepare_weights(self, model_name_or_path: str, subfolder: str | None = None) -> tuple[str, list[str]]:
                return model_name_or_path, [f"{model_name_or_path}/model-1.safetensors"]

            def load_weights(self, model: object, model_config: Any) -> None:
                self.loaded = model_config.model

        self.DefaultModelLoader = type("DefaultModelLoader", (Loader,), {})
        self.ShardedStateLoader = type("ShardedStateLoader", (Loader,), {})
        watch_loaders(self)


@pytest.fixture
def config(checkpoint):
    """An engine's configuration at the time that vLLM makes it."""
    made = vllm_config(checkpoint)
    look_early(made)
    return made


def read(config: Any, name: str = "") -> None:
    loader = Loaders().DefaultModelLoader(config.load_config)
    assert loader._prepare_weights(model_name_or_path=name or str(config.model_config.model))


def versions(checkpoint):
    return checkpoint_digest(checkpoint).versions


def test_files_that_stay_are_no_doubt_however_often_they_are_read(config, checkpoint):
    read(config)
    read(config)
    assert doubt(config, versions(checkpoint)) == ""


@pytest.mark.parametrize("name", NAMES)
def test_any_file_that_changes_between_load_and_digest_is_a_doubt(config, checkpoint, name):
    read(config)
    shutil.copy(checkpoint / name, checkpoint / "new")
    (checkpoint / "new").replace(checkpoint / name)
    assert doubt(config, versions(checkpoint)) == f"{checkpoint / name} changed while the engine started"


def test_settings_that_change_before_the_load_are_a_doubt(config, checkpoint):
    # vLLM reads them while it makes its configuration, such as those of a quantisation.
    (checkpoint / "config.json").write_text("{ }")
    read(config)
    assert "config.json changed" in doubt(config, versions(checkpoint))


def test_a_download_between_configuration_and_load_is_no_doubt_and_one_after_the_load_is(checkpoint):
    kept = checkpoint.with_name("kept")
    checkpoint.rename(kept)
    config = vllm_config(checkpoint)
    look_early(config)
    kept.rename(checkpoint)
    read(config)
    look_early(config)  # vLLM copies its configuration for a draft model
    assert doubt(config, versions(checkpoint)) == ""
    (checkpoint / "hub.json").touch()
    assert doubt(config, versions(checkpoint)) == "", "a tokenizer's, say"
    (checkpoint / "model-3.safetensors").touch()
    assert "model-3.safetensors appeared after vLLM had read" in doubt(config, versions(checkpoint))


def test_a_second_read_of_other_files_is_a_doubt(config, checkpoint):
    read(config)
    content = (checkpoint / "model-2.safetensors").read_bytes()
    (checkpoint / "model-2.safetensors").unlink()
    (checkpoint / "model-2.safetensors").write_bytes(content)
    read(config)  # as for the layers of a draft model
    assert "model-2.safetensors changed" in doubt(config, versions(checkpoint))


def test_files_that_are_read_and_not_identified_are_a_doubt(config, checkpoint, tmp_path):
    other = tmp_path / "tower"
    shutil.copytree(checkpoint, other)
    read(config)
    read(config, str(other))
    assert f"vLLM also reads weights of {other}" in doubt(config, versions(checkpoint))


def test_trusted_code_is_seen_although_vllm_did_not_import_the_connector_early(checkpoint):
    (checkpoint / "model.py").write_text("1")
    config = vllm_config(checkpoint)
    read(config)
    digested = checkpoint_digest(checkpoint, is_code_trusted=True).versions
    assert doubt(config, digested) == ""
    (checkpoint / "model.py").unlink()
    (checkpoint / "model.py").write_text("1")
    assert "model.py changed" in doubt(config, checkpoint_digest(checkpoint, is_code_trusted=True).versions)


def test_an_engine_whose_reads_were_not_seen_is_a_doubt(config, checkpoint):
    assert "VLLM_PLUGINS" in doubt(config, versions(checkpoint))


def test_shards_of_vllms_own_format_are_seen(config, checkpoint):
    model = SimpleNamespace(model=str(checkpoint), model_weights="")
    Loaders().ShardedStateLoader(config.load_config).load_weights(None, model)
    assert doubt(config, versions(checkpoint)) == ""


def test_the_early_look_travels_with_the_configuration(config, checkpoint):
    sent = copy.copy(config)
    sent.load_config = pickle.loads(pickle.dumps(config.load_config))
    (checkpoint / "config.json").write_text("{ }")
    read(sent)
    assert "config.json changed" in doubt(sent, versions(checkpoint))


class Manager:
    """vLLM's manager of the adapters of a worker, with room for some."""

    def __init__(self, room: int) -> None:
        self._adapter_manager = self
        self.capacity = room
        self.held: dict[int, bytes] = {}
        self.during = lambda: None

    def __len__(self) -> int:
        return len(self.held)

    def list_adapters(self) -> set[int]:
        return {*self.held}

    def add_adapter(self, adapter: Any) -> None:
        if adapter.lora_int_id not in self.held:
            self.held[adapter.lora_int_id] = self._load_adapter(adapter)

    def _load_adapter(self, adapter: Any) -> bytes:
        content = (Path(adapter.lora_path) / "adapter_model.safetensors").read_bytes()
        self.during()
        return content


@pytest.fixture
def adapter(tmp_path):
    place = tmp_path / "adapter"
    place.mkdir()
    write(place)
    return SimpleNamespace(lora_name="sql", lora_int_id=7, lora_path=str(place))


def write(place: Path) -> None:
    """Replace its weights, by new files each time."""
    (place / "new").write_bytes(b"weights")
    (place / "new").replace(place / "adapter_model.safetensors")


def of(adapter: Any) -> tuple[AdapterRead, ...]:
    return (AdapterRead(7, adapter_versions(adapter.lora_path)),)


def test_each_load_of_an_adapter_is_told_with_the_files_that_it_has_read(adapter):
    manager = Manager(1)
    watch = AdaptersRead(manager)
    manager.add_adapter(adapter)
    manager.add_adapter(adapter)
    assert (watch.take(), watch.take()) == (of(adapter), ())
    manager.held.clear()
    write(Path(adapter.lora_path))
    manager.during = lambda: write(Path(adapter.lora_path))
    manager.add_adapter(adapter)
    assert watch.take() == (AdapterRead(7, {}),)


def test_a_load_of_kv_counts_only_for_the_files_that_the_worker_has_read(adapter):
    named = [it.versions for it in of(adapter)]
    manager = Manager(1)
    watch = AdaptersRead(manager)
    assert watch.has_read(adapter, named)
    assert manager.held, "there was room, so it was loaded"
    write(Path(adapter.lora_path))
    assert watch.has_read(adapter, named), "vLLM still computes with what it has read"
    assert not watch.has_read(adapter, [it.versions for it in of(adapter)])


def test_without_room_an_adapters_files_count_as_they_are(adapter):
    named = [it.versions for it in of(adapter)]
    manager = Manager(0)
    watch = AdaptersRead(manager)
    assert watch.has_read(adapter, named)
    assert not manager.held
    write(Path(adapter.lora_path))
    assert not watch.has_read(adapter, named)
    assert watch.take() == of(adapter), "the scheduler must not ask for the load again"


def test_an_adapter_that_cannot_be_loaded_ends_its_load_and_no_step(adapter):
    named = [it.versions for it in of(adapter)]
    watch = AdaptersRead(Manager(1))
    (Path(adapter.lora_path) / "adapter_model.safetensors").unlink()
    assert not watch.has_read(adapter, named)
    assert watch.take() == (AdapterRead(7, {}),)
