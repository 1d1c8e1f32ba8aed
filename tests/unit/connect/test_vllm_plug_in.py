"""How vLLM finds the connector: its plug-in, and the configuration that is being made while vLLM imports it."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

from kvtier.connect.vllm.engine_hooks import config_being_made


def test_the_configuration_is_seen_only_while_it_is_made():
    class VllmConfig:
        def __init__(self, model: object, connector: str = "KvtierConnector") -> None:
            self.model_config = model
            self.kv_transfer_config = SimpleNamespace(kv_connector=connector) if connector else None
            self.__post_init__()

        def __post_init__(self) -> None:
            self.seen = asked()

    def asked() -> object:
        return config_being_made()

    made = VllmConfig("a model")
    assert made.seen is made
    assert VllmConfig(None).seen is None, "vLLM makes some without a model"
    assert VllmConfig("a model", "").seen is None, "the draft model's, say"
    assert asked() is None


def test_vllm_finds_the_plug_in_and_the_plug_in_registers_the_connector_again_and_again(monkeypatch):
    named = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["entry-points"]
    plug_in = EntryPoint("kvtier", named["vllm.general_plugins"]["kvtier"], "vllm.general_plugins").load()
    assert plug_in() is None, "harmless without vLLM"
    known: dict[str, tuple[str, str]] = {}

    def register_connector(name: str, module: str, kind: str) -> None:
        if name in known:
            raise ValueError("already registered")
        known[name] = module, kind

    factory = SimpleNamespace(KVConnectorFactory=SimpleNamespace(register_connector=register_connector))
    monkeypatch.setitem(sys.modules, plug_in.__globals__["_FACTORY"], factory)
    for _ in range(2):
        plug_in()
    assert known == {"KvtierConnector": ("kvtier.connect.vllm", "KvtierConnector")}


def test_the_plug_in_imports_next_to_nothing():
    found = "import sys; from kvtier.connect.vllm import register; register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, timeout=60, check=True)
    assert {each for each in done.stdout.split() if each.startswith("kvtier")} == {
        "kvtier",
        "kvtier.connect",
        "kvtier.connect.vllm",
    }
    assert not {"vllm", "torch", "numpy"} & set(done.stdout.split())


LOADERS = """
class DefaultModelLoader:
    load_config = None
    def _prepare_weights(self, *given): return given
class ShardedStateLoader:
    def load_weights(self): ...
"""


def run_beside_loaders(tmp_path: Path, program: str) -> None:
    """Run `program` beside a package that looks like vLLM's loaders."""
    place = tmp_path / "vllm" / "model_executor" / "model_loader"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(LOADERS)
    path = f"{tmp_path}:{Path(__file__).parents[3] / 'src'}"
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, timeout=60, check=True)


def test_vllms_loaders_are_watched_when_they_are_imported_and_not_before(tmp_path):
    found = """if True:
        import importlib.util, sys
        from kvtier.connect.vllm import register
        register(), register()
        assert "vllm.model_executor" not in sys.modules
        assert importlib.util.find_spec("vllm.model_executor.model_loader")  # asking is no import
        import vllm.model_executor.model_loader as loaders
        first = loaders.DefaultModelLoader._prepare_weights
        assert first.__module__ == "vllm.model_executor.model_loader"  # by functools.wraps
        assert "kvtier" in first.__code__.co_filename
        register()
        assert loaders.DefaultModelLoader._prepare_weights is first
    """
    run_beside_loaders(tmp_path, found)


def test_an_engine_that_passes_no_kv_on_loads_as_without_the_plug_in(tmp_path):
    found = """if True:
        import importlib.util, sys, types
        from kvtier.connect.vllm import register
        register()
        import vllm.model_executor.model_loader as loaders
        config = types.SimpleNamespace(kv_transfer_config=None)
        settings = types.SimpleNamespace(get_current_vllm_config_or_none=lambda: config)
        sys.modules["vllm.config"] = settings
        assert loaders.DefaultModelLoader()._prepare_weights("/model", []) == ("/model", [])
        assert "kvtier.connect.vllm.checkpoint_reads" not in sys.modules
        config.kv_transfer_config = "kvtier's"
        assert loaders.DefaultModelLoader()._prepare_weights("/model") == ("/model",), "of another form"
    """
    run_beside_loaders(tmp_path, found)


def test_loaders_that_do_not_exist_are_missed_as_without_the_plug_in(tmp_path):
    found = """if True:
        import shutil, vllm.model_executor
        from kvtier.connect.vllm import register
        register()
        shutil.rmtree(vllm.model_executor.__path__[0] + "/model_loader")
        try:
            import vllm.model_executor.model_loader
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
    """
    run_beside_loaders(tmp_path, found)
