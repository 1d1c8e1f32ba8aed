"""The copier of the Transformers adapter keeps the contract of all copiers, for every shape that a cache can have."""

import itertools
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.axes import check_axes, misread, numbered
from tests.simulated_cuda import begin, installed, seen_by_host
from tiny_transformers import llama
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from kvtier.connect.transformers.caches import (
    CachedLayer,
    CacheShape,
    RecordingWindowLayer,
    Span,
    Spans,
    blank_spans,
    filled_cache,
    group_layers,
    recorded_spans,
)
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.support import inspect_cache
from kvtier.layout import History, Window
from kvtier.testing.copier_contract import CopierContract, CopierWorld
from kvtier.types import RequestId

pytestmark = pytest.mark.engine

CHUNK, ROW, PAD, ROWS = 10, 1, 3, 2
REQUEST = RequestId("row")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def shape(dtype: torch.dtype, device: torch.device = CPU) -> CacheShape:
    """Two layers with full attention, of different sizes, and two with windows, of different lengths."""
    sizes = [(8, 2, 5, 2, 5), (None, 3, 4, 3, 4), (None, 1, 6, 2, 7), (20, 2, 3, 2, 3)]
    return group_layers(None, [CachedLayer(number, *size, dtype, device) for number, size in enumerate(sizes)])


