"""Names that the connector uses are looked up in vLLM's source: missing ones are named, and nothing is imported."""

import ast
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.connect.vllm import required_names as internals

CONNECTOR = """
class KvtierConnector:
    def on_new_request(self, request): ...
    def _own(self): ...
"""
BASE = """
class KVConnectorBase_V1:
    def __init__(self):
        self._kv_cache_manager = None
    def on_new_request(self, request): ...
class KVConnectorRole:
    SCHEDULER = 0
    WORKER = 1
class KVConnectorTransferResults:
    finished_recving: set
    failed_recving: set
class SupportsHMA:
    def request_finished_all_groups(self): ...
"""
BASE_FILE = "distributed/kv_transfer/kv_connector/v1/base.py"


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A package with exactly the names in use."""
    root = tmp_path / "vllm"
    for file, classes in internals.USED.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines: list[str] = []
        for name, members in classes.items():
            if name:
                lines += [f"class {name}:", *(f"    {member}: int" for member in members.split())]
            else:
                lines += [f"def {member}(): ..." for member in members.split()]
        path.write_text("\n".join(lines))
    (root / BASE_FILE).write_text(BASE)
    (root / "__init__.py").write_text("raise ImportError('never imported')")
    return root


@pytest.fixture
def connector(tmp_path: Path) -> Path:
    path = tmp_path / "connector.py"
    path.write_text(CONNECTOR)
    return path


def test_a_vllm_with_all_that_is_used_lacks_nothing(vllm, connector):
    assert internals.missing(vllm, connector) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("v1/request.py", "num_tokens: int", "tokens: int", ["v1/request.py: Request.num_tokens"]),
        ("v1/core/block_pool.py", "class BlockPool", "class Pool", ["v1/core/block_pool.py: BlockPool"]),
        (
            "v1/core/kv_cache_utils.py",
            "maybe_convert_block_hash",
            "convert",
            ["v1/core/kv_cache_utils.py: maybe_convert_block_hash"],
        ),
        (
            BASE_FILE,
            "on_new_request(self, request)",
            "on_new_request(self, request, time_s)",
            [
                f"{BASE_FILE}: KVConnectorBase_V1.on_new_request(self, request), it has (self, request, time_s)",
            ],
        ),
        (BASE_FILE, "on_new_request", "on_request", [f"{BASE_FILE}: KVConnectorBase_V1.on_new_request"]),
        ("lora/request.py", "class", "klass ]", ["lora/request.py: no such file, or not valid Python"]),
    ],
)
def test_what_is_missing_is_named(vllm, connector, file, before, after, message):
    path = vllm / file
    path.write_text(path.read_text().replace(before, after))
    assert internals.missing(vllm, connector) == message


def test_attributes_count_wherever_a_class_gets_them(vllm, connector):
    """From a base in the same file, from its constructor, and where it is a property."""
    (vllm / "v1/request.py").write_text(
        "class Common:\n    request_id: str\n"
        "class Request(Common):\n"
        "    def __init__(self):\n        self.status = 1\n"
        "    @property\n    def num_tokens(self): ...\n"
    )
    found = {each.partition("Request.")[2] for each in internals.missing(vllm, connector)}
    assert found.isdisjoint({"request_id", "status", "num_tokens"})
    assert "block_hashes" in found


def test_the_configuration_is_seen_only_while_it_is_made():
    class VllmConfig:
        def __init__(self, model: object, connector: str = "KvtierConnector") -> None:
            self.model_config = model
            self.kv_transfer_config = SimpleNamespace(kv_connector=connector)
            self.__post_init__()

        def __post_init__(self) -> None:
            self.seen = asked()

    def asked() -> object:
        return internals.config_being_made()

    made = VllmConfig("a model")
    assert made.seen is made
    assert VllmConfig(None).seen is None, "vLLM makes some without a model"
    assert VllmConfig("a model", "MultiConnector").seen is None, "with ours as one of several"
    assert asked() is None


NAMES = {
    "request": "Request",
    "model": "ModelConfig",
    "cache": "CacheConfig",
    "parallel": "ParallelConfig",
    "block": "KVCacheBlock",
    "adapter": "LoRARequest",
    "output": "SchedulerOutput",
    "_pool": "BlockPool",
    "free_block_queue": "FreeKVCacheBlockQueue",
    "_kv_cache_manager": "KVCacheManager",
    "model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "load_config": "LoadConfig",
    "compilation_config": "CompilationConfig",
    "device_config": "DeviceConfig",
    "kv_transfer_config": "KVTransferConfig",
    "vllm_config": "VllmConfig",
    "kv_cache_config": "KVCacheConfig",
    "connector_output": "KVConnectorOutput",
    "tensor": "KVCacheTensor",
    "group": "KVCacheGroupSpec",
    "spec": "KVCacheSpec FullAttentionSpec MLAAttentionSpec SlidingWindowSpec MambaSpec UniformTypeKVCacheSpecs",
}
"""What a name in the connector's source stands for, in files that look at vLLM's objects."""

OURS = {
    "model": {"load_weights"},  # what computes
    "group": {"validity", "tables", "needed_from", "payload_bytes"},  # a group of our geometry
    "tensor": {"ndim", "shape", "stride", "element_size", "storage_offset", "device", "untyped_storage", "detach"},
}


def test_every_attribute_of_vllms_that_the_connector_reads_is_listed():
    listed: dict[str, set[str]] = {}
    for classes in internals.USED.values():
        for name, members in classes.items():
            listed.setdefault(name, set()).update(members.split())
    folder = Path(internals.__file__).parent
    for file in sorted(set(folder.glob("*.py")) - {folder / "selftest.py"}):  # it reads an engine of its own
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
            if owner in NAMES and node.attr not in OURS.get(owner, set()):
                known = set[str]().union(*(listed[name] for name in NAMES[owner].split()))
                assert node.attr in known, f"{file.name}:{node.lineno}: {owner}.{node.attr} is not in internals.USED"


def test_a_script_called_vllm_is_not_taken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert internals.package() is None


def test_vllm_finds_the_plug_in_and_the_plug_in_registers_the_connector_again_and_again(monkeypatch):
    named = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
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
