"""Every byte of a chunk comes from, and goes to, the page that vLLM means, in every layout that vLLM has."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import rig, simulated_cuda
from tests.axes import check_axes, misread, numbered
from tests.vllm_recorded import Recorded, recorded
from tests.vllm_world import BLOCKS, PAGE_ORDER, VllmWorld, attended, gathered, made, payload_of

from kvtier.config.sections import StoreConfig
from kvtier.connect.vllm.geometry import SKIP, UNDIVIDED, DcpShards, Geometry
from kvtier.connect.vllm.worker.copier import BlockCopier, open_copier
from kvtier.connect.vllm.worker.cpu_copy import BlockRun, CpuPageCopy, runs_of
from kvtier.connect.vllm.worker.cuda_copy import CudaPageCopy
from kvtier.connect.vllm.worker.pages import engine_pages
from kvtier.errors import UnsupportedModelError
from kvtier.keys.chain import Chain
from kvtier.layout import ALIGNMENT
from kvtier.runtime.open import open_session
from kvtier.runtime.session import Session
from kvtier.testing.copier_contract import CopierContract, CopierWorld
from kvtier.types import Prefix, RequestId

REQUEST = RequestId("S0/x")


class TestLlama(CopierContract):
    def make(self) -> CopierWorld:
        return VllmWorld(recorded("llama32", BLOCKS))


class TestMla(CopierContract):
    def make(self) -> CopierWorld:
        return VllmWorld(recorded("mla", BLOCKS))


class TestSlidingWindow(CopierContract):
    """Six groups over the same bytes."""

    def make(self) -> CopierWorld:
        return VllmWorld(recorded("swa_win100", BLOCKS))


class TestStates(CopierContract):
    """Pages with padding behind them, over the bytes of attention."""

    def make(self) -> CopierWorld:
        return VllmWorld(recorded("gdn", BLOCKS))


@pytest.fixture
def simulated() -> Iterator[None]:
    with simulated_cuda.installed():
        simulated_cuda.begin(part_bytes=1 << 30)  # races are looked for elsewhere
        yield


@pytest.mark.usefixtures("simulated")
class TestStatesOnADevice(CopierContract):
    def make(self) -> CopierWorld:
        return VllmWorld(recorded("gdn", BLOCKS), CudaPageCopy)


@pytest.mark.usefixtures("simulated")
class TestSlidingWindowOnADevice(CopierContract):
    def make(self) -> CopierWorld:
        return VllmWorld(recorded("swa_win100", BLOCKS), CudaPageCopy)


def in_another_order(order: tuple[int, ...]) -> Recorded:
    engine = recorded("llama32", BLOCKS)
    group = engine.config.kv_cache_groups[0]
    group.layer_names = [group.layer_names[number] for number in order]
    return engine


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("copy", [CpuPageCopy, CudaPageCopy])
@pytest.mark.parametrize(
    "engine",
    [
        *(pytest.param(partial(made, layout), id=layout) for layout in PAGE_ORDER),
        *(
            pytest.param(partial(made, layout, parts), id=f"{layout} in {parts}")
            for layout, parts in (("LBHNC", 2), ("LBNHC", 4), ("LHBNC", 2))
        ),
        *(
            pytest.param(partial(in_another_order, order), id=f"order {order}")
            for order in ((0, 1, 3, 2), (3, 2, 1, 0), (0, 1, 3))
        ),
    ],
)
def test_every_layout_is_read_and_written_as_it_says(engine, copy):
    """Heads outside of blocks, layers inside of them, blocks cut by the kernel; layers in any order in memory."""

    class TestLayout(CopierContract):
        def make(self) -> CopierWorld:
            return VllmWorld(engine(), copy)

    contract = TestLayout()
    contract.test_gather_puts_each_layer_at_its_offset()
    contract.test_scatter_gives_the_engine_each_layer()
    contract.test_scatter_touches_no_other_block()


# ---- axes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "parts"), [*((layout, 1) for layout in PAGE_ORDER), ("LBHNC", 2), ("LBNHC", 4), ("BLNHC", 2)]
)
def test_the_axes_find_each_number_in_every_layout(layout, parts):
    numbers = numbered(3, 2, 256, 9)
    found, payload = gathered(attended(layout, parts), numbers)
    group = found.of_class("int4").groups[0]
    check_axes(group, payload, numbers)
    with pytest.raises(AssertionError, match=r"tokens of|heads of"):
        check_axes(misread(group, "head", "token"), payload, numbers)


def _change(engine: Recorded, **fields: Any) -> Recorded:
    vars(engine.config.kv_cache_groups[0].kv_cache_spec).update(fields)
    return engine


@pytest.mark.parametrize(
    ("engine", "shards"),
    [
        pytest.param(lambda: attended("LBHNC", backend="CPU_ATTN"), UNDIVIDED, id="pages that a CPU packs"),
        pytest.param(lambda: attended("LBHNC", backend="OTHER"), UNDIVIDED, id="a backend that nobody has read"),
        pytest.param(lambda: attended("LHBNC", 2), UNDIVIDED, id="parts of a block within a head"),
        pytest.param(lambda: _change(attended("LBHNC"), head_size_v=8), UNDIVIDED, id="values of another size"),
        pytest.param(lambda: _change(attended("LBHNC"), num_kv_heads=4), UNDIVIDED, id="slots that are not heads"),
        pytest.param(lambda: attended("LBHNC"), DcpShards(2), id="tokens on several ranks"),
    ],
)
def test_an_arrangement_that_is_not_certain_has_no_axes(engine, shards):
    found = engine()
    geometry = Geometry.of(found.config, shards=shards)
    layout = engine_pages(geometry, found.config, found.tensors(), found.layers).layout
    with pytest.raises(ValueError, match=r"does not define the arrangement of kv in pages '1 \* 3 layers"):
        layout.of_class("int4")
    assert layout.of_class("none") == layout


class Memory:
    """The KV memory of an engine with a GPU's backend, and 16 of its blocks: two chunks."""

    def __init__(self, layout: str, seed: int) -> None:
        engine = attended(layout, channels=64)
        self.geometry, self.tensors = Geometry.of(engine.config), engine.tensors()
        self.pages = engine_pages(self.geometry, engine.config, self.tensors, engine.layers)
        self.ids = random.Random(seed).sample(range(1, BLOCKS), 16)

    @property
    def numbers(self) -> torch.Tensor:
        """The numbers of these blocks: [side, layer, token, head, channel]."""
        layers = torch.stack([tensor[self.ids] for tensor in self.tensors.values()])
        return layers.float().transpose(2, 3).flatten(1, 2).unflatten(-1, (2, 64)).movedim(3, 0)

    @contextmanager
    def opened(self, directory: Path, loss: Any) -> Iterator[tuple[Session, Prefix]]:
        """A session, and the prefix of the chunks."""
        config = replace(rig.config(directory, host_chunks=200), store=StoreConfig(loss=loss))
        copier = BlockCopier(self.pages, CpuPageCopy(self.pages))
        kv = open_session(config, self.pages.layout, bytes(32), copier)
        chain = Chain(kv.root, 256)
        chain.extend(list(range(512)))
        yield kv.session, chain.prefix()
        assert kv.session.close(rig.DEADLINE_S)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
