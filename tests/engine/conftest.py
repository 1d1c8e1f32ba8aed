"""What the engine tests share: an attachment that is closed."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attaching import SMALL, Attach

if TYPE_CHECKING:
    from kvtier.connect.transformers import Attachment

IS_INSTALLED = find_spec("torch") is not None and find_spec("transformers") is not None
# A conftest cannot skip; the header names what it ignores.
collect_ignore_glob = [] if IS_INSTALLED else ["test_transformers*.py"]


def pytest_report_header() -> str:
    """Say so when the engine's tests are left out."""
    return "" if IS_INSTALLED else "engine tests are left out: torch and transformers are not installed"


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Attach]:
    """Attaches models with small settings, by default to one directory; closes them at the end."""
    from kvtier.connect.transformers import attach

    with ExitStack() as stack:

        def make(model: Any, **settings: Any) -> "Attachment":
            settings = SMALL | {"directory": tmp_path / "kv"} | settings
            return stack.enter_context(attach(model, **settings))

        yield make


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoint of the real model. Reading it from its package takes 20 s; it is removed for its 540 MB."""
    from kvtier.tools.demo.model import write_pretrained

    place = tmp_path_factory.mktemp("pretrained")
    write_pretrained(place)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def kv(attached: Attach) -> "Attachment":
    """A tiny Llama, attached with small settings."""
    from tiny_transformers import llama

    return attached(llama())
