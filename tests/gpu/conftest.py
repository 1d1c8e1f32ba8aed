"""Tests that need an NVIDIA GPU: left out, with a reason, where there is none."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    yield
    torch.cuda.synchronize()
