"""The GPU part of a probe: checks for a device, copies in the right direction, locks and unlocks in pairs.

The copies run on torch's CPU tensors here, without the device's own calls; where there is a GPU they run as they are.
"""

import numpy as np
import pytest

from kvtier.errors import ConfigError
from kvtier.runtime.arena import page_aligned
from kvtier.tools.probe import links
from kvtier.tools.probe.links import MeasureLimits

torch = pytest.importorskip("torch")
SIZE = 1 << 16
LIMITS = MeasureLimits(60.0, 4 * SIZE)


def test_without_a_device_torch_is_not_even_imported(monkeypatch):
    monkeypatch.setattr(links, "import_module", lambda name: pytest.fail(f"imports {name}"))
    assert links.gpu_missing(has_gpu=False) == "gpu: no device"


def test_without_torch_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(links, "find_spec", lambda _name: None)
    assert links.gpu_missing(has_gpu=True) == "gpu: torch is not installed"


def test_a_device_that_torch_cannot_use_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert links.gpu_missing(has_gpu=True) == "gpu: torch cannot use the device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert links.gpu_missing(has_gpu=True) is None


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The device's memory is host memory, and nothing has to be waited for."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **{**options, "device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(links, "GPU_BYTES", 4 * SIZE)


def test_copies_go_there_and_back(on_the_cpu):
    region = page_aligned(4 * SIZE)
    region[:] = 7
    device = torch.zeros(4 * SIZE, dtype=torch.uint8)
    found = links.measures(links.gpu_points(region, device, (SIZE,), ""), LIMITS, lambda _what: None)
    assert [(it.op, it.bytes, it.count) for it in found] == [("to_gpu", SIZE, 4), ("from_gpu", SIZE, 4)]
    # Four operations of a quarter each: all of it went there, and what came back is the same.
    assert bool((device == 7).all())
    assert np.all(region == 7)


@pytest.mark.parametrize("can_lock", [True, False])
def test_memory_that_cannot_be_locked_is_measured_as_it_is(on_the_cpu, monkeypatch, can_lock):
    locked = []

    def lock(_address, size_bytes):
        if not can_lock:
            raise ConfigError("no")
        locked.append(size_bytes)
        return lambda: locked.append(-size_bytes)

    monkeypatch.setattr("kvtier.device.page_lock.cuda_page_lock", lambda _mode: lock)
    link, is_locked = links.gpu_copies((SIZE,), LIMITS, lambda _what: None)
    ops = [it.op for it in link.measures]
    pageable = ["to_gpu pageable", "from_gpu pageable"]
    assert is_locked is can_lock
    assert ops == (["to_gpu", "from_gpu", *pageable] if can_lock else pageable)
    assert locked == ([4 * SIZE, -4 * SIZE] if can_lock else [])


@pytest.mark.gpu
def test_a_real_gpu_is_measured():
    if links.gpu_missing(has_gpu=True) is not None:
        pytest.skip("no GPU here")
    link, _ = links.gpu_copies((1 << 20,), MeasureLimits(0.05, 1 << 40), lambda _what: None)
    assert {"to_gpu pageable", "from_gpu pageable"} <= {it.op for it in link.measures}
