"""What the tests of the adapters share."""

from collections.abc import Callable, Iterator

import pytest
from tests.conftest import opened_by
from tests.vllm_engine import SmallEngine


@pytest.fixture
def start() -> Iterator[Callable[..., SmallEngine]]:
    """Starts small engines, which are closed after the test."""
    yield from opened_by(SmallEngine)