def noise(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randint(0, 256, (*sizes[:-1], sizes[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


def on_device(spans: Spans) -> Spans:
    return tuple(
        tuple(tuple(Span(*seen_by_host((span.keys, span.values)), span.start) for span in one) for one in group)
        for group in spans
    )


class World(CopierWorld):
    """Tensors of 60 columns: whole in the first group, in runs of several sizes in the others, and strange strides."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU) -> None:
        torch.manual_seed(5)
        self.shape = shape(dtype, device)
        cuts = [(0, 60), (0, 7, 40, 60), (0, 60)]
        self.spans: Spans = tuple(
            tuple(
                tuple(
                    Span(
                        noise(dtype, ROWS, one.key_heads, stop - start, one.key_dim),
                        # As a model gives it: [row, token, head, dim] seen as [row, head, token, dim].
                        noise(dtype, ROWS, stop - start, one.value_heads, one.value_dim).transpose(1, 2),
                        start,
                    )
                    for start, stop in itertools.pairwise(cut)
                )
                for one in group
            )
            for group, cut in zip(self.shape.groups, cuts, strict=True)
        )
        copier = CacheCopier(self.shape, self.shape.layout(CHUNK))
        copier.expose(REQUEST, ROW, PAD, self.spans if device is CPU else on_device(self.spans))
        super().__init__(copier, self.shape.layout(CHUNK), REQUEST)

    def chunks(self, group: int) -> list[tuple[int, ...]]:
        return [(20, 30), (0, 10), (40, 50), (10, 20)]

    def wrong(self, group: int) -> list[tuple[int, ...]]:
        return [(0,), (5, 5), (-3, 7), (0, 11), (9, 2), (0, 10, 20)]

    def _tensors(self, group: int, blocks: tuple[int, ...], *, keys: bool) -> list[list[torch.Tensor]]:
        """For each layer, one tensor [head, dim] for each token."""
        found = []
        for spans in self.spans[group]:
            columns = []
            for token in range(*blocks):
                span = next(span for span in spans if span.start <= PAD + token < span.stop)
                tensor = span.keys if keys else span.values
                columns.append(tensor[ROW, :, PAD + token - span.start])
            found.append(columns)
        return found

    def read(self, group: int, blocks: tuple[int, ...]) -> list[bytes]:
        keys, values = (self._tensors(group, blocks, keys=which) for which in (True, False))
        return [
            b"".join(torch.stack(part, dim=1).contiguous().view(torch.uint8).numpy().tobytes() for part in both)
            for both in zip(keys, values, strict=True)
        ]

    def fill(self, group: int, blocks: tuple[int, ...], layers: list[bytes]) -> None:
        keys, values = (self._tensors(group, blocks, keys=which) for which in (True, False))
        for *both, data in zip(keys, values, layers, strict=True):
            used = 0
            for part in both:
                size = sum(column.nbytes for column in part)
                whole = torch.frombuffer(bytearray(data[used : used + size]), dtype=torch.uint8).view(part[0].dtype)
                used += size
                for number, column in enumerate(part):
                    column.copy_(whole.view(column.shape[0], len(part), -1)[:, number])

    def everything(self) -> bytes:
        tensors = [
            tensor for group in self.spans for one in group for span in one for tensor in (span.keys, span.values)
        ]
        return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


class TestFloat32(CopierContract):
    def make(self) -> World:
        return World(torch.float32)


class TestBfloat16(CopierContract):
    def make(self) -> World:
        return World(torch.bfloat16)


class TestFloat8(CopierContract):
    def make(self) -> World:
        return World(torch.float8_e4m3fn)


class TestOnADevice(CopierContract):
    @pytest.fixture(autouse=True)
    def _device(self) -> Iterator[None]:
        with installed():
            yield

    def make(self) -> World:
        begin(1)
        return World(torch.float8_e4m3fn, CUDA)


def payload_of(world: World, group: int) -> memoryview:
    return memoryview(mmap.mmap(-1, world.layout.groups[group].payload_bytes))


def test_groups_are_cut_by_window_and_named_by_their_arrangement() -> None:
    layout = shape(torch.bfloat16).layout(CHUNK)
    assert [group.validity for group in layout.groups] == [History(), Window(7), Window(19)]
    head = "transformers/K[head,token,dim] V[head,token,dim]/"
    assert [group.pages for group in layout.groups] == [
        head + "bfloat16/K=3x4/V=3x4,bfloat16/K=1x6/V=2x7",
        head + "bfloat16/K=2x5/V=2x5",
        head + "bfloat16/K=2x3/V=2x3",
    ]
    assert layout.groups[0].layer_bytes == (CHUNK * 24 * 2, CHUNK * 20 * 2)
    assert layout.groups[0].runs[1] == (("keys", "bf16", CHUNK * 6 * 2), ("values", "bf16", CHUNK * 14 * 2))


def test_the_axes_find_each_number_of_the_librarys_cache() -> None:
    found = inspect_cache(llama().to(torch.bfloat16))
    layout = found.layout(80).of_class("int4")
    numbers = numbered(3, 2, 160, 12)
    cache = DynamicCache(config=found.config)
    for layer in range(3):
        keys, values = (torch.from_numpy(side[layer]).view(torch.bfloat16)[None] for side in numbers)
        cache.update(keys, values, layer)
    spans = recorded_spans(found, cache, 160)
    assert spans is not None
    copier = CacheCopier(found, layout)
    copier.expose(REQUEST, 0, 0, spans)
    payload = memoryview(mmap.mmap(-1, layout.groups[0].payload_bytes))
    copier.gather(REQUEST, 0, (80, 160), payload)
    check_axes(layout.groups[0], payload, numbers, start=80)
    with pytest.raises(AssertionError, match="tokens of"):
        check_axes(misread(layout.groups[0], "head", "token"), payload, numbers, start=80)


def test_a_chunk_that_is_not_all_there_is_not_gathered() -> None:
    world = World(torch.float32)
    with pytest.raises(LookupError, match="only 7 of 10 tokens"):
        world.copier.gather(REQUEST, 1, (50, 60), payload_of(world, 1))
    with pytest.raises(ValueError, match="not a full chunk of 10 tokens"):
        world.copier.gather(REQUEST, 0, (0, 9), payload_of(world, 0))
    with pytest.raises(LookupError, match="not exposed"):
        world.copier.gather(RequestId("other"), 0, (0, 10), payload_of(world, 0))


def test_forgotten_rows_are_not_touched_and_not_held() -> None:
    world = World(torch.float32)
    copier: Any = world.copier
    assert len(copier._rows) == 1
    copier.forget(REQUEST)
    copier.forget(REQUEST)
    assert len(copier._rows) == 0
    with pytest.raises(LookupError, match="not exposed"):
        copier.scatter(REQUEST, 0, (0, 10), payload_of(world, 0))


def test_a_scatter_fills_what_tensors_there_are() -> None:
    """A window's tensors begin inside a chunk, and a row may need a part of its last chunk only."""
    parts = blank_spans(shape(torch.float32), (0, PAD), 38)
    assert [[(span.start, span.stop) for (span,) in group] for group in parts] == [
        [(0, 38), (0, 38)],
        [(31, 38)],
        [(19, 38)],
    ]
    assert not parts[0][0][0].keys[1, :, :PAD].any(), "filler is finite"
    world = World(torch.float32)
    copier = CacheCopier(world.shape, world.layout)
    copier.expose(REQUEST, ROW, PAD, parts)
    for group in range(3):
        for start in (10, 20, 30):
            payload = payload_of(world, group)
            world.copier.gather(REQUEST, group, (start, start + 10), payload)
            copier.scatter(REQUEST, group, (start, start + 10), payload)
    for group, first in ((0, 10), (1, 31 - PAD), (2, 19 - PAD)):
        for (here,), there in zip(parts[group], world.spans[group], strict=True):
            for token in range(first, 38 - PAD):
                span = next(span for span in there if span.start <= PAD + token < span.stop)
                mine = here.keys[ROW, :, PAD + token - here.start]
                assert torch.equal(
                    mine.view(torch.int32), span.keys[ROW, :, PAD + token - span.start].view(torch.int32)
                )


def test_a_window_layer_remembers_all_and_shows_what_the_library_shows() -> None:
    torch.manual_seed(2)
    ours, theirs = RecordingWindowLayer(6), DynamicSlidingWindowLayer(sliding_window=6)
    given = [torch.randn(1, 2, count, 4) for count in (9, 1, 1, 3, 1)]
    for states in given:
        shown, expected = ours.update(states, 2 * states), theirs.update(states, 2 * states)
        assert torch.equal(shown[0], expected[0])
        assert torch.equal(shown[1], expected[1])
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
    assert [span.start for span in ours.recorded] == [0, 9, 10, 11, 14]
    everything = torch.cat([span.keys for span in ours.recorded], dim=-2)
    assert torch.equal(everything, torch.cat(given, dim=-2))


def test_a_slice_of_a_fused_projection_does_not_keep_it_alive() -> None:
    fused = torch.randn(1, 5, 3 * 8)
    window = RecordingWindowLayer(6)
    window.update(fused[..., 8:16].view(1, 5, 2, 4).transpose(1, 2), fused[..., 16:].view(1, 5, 2, 4).transpose(1, 2))
    assert window.recorded[0].keys.untyped_storage().nbytes() == 5 * 8 * 4


def test_a_cache_of_another_length_tells_nothing() -> None:
    found = inspect_cache(llama())
    cache = filled_cache(found, blank_spans(found, (0,), 5), 5)
    assert recorded_spans(found, cache, 6) is None
    assert recorded_spans(found, cache, 5) is not None
