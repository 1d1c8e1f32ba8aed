"""Without an NVIDIA GPU, tests marked `gpu` are skipped with a reason; the others run on the CPU."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    torch = pytest.importorskip("torch")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and request.node.get_closest_marker("gpu"):
        pytest.skip("torch sees no CUDA device")
    yield
    if has_gpu:
        torch.cuda.synchronize()