@pytest.mark.parametrize(("loss", "keys_off", "values_off"), [("k8v4", 0.016, 0.07), ("int4", 0.07, 0.14)])
def test_in_a_class_chunks_come_back_near_the_computed_numbers(layout, loss, keys_off, values_off, tmp_path):
    first, second, exact = (Memory(layout, seed) for seed in range(3))
    for tensor in first.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    with first.opened(tmp_path, loss) as (session, prefix):
        rig.stored(session, "a", prefix, first.geometry.sources(range(2), [first.ids]))
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.stat().st_size > ALIGNMENT]
    assert len(sizes) == 2
    assert sum(sizes) < (0.42 if loss == "k8v4" else 0.32) * 2 * first.pages.layout.groups[0].payload_bytes

    with exact.opened(tmp_path, "none") as (session, prefix):
        assert rig.looked_up(session, "b", prefix).tokens == 0
    with second.opened(tmp_path, loss) as (session, prefix):
        assert rig.looked_up(session, "c", prefix).tokens == 512
        places = second.geometry.targets(512, [second.ids])
        assert rig.loaded(session, "c", prefix, 512, places).tokens == 512
    off = (second.numbers - first.numbers).square().mean((1, 3, 4)).sqrt()  # [side, token]
    assert not off[:, :4].any(), "the prompt's first tokens stay exact"
    assert off[:, 4:].amin() > 0
    assert off[0].amax() < keys_off
    assert off[1].amax() < values_off
    assert (first.numbers.roll(1, 2) - first.numbers).square().mean().sqrt() > 1, (
        "the control: other tokens are farther"
    )


# ---- shares of the tokens ----------------------------------------------------------------------------------------


