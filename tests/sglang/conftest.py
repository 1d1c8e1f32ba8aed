"""What the tests on SGLang's real classes share: a checkpoint, and engines that are surely detached."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torchvision_shim


def _is_installed() -> bool:
    # This folder is called sglang too, so a name alone proves nothing.
    found = find_spec("sglang")
    return found is not None and found.origin is not None


IS_INSTALLED = _is_installed()
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]

if IS_INSTALLED:
    torchvision_shim.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns of processors that it does not find
        from engines import Engine, checkpoint, engine, published


def pytest_report_header() -> str:
    """Say so when these tests are left out."""
    return "" if IS_INSTALLED else "tests on SGLang are left out: it is not installed here; make test-sglang has them"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang's own warnings fail no test."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def digests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Digests of weights are remembered in a folder of the test run, and SGLang's compiled hash for all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint's folder."""
    return checkpoint(tmp_path / "model")


@pytest.fixture
def server(model: Path) -> Iterator[None]:
    """SGLang's runtime context of a server with `model`."""
    with published(model):
        yield


@pytest.fixture
def start(server: None, tmp_path: Path) -> Iterator[Callable[..., "Engine"]]:
    """Starts engines with kvtier's backend on a directory tier; detaches them at the end."""
    with ExitStack() as stack:

        def begin(extra: dict[str, Any] | None = None, **fields: Any) -> "Engine":
            settings = {"tiers": [f"directory:{tmp_path / 'store'}"]} if extra is None else extra
            return stack.enter_context(engine(settings, **fields))

        yield begin
