"""What the tests of faults share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_world import open_tier
from tests.conftest import opened_by


@pytest.fixture
def open_disk() -> Iterator[Callable[..., Any]]:
    """`open_tier`, and the tiers are closed after the test."""
    yield from opened_by(open_tier)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the store of a test is, which is not there yet."""
    return tmp_path / "store"
