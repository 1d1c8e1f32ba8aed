"""On a GPU: every byte arrives, whatever the streams do, and nothing touches a slot or a tensor too early."""

import itertools
import mmap
import time
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from kvtier.device import staged_copy as module  # noqa: E402 - after the check for torch
from kvtier.device.copy_descriptors import table  # noqa: E402
from kvtier.device.cuda import CudaStreams  # noqa: E402
from kvtier.device.page_lock import cuda_page_lock  # noqa: E402
from kvtier.device.staged_copy import PayloadPart, StagedCopy  # noqa: E402
from kvtier.runtime.arena import page_aligned  # noqa: E402

pytestmark = pytest.mark.gpu

WAIT_S = 60.0
PART = 1 << 20


def finish(event: Any) -> None:
    until = time.monotonic() + WAIT_S
    while not event.query():
        assert time.monotonic() < until, "a copy never ends"
        time.sleep(1e-4)


def delayed(milliseconds: int = 50) -> None:
    """Keep the current stream busy for about so long."""
    torch.cuda._sleep(milliseconds * 1_500_000)


class World:
    """Parts whose runs are scattered over a tensor on the device."""

    def __init__(self, parts: int, piece: int, *, is_locked: bool = True) -> None:
        count = PART // piece
        self.piece, self.count = piece, count
        rng = np.random.default_rng(piece + parts)
        self.host = page_aligned(parts * PART)
        self.host[:] = rng.integers(0, 256, self.host.size, np.uint8)
        self.device = torch.from_numpy(rng.integers(0, 256, 2 * parts * PART, np.uint8)).cuda()
        self.order = rng.permutation(2 * parts * count)[: parts * count].reshape(parts, count)
        torch.cuda.synchronize()
        lock = cuda_page_lock("on")
        assert lock is not None
        self.unlock = lock(int(self.host.ctypes.data), self.host.size) if is_locked else lambda: None
        address = self.device.data_ptr()
        offsets = np.arange(count) * piece
        self.parts = [
            PayloadPart(
                self.host.data[n * PART : (n + 1) * PART], table(offsets, address + self.order[n] * piece, piece)
            )
            for n in range(parts)
        ]

    def held(self) -> np.ndarray:
        torch.cuda.synchronize()
        rows = self.device.cpu().numpy().reshape(-1, self.piece)
        return rows[self.order.reshape(-1)].reshape(-1)


@pytest.mark.parametrize("is_locked", [True, False], ids=["locked", "pageable"])
@pytest.mark.parametrize("piece", [1 << 19, 1 << 16, 4096, 1152, 64])
def test_there_and_back(piece: int, is_locked: bool) -> None:
    if PART % piece:
        piece = 1 << 7
    world = World(40, piece, is_locked=is_locked)
    staged = StagedCopy(CudaStreams(torch.device("cuda")))
    finish(staged.scatter(world.parts))
    assert (world.held() == world.host).all()
    wanted = world.host.copy()
    world.host[:] = 0xDB  # poisoned, so that a late read is detected
    torch.cuda.synchronize()
    assert (world.held() == wanted).all()
    finish(staged.gather(world.parts))
    assert (world.host == wanted).all()
    world.unlock()


def test_a_gather_waits_for_what_the_engine_has_queued() -> None:
    world, staged = World(8, 1 << 16), StagedCopy(CudaStreams(torch.device("cuda")))
    delayed()
    world.device.fill_(7)
    event = staged.gather(world.parts, staged.now())
    assert not event.query(), "nothing waits for the device"
    finish(event)
    assert (world.host == 7).all()
    # The negative control: without the event it reads too early.
    delayed()
    world.device.fill_(9)
    finish(staged.gather(world.parts))
    assert (world.host == 7).all()
    world.unlock()


def test_what_the_engine_does_after_the_event_sees_the_bytes() -> None:
    world, staged = World(32, 4096), StagedCopy(CudaStreams(torch.device("cuda")))
    event = staged.scatter(world.parts, staged.now())
    event.hold()
    seen = world.device.clone()
    finish(event)
    torch.cuda.synchronize()
    assert torch.equal(seen, world.device)
    assert (world.held() == world.host).all()
    world.unlock()


def test_stages_are_not_used_again_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of two small stages, while the kernels' stream stands still."""
    monkeypatch.setattr(module, "STAGE_BYTES", 2 * PART)
    world, staged = World(24, 1 << 16), StagedCopy(CudaStreams(torch.device("cuda")))
    with torch.cuda.stream(staged._in.kernel.stream):  # type: ignore[attr-defined]
        delayed()
    for event in [staged.scatter([part]) for part in world.parts]:
        finish(event)
    assert (world.held() == world.host).all()
    with torch.cuda.stream(staged._out.bus.stream):  # type: ignore[attr-defined]
        delayed()
    wanted = world.host.copy()
    world.host[:] = 0
    for event in [staged.gather([part]) for part in world.parts]:
        finish(event)
    assert (world.host == wanted).all()
    world.unlock()


def test_the_default_stream_is_not_waited_for() -> None:
    world, staged = World(8, 1 << 16), StagedCopy(CudaStreams(torch.device("cuda")))
    finish(staged.scatter(world.parts))  # compiles the kernel
    delayed(2000)
    busy = torch.cuda.current_stream().record_event()
    finish(staged.scatter(world.parts))
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
