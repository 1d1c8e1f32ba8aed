"""What the tests on the real vLLM share: checkpoints, engines that are surely ended, and what they should answer."""

import itertools
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def _is_installed() -> bool:
    # This folder is called vllm too, so a name alone proves nothing.
    found = find_spec("vllm")
    return found is not None and found.origin is not None


IS_INSTALLED = _is_installed()
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]

if IS_INSTALLED:
    from engines import PROMPTS, Expected, Start, small_engine
    from harness import Answer, Engine, in_process
    from judge import prompt
    from models import make_all, make_checkpoint, make_drafts


def pytest_report_header() -> str:
    """Say so when these tests are left out."""
    return "" if IS_INSTALLED else "tests on vLLM are left out: it is not installed here; make test-vllm has them"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of `models.CONFIGS`, by name, and two adapters for llama."""
    where = tmp_path_factory.mktemp("checkpoints")
    in_process(make_all, where)
    return where


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with draft models, and what they draft for; see `make_drafts`."""
    place = tmp_path_factory.mktemp("drafts")
    in_process(make_drafts, place)
    return place


@pytest.fixture
def start(checkpoints: Path, tmp_path: Path) -> Iterator["Start"]:
    """Starts engines with small settings; ends them at the end."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def begin(model: str | Path = "llama", connector: dict[str, Any] | None = None, **fields: Any) -> "Engine":
            return stack.enter_context(
                small_engine(checkpoints, model, tmp_path / f"engine{next(numbers)}.log", connector, **fields)
            )

        yield begin


@pytest.fixture(scope="session")
def expected(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> "Expected":
    """What a model answers to `PROMPTS` in an engine without a connector."""
    logs = tmp_path_factory.mktemp("expected")
    known: dict[str, dict[str, Answer]] = {}

    def of(model: str) -> dict[str, Answer]:
        if model not in known:
            with small_engine(checkpoints, model, logs / f"{model}.log", None) as engine:
                known[model] = {name: engine.ask(prompt(count, seed))[0] for name, (count, seed) in PROMPTS.items()}
        return known[model]

    return of


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with other weights."""
    place = tmp_path_factory.mktemp("other") / "llama"
    in_process(make_checkpoint, "llama", place, 8)
    return place


@pytest.fixture(scope="session")
def wanted(checkpoints: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> "Expected":
    """What an engine without a connector answers with the other weights, or after a change to some of them."""
    known: dict[str, dict[str, Answer]] = {}

    def of(change: str) -> dict[str, Answer]:
        name = "reload" if change == "reload" else "some"
        if name not in known:
            log = tmp_path_factory.mktemp("wanted") / "log"
            with small_engine(other.parent if name == "reload" else checkpoints, "llama", log, None) as engine:
                if name == "some":
                    engine.do("changes:write_directly", str(other))
                known[name] = {it: engine.ask(prompt(*PROMPTS[it]))[0] for it in PROMPTS}
        return known[name]

    return of


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: room for two of our chunks."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs a small file system of its own: mounting a tmpfs is only for root")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    """A flag: what `sabotage` makes hang goes on when the file is removed."""
    flag = tmp_path / "hangs"
    flag.touch()
    return flag