def latents(block: int) -> Recorded:
    """An engine with latents, in blocks of other sizes."""
    engine = recorded("mla", BLOCKS)
    spec, (tensor,) = engine.config.kv_cache_groups[0].kv_cache_spec, engine.config.kv_cache_tensors
    spec.block_size = spec.num_states = block
    tensor.block_stride = block * 1152
    tensor.layer_stride = BLOCKS * tensor.block_stride
    tensor.size = 2 * tensor.layer_stride
    for number, view in enumerate(engine.views.values()):
        view["shape"], view["stride"] = [BLOCKS, 1, block, 576], [block * 576, block * 576, 576, 1]
        view["offset"] = number * tensor.layer_stride // 2
    return engine


UNTOUCHED = 0x0101
"""What recorded tensors hold."""


class Holder:
    """One rank of an engine with latents, and the rows of its tokens, by vLLM's own arithmetic of slots.

    Args:
        block: tokens of a block on one rank.
        shards: the division of tokens.
        rank: number in the DCP group.
        copy: copies on its device.
    """

    def __init__(self, block: int, shards: DcpShards, rank: int, copy: Any = CpuPageCopy) -> None:
        engine = latents(block)
        self.block, self.shards, self.rank, self.tensors = block, shards, rank, engine.tensors()
        tensors: Any = self.tensors
        if copy is CudaPageCopy:
            tensors = dict(zip(tensors, simulated_cuda.seen_by_host(tensors.values()), strict=True))
        self.geometry = Geometry.of(engine.config, 512, shards)
        pages = engine_pages(self.geometry, engine.config, tensors, engine.layers)
        self.copier, self.layout = BlockCopier(pages, copy(pages)), pages.layout
        count = 512 // (block * shards.ranks)
        self.blocks = tuple(random.Random(block + rank).sample(range(1, BLOCKS), count))

    def rows(self) -> dict[tuple[int, int], torch.Tensor]:
        """The row of each (layer, token) on this rank, as in `ComputeSlotMappingKernel` of vLLM 0.32."""
        size, interleave = self.shards.ranks, self.shards.interleave
        found: dict[tuple[int, int], torch.Tensor] = {}
        for token in range(512):
            number, offset = divmod(token, self.block * size)
            if offset // interleave % size == self.rank:
                local = offset // (size * interleave) * interleave + offset % interleave
                for layer, tensor in enumerate(self.tensors.values()):
                    found[layer, token] = tensor[self.blocks[number], 0, local].view(torch.int16)
        return found

    def held(self) -> list[int]:
        return [share for share in range(self.shards.shares) if share % self.shards.ranks == self.rank]

    def move(self, act: str, share: int, payload: memoryview) -> None:
        fence = getattr(self.copier, act)(REQUEST, share, self.blocks, payload)
        while fence is not None and not self.copier.done(fence):
            pass


