"""The copier contract on the copier of tests and benchmarks. Engines' copiers run it in their own tests."""

import numpy as np
import pytest

from kvtier.layout import GroupLayout, History, KvLayout, State
from kvtier.testing.copier_contract import CopierContract, CopierWorld
from kvtier.testing.host_copier import HostCopier
from kvtier.types import RequestId

BLOCKS = 40
CHUNK_BLOCKS = 6


def _layout() -> KvLayout:
    # Layers of different sizes, none a multiple of the alignment, and a second group of one layer.
    history = GroupLayout(History(), tuple(CHUNK_BLOCKS * size for size in (1000, 4096, 24)), "test")
    state = GroupLayout(State(), (CHUNK_BLOCKS * 5001,), "test")
    return KvLayout(CHUNK_BLOCKS * 16, (history, state))


class HostWorld(CopierWorld):
    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        layout = _layout()
        self.views = [
            [draw.integers(1, 256, (BLOCKS, size // CHUNK_BLOCKS), np.uint8) for size in group.layer_bytes]
            for group in layout.groups
        ]
        super().__init__(HostCopier(layout, self.views), layout)

    def chunks(self, group: int) -> list[tuple[int, ...]]:
        return [
            tuple(range(6)),  # one run
            tuple(range(34, 40)),  # one run, up to the last block
            (10, 11, 12, 13, 30, 31),  # two runs
            (29, 7, 19, 9, 16, 26),  # scattered
            (25, 24, 23, 22, 21, 20),  # backwards
        ]

    def wrong(self, group: int) -> list[tuple[int, ...]]:
        return [(0, 1, 2, 3, 4, BLOCKS), (-1, 0, 1, 2, 3, 4), (), tuple(range(7)), (1 << 62, 0, 0, 0, 0, 0)]

    def read(self, group: int, blocks: tuple[int, ...]) -> list[bytes]:
        return [b"".join(layer[block].tobytes() for block in blocks) for layer in self.views[group]]

    def fill(self, group: int, blocks: tuple[int, ...], layers: list[bytes]) -> None:
        for layer, content in zip(self.views[group], layers, strict=True):
            rows = np.frombuffer(content, np.uint8).reshape(len(blocks), -1)
            for block, row in zip(blocks, rows, strict=True):
                layer[block] = row

    def everything(self) -> bytes:
        return b"".join(layer.tobytes() for layers in self.views for layer in layers)


class TestHostCopier(CopierContract):
    def make(self) -> CopierWorld:
        return HostWorld()


class OneAtATimeCopier(HostCopier):
    """Its buffer has room for one copy, which ends when its fence is polled."""

    def gather(self, request, group, blocks, payload):
        self.waiting = lambda: HostCopier.gather(self, request, group, blocks, payload)
        return "fence"

    def done(self, fence):
        self.waiting()
        return True


def test_the_suite_finds_a_copier_that_makes_one_copy_at_a_time() -> None:
    world = HostWorld()
    world.copier = OneAtATimeCopier(world.layout, world.views)
    contract = TestHostCopier()
    contract.make = lambda: world
    contract.test_gather_puts_each_layer_at_its_offset()
    with pytest.raises(AssertionError):
        contract.test_a_thread_begins_copies_before_earlier_ones_are_done()


@pytest.mark.parametrize("blocks", [(3, 4), (9, 2, 5)], ids=["run", "scattered"])
def test_a_short_chunk_carries_nothing_of_the_one_before(blocks: tuple[int, ...]) -> None:
    world = HostWorld()
    group = world.layout.groups[0]
    payload = memoryview(bytearray(b"\xa5" * group.payload_bytes))
    world.copier.gather(RequestId("r"), 0, blocks, payload)
    for offset, size, layer in zip(group.layer_offsets, group.layer_bytes, world.read(0, blocks), strict=True):
        assert payload[offset : offset + size] == layer + bytes(size - len(layer))


def test_a_short_chunk_leaves_other_blocks_alone() -> None:
    world = HostWorld()
    before, old = world.everything(), world.read(0, (3, 4))
    world.copier.scatter(RequestId("r"), 0, (3, 4), memoryview(bytearray(world.layout.groups[0].payload_bytes)))
    assert not any(any(layer) for layer in world.read(0, (3, 4)))
    world.fill(0, (3, 4), old)
    assert world.everything() == before
