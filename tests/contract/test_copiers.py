"""Every copier of ours against the contract, and what is special to each."""

import tracemalloc

import numpy as np
import pytest

from kvtier.device.cpu import KEEP_LOCK_BYTES_MAX, CpuCopier
from kvtier.layout import GroupLayout, History, KvLayout, State
from kvtier.testing.copier import CopierContract, CopierWorld
from kvtier.types import RequestId

BLOCKS = 40
CHUNK_BLOCKS = 6


def _layout(scale: int = 1) -> KvLayout:
    # Layers of different sizes, none a multiple of the alignment, and a second group of one layer.
    history = GroupLayout(History(), tuple(CHUNK_BLOCKS * size * scale for size in (1000, 4096, 24)), "test")
    state = GroupLayout(State(), (CHUNK_BLOCKS * 5001 * scale,), "test")
    return KvLayout(CHUNK_BLOCKS * 16, (history, state))


def _memory(rng: np.random.Generator, block_bytes: int, gap: int) -> np.ndarray:
    return rng.integers(1, 256, (BLOCKS, block_bytes + gap), np.uint8)


class CpuWorld(CopierWorld):
    """`gap` bytes lie between one block and the next, as in an engine that interleaves something else.

    Small chunks and large ones are copied in different ways; `scale` makes them larger.
    """

    def __init__(self, gap: int = 0, scale: int = 1) -> None:
        rng = np.random.default_rng(1)
        layout = _layout(scale)
        self.memory = [
            [_memory(rng, size // CHUNK_BLOCKS, gap) for size in group.layer_bytes] for group in layout.groups
        ]
        self.views = [[layer[:, : layer.shape[1] - gap] for layer in layers] for layers in self.memory]
        super().__init__(CpuCopier(layout, self.views), layout)

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
        return b"".join(layer.tobytes() for layers in self.memory for layer in layers)


class TestCpuCopier(CopierContract):
    def make(self) -> CopierWorld:
        return CpuWorld()


class TestCpuCopierOfLargeChunks(CopierContract):
    def make(self) -> CopierWorld:
        world = CpuWorld(scale=20)
        assert all(sum(group.layer_bytes) > KEEP_LOCK_BYTES_MAX for group in world.layout.groups)
        return world


class TestCpuCopierWithGaps(CopierContract):
    def make(self) -> CopierWorld:
        return CpuWorld(gap=8)


@pytest.mark.parametrize("scale", [1, 50])
@pytest.mark.parametrize("blocks", [(3, 4), (9, 2, 5)], ids=["run", "scattered"])
def test_a_short_chunk_carries_nothing_of_the_one_before(blocks: tuple[int, ...], scale: int) -> None:
    world = CpuWorld(scale=scale)
    group = world.layout.groups[0]
    payload = memoryview(bytearray(b"\xa5" * group.payload_bytes))
    world.copier.gather(RequestId("r"), 0, blocks, payload)
    for offset, size, layer in zip(group.layer_offsets, group.layer_bytes, world.read(0, blocks), strict=True):
        assert payload[offset : offset + size] == layer + bytes(size - len(layer))


def test_a_short_chunk_leaves_other_blocks_alone() -> None:
    world = CpuWorld()
    before, old = world.everything(), world.read(0, (3, 4))
    world.copier.scatter(RequestId("r"), 0, (3, 4), memoryview(bytearray(world.layout.groups[0].payload_bytes)))
    assert not any(any(layer) for layer in world.read(0, (3, 4)))
    world.fill(0, (3, 4), old)
    assert world.everything() == before


def test_blocks_with_gaps_are_not_copied_as_a_whole_first() -> None:
    memory = [np.zeros((1000, 20 * 1000 + 8), np.uint8), np.zeros((1000, 20 * 4096), np.uint8)]
    layout = KvLayout(96, (GroupLayout(History(), (6 * 20 * 1000, 6 * 20 * 4096), "test"),))
    copier = CpuCopier(layout, [[memory[0][:, :-8], memory[1]]])
    payload = memoryview(bytearray(layout.groups[0].payload_bytes))
    tracemalloc.start()
    try:
        copier.gather(RequestId("r"), 0, (29, 7, 19, 9, 16, 26), payload)
        copier.scatter(RequestId("r"), 0, (29, 7, 19, 9, 16, 26), payload)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000


def test_no_such_group_or_too_small_a_payload_is_refused() -> None:
    world = CpuWorld()
    payload = memoryview(bytearray(world.layout.groups[0].payload_bytes))
    for group in (-1, 2):
        with pytest.raises(ValueError, match="no KV group"):
            world.copier.gather(RequestId("r"), group, tuple(range(6)), payload)
    with pytest.raises(ValueError, match="a payload of group 0 has at least"):
        world.copier.scatter(RequestId("r"), 0, tuple(range(6)), payload[:-8000])


def _blocks(shape: tuple[int, ...], dtype: type = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([_blocks((4, 100))], "1 arrays of blocks for 2 layers"),
        ([_blocks((4, 100)), _blocks((4, 100), np.int8)], "layer 1: blocks must be uint8"),
        ([_blocks((4, 100)), _blocks((4, 50, 2))], "layer 1: blocks must be uint8"),
        ([_blocks((4, 100)), _blocks((0, 100))], "layer 1: blocks must be uint8"),
        ([_blocks((4, 100)), _blocks((4, 200))[:, ::2]], "layer 1: each block must be writable and without gaps"),
        ([_blocks((4, 100)), np.broadcast_to(_blocks((1, 100)), (4, 100))], "layer 1: each block must be writable"),
        ([_blocks((4, 100)), _blocks((4, 70))], "layer 1: 200 bytes are no whole number of 70-byte blocks"),
        ([_blocks((4, 100)), _blocks((4, 50))], "as many blocks in every layer"),
    ],
)
def test_blocks_that_do_not_fit_the_layout_are_refused_at_once(layers: list[np.ndarray], message: str) -> None:
    layout = KvLayout(32, (GroupLayout(History(), (200, 200), "test"),))
    with pytest.raises(ValueError, match=message):
        CpuCopier(layout, [layers])


def test_groups_that_do_not_fit_the_layout_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="1 groups of blocks for the 2 groups"):
        CpuCopier(_layout(), [CpuWorld().views[0]])


def test_the_layer_with_the_fewest_blocks_says_which_there_are() -> None:
    layout = KvLayout(32, (GroupLayout(History(), (200, 200), "test"),))
    copier = CpuCopier(layout, [[_blocks((9, 100)), _blocks((4, 100))]])
    payload = memoryview(bytearray(layout.groups[0].payload_bytes))
    copier.gather(RequestId("r"), 0, (0, 3), payload)
    with pytest.raises(ValueError, match="numbered 0 to 3"):
        copier.gather(RequestId("r"), 0, (0, 4), payload)
