"""On a GPU: every byte arrives, whatever the streams do, and nothing touches a slot or a tensor too early."""

import itertools
import mmap
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

torch: Any = pytest.importorskip("torch")

from kvtier.connect.transformers.caches import CachedLayer, blank_spans, group_layers  # noqa: E402 - after the check
from kvtier.connect.transformers.copier import CacheCopier  # noqa: E402
from kvtier.device.page_lock import cuda_page_lock  # noqa: E402
from kvtier.runtime.arena import page_aligned  # noqa: E402
from kvtier.types import RequestId  # noqa: E402

pytestmark = pytest.mark.gpu

WAIT_S = 60.0
PART = 1 << 20


def delayed(milliseconds: int = 50) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(milliseconds * 1_500_000)


class World:
    """Chunks of a model with 8 layers on the device, and page-locked slots for them."""

    request, tokens, chunks = RequestId("row"), 64, 24

    def __init__(self, *, is_locked: bool = True) -> None:
        layers = [CachedLayer(n, None, 4, 32, 4, 32, torch.bfloat16, torch.device("cuda", 0)) for n in range(8)]
        shape = group_layers(None, layers)
        layout = shape.layout(self.tokens)
        self.copier = CacheCopier(shape, layout)
        self.spans = blank_spans(shape, (0,), self.tokens * self.chunks)
        self.size = layout.groups[0].payload_bytes
        self.host = page_aligned(self.chunks * self.size)
        self.host[:] = np.random.default_rng(1).integers(0, 256, self.host.size, np.uint8)
        lock = cuda_page_lock("on")
        assert lock is not None
        self.unlock = lock(int(self.host.ctypes.data), self.host.size) if is_locked else lambda: None

    def expose(self) -> None:
        """Order the copies behind what the current stream has queued until now."""
        self.copier.expose(self.request, 0, 0, self.spans)

    def copy(self, way: Any) -> list[Any]:
        """Begin a copy of every chunk; `way` is a method of the copier."""
        return [
            way(
                self.request,
                0,
                (number * self.tokens, (number + 1) * self.tokens),
                self.host[number * self.size : (number + 1) * self.size].data,
            )
            for number in range(self.chunks)
        ]

    def is_over(self, fences: list[Any]) -> bool:
        """Whether all copies are complete."""
        return all(self.copier.done(fence) for fence in fences)

    def finish(self, fences: list[Any]) -> None:
        """Wait for the copies."""
        wait_until(lambda: self.is_over(fences), "the copies", WAIT_S)

    def fill(self, value: float) -> None:
        """Queue on the current stream that every number becomes `value`."""
        for (span,) in self.spans[0]:
            span.keys.fill_(value)
            span.values.fill_(value)

    def holds(self, value: float) -> bool:
        """Whether every number in the slots is `value`."""
        return bool((torch.from_numpy(self.host).view(torch.bfloat16) == value).all())


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "pageable"])
def test_there_and_back(is_locked: bool) -> None:
    world = World(is_locked=is_locked)
    world.expose()
    wanted = world.host.copy()
    world.finish(world.copy(world.copier.scatter))
    world.host[:] = 0xDB  # poisoned, so that a late read is detected
    world.finish(world.copy(world.copier.gather))
    assert (world.host == wanted).all()
    world.unlock()


def test_a_gather_waits_for_what_the_engine_has_queued() -> None:
    world = World()
    world.fill(1)
    world.expose()
    world.finish(world.copy(world.copier.gather))
    delayed()
    world.fill(2)
    # The negative control: without a new event it reads too early.
    world.finish(world.copy(world.copier.gather))
    assert world.holds(1)
    delayed()
    world.fill(3)
    world.expose()
    fences = world.copy(world.copier.gather)
    assert not world.is_over(fences), "nothing waits for the device"
    world.finish(fences)
    assert world.holds(3)
    world.unlock()


def test_the_default_stream_is_not_waited_for() -> None:
    world = World()
    world.expose()
    world.finish(world.copy(world.copier.scatter))
    delayed(2000)
    busy = torch.cuda.current_stream().record_event()
    world.finish(world.copy(world.copier.scatter))
    assert not busy.query()
    torch.cuda.synchronize()
    world.unlock()


def test_a_mapping_is_locked_in_parts_and_copies_do_not_cross_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.device.page_lock.PART_BYTES", 8 * PART)
    region = np.frombuffer(mmap.mmap(-1, 64 * PART), np.uint8)
    lock = cuda_page_lock("on")
    assert lock is not None
    unlock = lock(int(region.ctypes.data), region.nbytes, PART)
    host = torch.from_numpy(region)
    for start, stop in itertools.pairwise(range(0, 65 * PART, PART)):
        assert host[start:stop].is_pinned()
    unlock()
    assert not host[:PART].is_pinned()