def row_of(layer: int, token: int) -> torch.Tensor:
    return torch.arange(576, dtype=torch.int16) + 1000 * layer + 7 * token


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("interleave", "copy"), [(1, CpuPageCopy), (4, CpuPageCopy), (4, CudaPageCopy)])
def test_a_share_has_the_same_bytes_and_name_whatever_ranks_and_blocks_hold_it(interleave, copy):
    shapes = [(16, 1), (32, 1), (16, 2), (64, 2), (16, 4), (8, 4)]
    payloads: list[memoryview] = []
    digests: list[bytes] = []
    for block, size in shapes:
        shards = DcpShards(size, interleave, 4)
        ranks = [Holder(block, shards, rank, copy) for rank in range(size)]
        mine: dict[int, memoryview] = {}
        for rank in ranks:
            for (layer, token), row in rank.rows().items():
                row.copy_(row_of(layer, token))
            for share in rank.held():
                assert share not in mine
                mine[share] = payload_of(rank.layout.groups[share].payload_bytes)
                rank.move("gather", share, mine[share])
                digests.append(rank.layout.digest(share))
        assert sorted(mine) == list(range(4))
        payloads = payloads or [mine[share] for share in range(4)]
        assert [mine[share] for share in range(4)] == payloads, (block, size)
    assert len(set(digests)) == 1
    for share, payload in enumerate(payloads):
        tokens = [token for token in range(512) if token // interleave % 4 == share]
        for layer, start in enumerate(Holder(16, DcpShards(1, interleave, 4), 0).layout.groups[share].layer_offsets):
            found = torch.frombuffer(payload[start : start + 128 * 1152], dtype=torch.int16).view(128, 576)
            assert torch.equal(found, torch.stack([row_of(layer, token) for token in tokens]))

    for block, size in shapes:
        for rank in range(size):
            empty = Holder(block, DcpShards(size, interleave, 4), rank, copy)
            for share in empty.held():
                empty.move("scatter", share, payloads[share])
            for (layer, token), row in empty.rows().items():
                assert torch.equal(row, row_of(layer, token))
                row.fill_(UNTOUCHED)
            assert all(bool((tensor.view(torch.int16) == UNTOUCHED).all()) for tensor in empty.tensors.values())


# ---- what is skipped ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("copy", [CpuPageCopy, CudaPageCopy])
@pytest.mark.parametrize("case", ["llama32", "swa_win100", "gdn"])
def test_resident_blocks_are_not_written(case, copy):
    world = VllmWorld(recorded(case, BLOCKS), copy)
    for group, layout in enumerate(world.layout.groups):
        blocks = world.chunks(group)[1]
        address = tuple(SKIP if position % 3 == 0 else block for position, block in enumerate(blocks))
        before = world.read(group, blocks)
        payload = payload_of(layout.payload_bytes)
        payload[:] = random.Random(3).randbytes(len(payload))
        _ended(world.copier, world.copier.scatter(REQUEST, group, address, payload))
        after = world.read(group, blocks)
        for number, (name, ids) in enumerate(world.layers(group, address)):
            size = layout.layer_bytes[number] // len(ids)
            found = bytes(payload[layout.layer_offsets[number] :][: layout.layer_bytes[number]])
            for position, block in enumerate(ids):
                piece = slice(position * size, (position + 1) * size)
                wanted = before[number] if block == SKIP else found
                assert after[number][piece] == wanted[piece], name


def _ended(copier: Any, fence: Any) -> None:
    while fence is not None and not copier.done(fence):
        time.sleep(1e-4)


def test_what_is_not_there_cannot_be_stored():
    world = VllmWorld(recorded("llama32", BLOCKS))
    with pytest.raises(ValueError, match="cannot be stored"):
        world.copier.gather(REQUEST, 0, (SKIP, 1, 2, 3, 4, 5, 6, 7), payload_of(1 << 20))


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([5], [(0, 5, 1)]),
        ([5, 6, 7], [(0, 5, 3)]),
        ([7, 6, 5], [(0, 7, 1), (1, 6, 1), (2, 5, 1)]),
        ([SKIP, SKIP, 3, 4, 9], [(2, 3, 2), (4, 9, 1)]),
        ([SKIP, 1, 2, SKIP], [(1, 1, 2)]),
        ([SKIP], []),
    ],
)
def test_neighbouring_blocks_are_copied_as_one(ids, runs):
    assert runs_of(ids) == [BlockRun(*run) for run in runs]


# ---- where the pages are -----------------------------------------------------------------------------------------


def test_the_worker_names_what_wrote_the_pages():
    engine = recorded("gdn", BLOCKS)
    opened = open_copier(Geometry.of(engine.config), engine.config, engine.tensors(), engine.layers)
    states, history = (group.pages for group in opened.pages.layout.groups)
    assert "GDN_ATTN/3x512:bfloat16+4x64x64:float32 GDN_ATTN:" in states
    assert history.endswith(f"H=2/N=256/C=256 CPU_ATTN:vec:{torch.backends.cpu.get_cpu_capability()}")
    assert opened.pages.device.type == "cpu"


def test_a_block_that_the_kernel_cuts_has_another_name():
    names = [
        engine_pages(Geometry.of(engine.config), engine.config, engine.tensors(), engine.layers).layout.groups[0].pages
        for engine in (made("LBHNC"), made("LBHNC", 2))
    ]
    assert names[1] == f"{names[0]} in 2 parts"


def _move(engine: Recorded, **fields: Any) -> None:
    for name, value in fields.items():
        for view in engine.views.values():
            view[name] = value


