"""No byte is taken from, or given to, a block of vLLM's that has changed hands: copies end, fail, or never begin."""

import threading
import time
from typing import Any

import pytest
from tests.vllm_recorded import recorded
from tests.vllm_world import BLOCKS, VllmWorld, payload_of

from kvtier.connect.vllm.worker import copier as module
from kvtier.connect.vllm.worker.copier import RevokedError
from kvtier.connect.vllm.worker.cpu_copy import CpuPageCopy
from kvtier.connect.vllm.worker.pages import BlockIds, EnginePages
from kvtier.device.copier import Fence
from kvtier.types import RequestId

REQUEST = RequestId("S0/x")


class SlowCopy(CpuPageCopy):
    """Stops in the middle of a copy until it may go on."""

    def __init__(self, pages: EnginePages) -> None:
        super().__init__(pages)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def _pairs(self, group: int, ids: BlockIds, payload: memoryview) -> Any:
        for number, pair in enumerate(super()._pairs(group, ids, payload)):
            if number == 1:
                self.begun.set()
                assert self.go_on.wait(30)
            yield pair


class FencedCopy(SlowCopy):
    """Copies in the background, like a device."""

    def gather(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
        return self._start(super().gather, group, ids, payload)

    def scatter(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
        return self._start(super().scatter, group, ids, payload)

    def done(self, fence: Fence) -> bool:
        assert isinstance(fence, threading.Thread)
        return not fence.is_alive()

    def _start(self, copy: Any, *args: Any) -> Fence:
        thread = threading.Thread(target=copy, args=args, daemon=True)
        thread.start()
        return thread


class Reused:
    """A gather or scatter of request S0/x that is half done when its blocks are given to another request."""

    def __init__(self, copy: type[SlowCopy], *, is_gather: bool) -> None:
        engine = recorded("llama32", BLOCKS)
        self.world = VllmWorld(engine, lambda pages: self._made(copy(pages)))
        self.blocks = self.world.chunks(0)[1]
        self.payload = payload_of(self.world.layout.groups[0].payload_bytes)
        self.before = self.world.read(0, self.blocks)
        self.error: Exception | None = None
        start = self.world.copier.gather if is_gather else self.world.copier.scatter
        self.thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self.thread.start()
        assert self.copy.begun.wait(30)

    def _made(self, copy: SlowCopy) -> SlowCopy:
        self.copy = copy
        return copy

    def _run(self, start: Any) -> None:
        try:
            fence = start(REQUEST, 0, self.blocks, self.payload)
            while fence is not None and not self.world.copier.done(fence):
                time.sleep(1e-3)
        except (RevokedError, AssertionError) as error:
            self.error = error

    def reuse(self) -> None:
        """What the next step's forward does."""
        self.world.fill(0, self.blocks, [bytes(len(layer)) for layer in self.before])

    def finish(self) -> None:
        self.copy.go_on.set()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def gathered(self) -> list[bytes]:
        layout = self.world.layout.groups[0]
        sizes = zip(layout.layer_offsets, layout.layer_bytes, strict=True)
        return [bytes(self.payload[offset : offset + size]) for offset, size in sizes]


@pytest.mark.parametrize("copy", [SlowCopy, FencedCopy])
def test_a_gather_from_blocks_that_changed_hands_fails(copy):
    reused = Reused(copy, is_gather=True)
    assert reused.world.copier.revoke([REQUEST], 0.0), "the step need not wait for a gather"
    reused.reuse()
    reused.finish()
    assert isinstance(reused.error, RevokedError)


@pytest.mark.parametrize("copy", [SlowCopy, FencedCopy])
def test_without_revoke_wrong_bytes_would_be_stored(copy):
    """The negative control: what the fence is for."""
    reused = Reused(copy, is_gather=True)
    reused.reuse()
    reused.finish()
    assert reused.error is None
    assert reused.gathered() != reused.before


@pytest.mark.parametrize("copy", [SlowCopy, FencedCopy])
def test_a_scatter_that_runs_is_waited_for(copy):
    """It writes; a block is given away only when that has ended."""
    reused = Reused(copy, is_gather=False)
    assert not reused.world.copier.revoke([REQUEST], 0.05)
    threading.Timer(0.05, reused.copy.go_on.set).start()
    assert reused.world.copier.revoke([REQUEST], 30.0)
    written = reused.world.read(0, reused.blocks)
    reused.reuse()
    reused.finish()
    time.sleep(0.01)
    assert set(b"".join(reused.world.read(0, reused.blocks))) == {0}, "something wrote after revoke had returned"
    assert written != reused.before
    assert isinstance(reused.error, RevokedError)


@pytest.mark.parametrize("copy", [SlowCopy, FencedCopy])
def test_other_requests_copies_go_on(copy):
    reused = Reused(copy, is_gather=True)
    assert reused.world.copier.revoke([RequestId("S1/x")], 0.0)
    reused.finish()
    assert reused.error is None
    assert reused.gathered() == reused.before


def test_a_copy_that_comes_after_the_order_never_begins():
    world = VllmWorld(recorded("llama32", BLOCKS))
    before, blocks = world.everything(), world.chunks(0)[0]
    payload = payload_of(world.layout.groups[0].payload_bytes)
    assert world.copier.revoke([REQUEST], 0.0)
    for start in (world.copier.gather, world.copier.scatter):
        with pytest.raises(RevokedError, match=REQUEST):
            start(REQUEST, 0, blocks, payload)
    assert world.everything() == before
    assert not any(payload)
    world.copier.gather(RequestId("S1/x"), 0, blocks, payload)


def test_as_many_revoked_requests_are_remembered_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr(module, "REVOKED_MAX", 3)
    world = VllmWorld(recorded("llama32", BLOCKS))
    blocks, payload = world.chunks(0)[0], payload_of(world.layout.groups[0].payload_bytes)
    world.copier.revoke([RequestId(f"S{number}/x") for number in range(5)], 0.0)
    for number in (2, 3, 4):
        with pytest.raises(RevokedError):
            world.copier.gather(RequestId(f"S{number}/x"), 0, blocks, payload)
    world.copier.gather(RequestId("S0/x"), 0, blocks, payload)


def test_a_copy_that_fails_is_not_waited_for():
    class Failing(CpuPageCopy):
        def scatter(self, group: int, ids: BlockIds, payload: memoryview) -> Fence | None:
            raise OSError("the device is gone")

    world = VllmWorld(recorded("llama32", BLOCKS), Failing)
    with pytest.raises(OSError, match="the device is gone"):
        world.copier.scatter(REQUEST, 0, world.chunks(0)[0], payload_of(world.layout.groups[0].payload_bytes))
    assert world.copier.revoke([REQUEST], 0.0)
