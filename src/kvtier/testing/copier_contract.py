"""Contract tests for copiers. Subclass `CopierContract` in a pytest module and override `make`."""

import mmap
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvtier.device.copier import Copier, Fence
from kvtier.layout import GroupLayout, KvLayout
from kvtier.types import RequestId

_REQUEST = RequestId("contract")
_FILLER = 0xA5
_COPY_SECONDS_MAX = 30.0
_FENCE_WAIT_S = 1e-3


class CopierWorld(ABC):
    """An engine's KV memory and its copier.

    Args:
        copier: the copier under test.
        layout: the copier's layout. The tests check more if its layers end with padding.
        request: the request of all copies.
    """

    def __init__(self, copier: Copier, layout: KvLayout, request: RequestId = _REQUEST) -> None:
        self.copier = copier
        self.layout = layout
        self.request = request

    @abstractmethod
    def chunks(self, group: int) -> list[tuple[int, ...]]:
        """Return the addresses of at least four disjoint full chunks. Some must have blocks out of order."""

    @abstractmethod
    def wrong(self, group: int) -> list[tuple[int, ...]]:
        """Return invalid addresses."""

    @abstractmethod
    def read(self, group: int, blocks: tuple[int, ...]) -> list[bytes]:
        """Return the engine's bytes at an address: each layer's `layer_bytes`, without padding."""

    @abstractmethod
    def fill(self, group: int, blocks: tuple[int, ...], layers: list[bytes]) -> None:
        """Write `layers` to an address without using the copier."""

    @abstractmethod
    def everything(self) -> bytes:
        """Return all of the engine's KV memory."""


class CopierContract:
    """Gather and scatter copy only the bytes of the chunk.

    Test your copier with::

        class TestMine(CopierContract):
            def make(self) -> CopierWorld:
                return MyWorld()
    """

    def make(self) -> CopierWorld:
        """Return a world whose memory is not zero. Each test calls this."""
        raise NotImplementedError

    def test_gather_puts_each_layer_at_its_offset(self) -> None:
        """The payload is layer-major, as in the layout. No byte of a slot's previous chunk remains.

        The frame owns the padding, which stays unchanged.
        """
        world = self.make()
        before = world.everything()
        for number, group in enumerate(world.layout.groups):
            payload = _payload(group)
            for blocks in world.chunks(number):
                _gather(world, number, blocks, payload)
                assert payload == _payload(group, world.read(number, blocks))
        assert world.everything() == before, "gather has changed the engine's memory"

    def test_scatter_gives_the_engine_each_layer(self) -> None:
        """Each layer arrives at the engine's address. Other threads may read the slot at the same time."""
        world = self.make()
        rng = random.Random(2)
        for number, group in enumerate(world.layout.groups):
            for blocks in world.chunks(number):
                layers = [rng.randbytes(size) for size in group.layer_bytes]
                payload = _payload(group, layers)
                before = bytes(payload)
                _scatter(world, number, blocks, payload)
                assert world.read(number, blocks) == layers
                assert payload == before, "scatter has changed the payload"

    def test_scatter_touches_no_other_block(self) -> None:
        """Other blocks may belong to other requests. Restoring the named blocks restores all memory."""
        world = self.make()
        for number, group in enumerate(world.layout.groups):
            for blocks in world.chunks(number):
                before, old = world.everything(), world.read(number, blocks)
                _scatter(world, number, blocks, _payload(group, [bytes(size) for size in group.layer_bytes]))
                world.fill(number, blocks, old)
                assert world.everything() == before

    def test_different_slots_at_the_same_time(self) -> None:
        """Mover threads share one copier."""
        world = self.make()
        rng = random.Random(3)
        jobs = [
            (number, blocks, [rng.randbytes(size) for size in group.layer_bytes])
            for number, group in enumerate(world.layout.groups)
            for blocks in world.chunks(number)
        ]

        def there_and_back(job: tuple[int, tuple[int, ...], list[bytes]]) -> bool:
            number, blocks, layers = job
            group = world.layout.groups[number]
            payload = _payload(group)
            _scatter(world, number, blocks, _payload(group, layers))
            _gather(world, number, blocks, payload)
            return _layers(group, payload) == layers

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(there_and_back, jobs * 4))
        for number, blocks, layers in jobs:
            assert world.read(number, blocks) == layers

    def test_a_thread_begins_copies_before_earlier_ones_are_done(self) -> None:
        """The mover begins all copies of a batch before it waits for the first."""
        world = self.make()
        rng = random.Random(4)
        for number, group in enumerate(world.layout.groups):
            chunks = {blocks: [rng.randbytes(size) for size in group.layer_bytes] for blocks in world.chunks(number)}
            sources = {blocks: _payload(group, layers) for blocks, layers in chunks.items()}
            targets = {blocks: _payload(group) for blocks in chunks}
            for start, payloads in ((world.copier.scatter, sources), (world.copier.gather, targets)):
                fences = [start(world.request, number, blocks, payload) for blocks, payload in payloads.items()]
                for fence in fences:
                    _finish(world.copier, fence)
            assert {blocks: _layers(group, payload) for blocks, payload in targets.items()} == chunks

    def test_a_wrong_address_is_refused_before_a_byte_moves(self) -> None:
        """A bug in an adapter must become a failed transfer, not a copy to a wrong address."""
        world = self.make()
        before = world.everything()
        for number, group in enumerate(world.layout.groups):
            for blocks in world.wrong(number):
                payload = _payload(group)
                for copy in (_gather, _scatter):
                    assert _is_refused(copy, world, number, blocks, payload)
                assert payload == bytes([_FILLER]) * group.payload_bytes
        assert world.everything() == before


def _is_refused(
    copy: Callable[[CopierWorld, int, tuple[int, ...], memoryview], None],
    world: CopierWorld,
    group: int,
    blocks: tuple[int, ...],
    payload: memoryview,
) -> bool:
    try:
        copy(world, group, blocks, payload)
    except Exception:  # noqa: BLE001 - an error of any kind is a refusal
        return True
    return False


def _gather(world: CopierWorld, group: int, blocks: tuple[int, ...], payload: memoryview) -> None:
    _finish(world.copier, world.copier.gather(world.request, group, blocks, payload))


def _scatter(world: CopierWorld, group: int, blocks: tuple[int, ...], payload: memoryview) -> None:
    _finish(world.copier, world.copier.scatter(world.request, group, blocks, payload))


def _finish(copier: Copier, fence: Fence | None) -> None:
    until_s = time.monotonic() + _COPY_SECONDS_MAX
    while fence is not None and not copier.done(fence):
        assert time.monotonic() < until_s, "a copy did not end"
        time.sleep(_FENCE_WAIT_S)


def _payload(group: GroupLayout, layers: list[bytes] | None = None) -> memoryview:
    """Return a slot's payload with `layers` at their offsets and a filler everywhere else."""
    payload = memoryview(mmap.mmap(-1, group.payload_bytes))
    payload[:] = bytes([_FILLER]) * group.payload_bytes
    for offset, layer in zip(group.layer_offsets, layers or (), strict=False):
        payload[offset : offset + len(layer)] = layer
    return payload


def _layers(group: GroupLayout, payload: memoryview) -> list[bytes]:
    sizes = zip(group.layer_offsets, group.layer_bytes, strict=True)
    return [bytes(payload[offset : offset + size]) for offset, size in sizes]