@pytest.mark.parametrize(
    ("breach", "message"),
    [
        (lambda engine: setattr(engine.config.kv_cache_tensors[0], "offset", 64), "begins -64 bytes after"),
        (lambda engine: setattr(engine.config.kv_cache_tensors[0], "layer_stride", 4096), "not in one allocation"),
        (lambda engine: setattr(engine.config.kv_cache_tensors[0], "block_stride", 4096), r"\(16384, 16384\) instead"),
        (lambda engine: _move(engine, shape=[BLOCKS, 1, 32, 128]), r"\(16384, 8192\) instead of \(16384, 16384\)"),
        (lambda engine: _move(engine, stride=[8192, 4096, 1, 32]), "KV of shape"),
        (lambda engine: _move(engine, shape=[BLOCKS, 64, 128], stride=[8192, 128, 1]), "KV is .* allowed: a tensor"),
    ],
)
def test_a_view_that_disagrees_with_the_configuration_is_refused(breach, message):
    engine = recorded("llama32", BLOCKS)
    geometry, tensors = Geometry.of(engine.config), engine.tensors()
    breach(engine)
    with pytest.raises(UnsupportedModelError, match=message):
        engine_pages(geometry, engine.config, engine.tensors() if "KV" in message or "8192" in message else tensors, {})


def test_a_layer_without_a_tensor_is_refused():
    engine = recorded("llama32", BLOCKS)
    tensors = engine.tensors()
    del tensors["model.layers.2.self_attn.attn"]
    with pytest.raises(UnsupportedModelError, match=r"no KV tensor for layer model\.layers\.2"):
        engine_pages(Geometry.of(engine.config), engine.config, tensors, engine.layers)


def test_an_allocation_may_begin_within_a_tensors_storage():
    engine = recorded("llama32", BLOCKS)
    memory = torch.zeros(engine.config.kv_cache_tensors[0].size + 4096, dtype=torch.uint8)[4096:]
    tensors = {
        name: memory.view(torch.bfloat16).as_strided(view["shape"], view["stride"], 2048 + view["offset"])
        for name, view in engine.views.items()
    }
    opened = open_copier(Geometry.of(engine.config), engine.config, tensors, engine.layers)
    payload = payload_of(opened.pages.layout.groups[0].payload_bytes)
    tensors["model.layers.3.self_attn.attn"][5] = 3.0
    opened.gather(REQUEST, 0, (5, 6, 7, 8, 9, 10, 11, 12), payload)
    start = opened.pages.layout.groups[0].layer_offsets[3]
    assert torch.frombuffer(payload[start : start + 16384], dtype=torch.bfloat16).eq(3.0).all()


# ---- a real device -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ["llama32", "swa_win100", "gdn", "mla"])
def test_a_chunk_goes_to_a_gpu_and_back(case):
    engine = recorded(case, BLOCKS)
    opened = open_copier(Geometry.of(engine.config), engine.config, _on_gpu(engine), engine.layers)
    for group, layout in enumerate(opened.pages.layout.groups):
        size = sum(table.blocks for table in Geometry.of(engine.config).groups[group].tables)
        source, target = tuple(range(1, 1 + size)), tuple(range(2 * size, size, -1))
        out, back = payload_of(layout.payload_bytes), payload_of(layout.payload_bytes)
        out[:] = random.Random(group).randbytes(len(out))
        for start, blocks, payload in (
            (opened.scatter, target, out),
            (opened.gather, target, back),
            (opened.gather, source, payload_of(layout.payload_bytes)),
        ):
            _ended(opened, start(REQUEST, group, blocks, payload))
        for offset, size_bytes in zip(layout.layer_offsets, layout.layer_bytes, strict=True):
            assert back[offset : offset + size_bytes] == out[offset : offset + size_bytes]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_wait_for_a_noted_step():
    """A draft model that still runs when the step's output has returned."""
    engine = recorded("llama32", BLOCKS)
    tensors = _on_gpu(engine)
    opened = open_copier(Geometry.of(engine.config), engine.config, tensors, engine.layers)
    layer, payload = "model.layers.3.self_attn.attn", payload_of(opened.pages.layout.groups[0].payload_bytes)
    start = opened.pages.layout.groups[0].layer_offsets[3]
    for number in (3.0, 4.0):  # the first copy allocates the stream
        torch.cuda._sleep(200_000_000)
        tensors[layer][5] = number
        opened.note_step()
        _ended(opened, opened.gather(REQUEST, 0, (5, 6, 7, 8, 9, 10, 11, 12), payload))
        assert torch.frombuffer(payload[start : start + 16384], dtype=torch.bfloat16).eq(number).all()


def _on_gpu(engine: Recorded) -> dict[str, torch.Tensor]:
    memory = torch.ones(max(tensor.size for tensor in engine.config.kv_cache_tensors), dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()  # copies wait for noted steps only
    return {
        name: memory.view(getattr(torch, view["dtype"])).as_strided(view["shape"], view["stride"], view["offset"])
        for name, view in engine.views.items()
    }
