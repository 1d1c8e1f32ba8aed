"""Pages of SGLang's host pools come back byte-equal, through SGLang's controllers, and never wrong."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_engine import sglang_cpu
from engines import BACKEND, LAYOUTS, PAGE, Engine, engine, equal, latents_in_pages, mha, mla
from tests.axes import check_axes, misread, numbered
from tests.sealed_places import KINDS, sealed_place

from kvtier.connect.sglang.host_pools import describe
from kvtier.errors import ConfigError
from kvtier.layout import KvLayout
from kvtier.observe.metric_definitions import LOSSY_LOAD_TOKENS

pytestmark = pytest.mark.sglang_core

PROMPT = range(8 * PAGE)
LONGER = [*PROMPT, *range(9000, 9000 + 2 * PAGE)]
RANKS = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
Start = Callable[..., Engine]


def test_sglangs_own_file_backend_is_the_control(server: None, tmp_path: Path) -> None:
    """The harness drives SGLang's own backend to the same result."""
    with engine({"file_storage_path": str(tmp_path)}, backend="file") as own:
        stored, pages = own.backup(PROMPT)
        found = own.prefetch(LONGER)
    assert (stored, found.hit, found.completed) == (len(PROMPT), len(PROMPT), len(PROMPT))
    assert equal(found.pages, pages)


POOLS = [(mha, layout) for layout in LAYOUTS] + [(mla, layout) for layout in LAYOUTS[:3]]
"""Keys and values, and latents: one piece per page or layer."""


@pytest.mark.parametrize(("make", "layout"), POOLS)
def test_pages_come_back_byte_equal(start: Start, make: Callable[[str], Any], layout: str) -> None:
    """Backup and prefetch of a prompt whose end is new, in this engine and in the next one."""
    first = start(pools=make(layout))
    stored, pages = first.backup(PROMPT)
    found = first.prefetch(LONGER)
    assert (stored, found.hit, found.completed) == (len(PROMPT), len(PROMPT), len(PROMPT))
    assert equal(found.pages, pages)
    assert first.prefetch(range(500, 500 + 4 * PAGE)).hit == 0
    first.controller.detach_storage_backend()
    assert equal(start(pools=make(layout)).prefetch(PROMPT).pages, pages)


@pytest.mark.parametrize(
    ("layout", "values"), [*((layout, 8) for layout in LAYOUTS), ("page_first", 6), ("page_first_direct", 6)]
)
def test_the_axes_find_each_number_of_a_page(layout: str, values: int) -> None:
    """Numbers come from the device in SGLang's own order: [token, head, channel] of each layer."""
    device, host = mha(layout, layers=3, heads=2, dim=8, value_dim=values)
    numbers = numbered(3, 2, 2 * PAGE, 8)
    positions = torch.arange(2 * PAGE)
    for layer in range(3):
        keys, those = (torch.from_numpy(side[layer]).view(torch.bfloat16).transpose(0, 1) for side in numbers)
        device.k_buffer[layer][positions] = keys
        device.v_buffer[layer][positions] = those[..., :values]
    sglang_cpu.copy_to_host(host, device, positions, positions, "kernel")
    found = describe("kv", host, RANKS, positions[:PAGE])
    assert found is not None
    group = KvLayout(PAGE, (found.layout,)).of_class("int4").groups[0]
    (pieces,) = found.pieces(positions[PAGE:])
    payload = bytearray(group.payload_bytes)
    for offset, piece in zip(group.layer_offsets, pieces, strict=True):
        payload[offset : offset + len(piece)] = piece
    check_axes(group, payload, numbers, start=PAGE, value_channels=values)
    with pytest.raises(AssertionError, match=r"tokens of|heads of"):
        check_axes(misread(group, "token", "head"), payload, numbers, start=PAGE, value_channels=values)


def test_pages_without_axes_are_refused_in_a_class() -> None:
    """Pools of windows, and pages too short for scales."""
    for name, pool, message in (
        ("swa", mha("layer_first")[1], "does not define the arrangement of kv"),
        ("kv", mha("layer_first", page=8)[1], "has 8 tokens; int4 needs at least 16"),
        ("kv", mla("layer_first")[1], "no keys and values that may be stored with loss"),
        ("c4", latents_in_pages("c4")[1], "does not define the arrangement of bytes"),
    ):
        found = describe(name, pool, RANKS, torch.arange(pool.page_size))
        assert found is not None
        layout = KvLayout(pool.page_size, (found.layout,))
        with pytest.raises(ValueError, match=message):
            layout.of_class("int4")
        assert layout.of_class("none") == layout


def test_a_pool_that_lacks_an_attribute_has_no_axes() -> None:
    """As in another release. Exact engines need none."""
    pool = mha("page_first")[1]
    del pool.v_head_dim
    found = describe("kv", pool, RANKS, torch.arange(pool.page_size))
    assert found is not None
    layout = KvLayout(pool.page_size, (found.layout,))
    assert layout.of_class("none") == layout
    with pytest.raises(ValueError, match="does not define the arrangement of kv"):
        layout.of_class("int4")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss", "keys_off", "values_off"), [("k8v4", 0.014, 0.06), ("int4", 0.06, 0.12)])
def test_pages_of_a_class_come_back_near(
    start: Start, layout: str, loss: str, keys_off: float, values_off: float, tmp_path: Path
) -> None:
    """In the next engine, too; an engine without the class finds nothing."""
    settings = {"tiers": [f"directory:{tmp_path / 'store'}"], "store": {"loss": loss}}
    pools, prompt = partial(mha, layout, page=64), range(4 * 64)
    first = start(settings, pools=pools())
    stored, pages = first.backup(prompt)
    first.controller.detach_storage_backend()
    assert stored == len(prompt)
    sizes = [path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.stat().st_size > 4096]
    assert len(sizes) == 4
    assert sum(sizes) < (0.49 if loss == "k8v4" else 0.40) * sum(page.nbytes for page in pages)

    assert start(pools=pools()).prefetch(prompt).hit == 0
    found = start(settings, pools=pools()).prefetch(prompt)
    assert (found.hit, found.completed) == (len(prompt), len(prompt))
    for before, after in zip(pages, found.pages, strict=True):
        keys, values = (after.float() - before.float()).reshape(2, -1).std(1) / before.float().std()
        assert 0.001 < keys < keys_off
        assert 0.01 < values < values_off
    others = zip(pages, found.pages[1:], strict=False)
    assert all((after.float() - before.float()).std() > before.float().std() for before, after in others), "the control"
    if layout == "layer_first":
        pairs = zip(pages, found.pages, strict=True)
        same = [(after == before).view(2, 4, 64, -1).all((0, 1, 3)).nonzero().flatten() for before, after in pairs]
        assert [it.tolist() for it in same] == [[0, 1, 2, 3], [], [], []], "the prompt's first tokens stay exact"


@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_through_split_and_a_seal(start: Start, kind: str, tmp_path: Path) -> None:
    with sealed_place(kind, tmp_path / kind) as (settings, heads):
        first = start(settings, pools=mha("page_first"))
        stored, pages = first.backup(PROMPT)
        first.controller.detach_storage_backend()
        assert (stored, len(heads())) == (len(PROMPT), len(PROMPT) // PAGE)
        assert all(head.seal and 2 in head.codecs for head in heads())
        second = start(settings, pools=mha("page_first"))
        assert equal(second.prefetch(PROMPT).pages, pages)
        second.controller.detach_storage_backend()


def test_decode_context_parallelism_is_refused_as_sglang_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang attaches no storage from outside with it. When it does, our refusal can go."""
    from sglang.srt.managers import cache_controller

    from kvtier.connect.sglang import KvtierStorage

    with pytest.raises(ConfigError, match=r"dcp_size = 2 is not supported: .* allowed: 1"):
        KvtierStorage(SimpleNamespace(extra_config={"interface_v1": 1, "tiers": ["directory:/nowhere"]}, dcp_size=2))
    monkeypatch.setattr(cache_controller, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=2))
    controller = SimpleNamespace(enable_storage=False, host_memory_mode="full")
    with pytest.raises(NotImplementedError, match="HiCache L3 with DCP requires file or Mooncake storage"):
        cache_controller.HiCacheController.attach_storage_backend(controller, "dynamic")


@pytest.mark.parametrize("other", LAYOUTS[1:])
def test_another_layout_is_a_miss(start: Start, other: str, tmp_path: Path) -> None:
    """Pages of equal size, in another order of their bytes."""
    first = start(layout="layer_first" if other == "page_first" else "page_first")
    assert first.backup(PROMPT)[0] == len(PROMPT)
    first.controller.detach_storage_backend()
    assert start(layout=other).prefetch(PROMPT).hit == 0


def test_many_pages_go_in_several_batches(start: Start) -> None:
    """SGLang calls with at most 128 pages."""
    engine = start(pools=mha("page_first", tokens=300 * PAGE))
    prompt = range(300 * PAGE)
    stored, pages = engine.backup(prompt)
    found = engine.prefetch(prompt)
    assert (stored, found.completed) == (len(prompt), len(prompt))
    assert equal(found.pages, pages)


def test_a_salt_or_adapter_names_other_pages(start: Start) -> None:
    """SGLang seeds the page hash with both; it is their only trace."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    engine = start()
    engine.backup(PROMPT)
    for extra, salt in (("adapter", None), (None, "tenant")):
        seed = storage_namespace_seed(extra, salt)
        assert engine.storage.batch_exists(engine.controller.get_hash_str(list(PROMPT), seed, page_size=PAGE)) == 0
    plain = engine.controller.get_hash_str(list(PROMPT), storage_namespace_seed(None, None), page_size=PAGE)
    assert engine.storage.batch_exists(plain) == len(PROMPT) // PAGE


def test_metrics_of_sglang_and_of_kvtier(start: Start) -> None:
    """SGLang takes pages and bandwidth; kvtier's own metrics appear in the same registry."""
    from prometheus_client import REGISTRY

    engine = start(enable_storage_metrics=True)
    engine.backup(PROMPT)
    engine.prefetch(PROMPT)
    figures = engine.storage.get_stats()
    assert (figures.backup_pgs, figures.prefetch_pgs) == ([8], [8])
    assert min(figures.backup_bandwidth + figures.prefetch_bandwidth) > 0
    assert engine.storage.get_stats().backup_pgs == []
    labels = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0", "way": "write", "outcome": "done"}
    assert REGISTRY.get_sample_value("sglang:kvtier_objects_total", labels) == 8


@pytest.mark.parametrize("loss", ["none", "int4"])
def test_a_server_that_stores_kv_with_loss_says_so_and_that_no_salt_prevents_it(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path, loss: str
) -> None:
    settings = {"tiers": [f"directory:{tmp_path / 'store'}"], "store.loss": loss}
    first = start(settings, pools=mha("page_first"))
    _, pages = first.backup(PROMPT)
    first.controller.detach_storage_backend()
    second = start(settings, pools=mha("page_first"))
    found = second.prefetch(PROMPT).pages
    counted = second.storage._store.metrics.get(LOSSY_LOAD_TOKENS, loss="int4")  # type: ignore[union-attr]
    second.controller.detach_storage_backend()
    assert len(found) == len(pages)
    assert equal(found, pages) == (loss == "none")
    assert counted == (0 if loss == "none" else len(PROMPT))
    told = [it for it in caplog.messages if "with loss" in it or "demand exact KV" in it]
    assert len(told) == (0 if loss == "none" else 4), "two lines at each start"


def test_attach_and_detach_at_run_time(start: Start, tmp_path: Path) -> None:
    """A controller gets the backend again, and finds what it stored."""
    engine = start()
    controller: Any = engine.controller
    _, pages = engine.backup(PROMPT)
    controller.detach_storage_backend()
    assert not controller.enable_storage
    controller.attach_storage_backend(
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="the/model",
        storage_backend_extra_config={**BACKEND, "tiers": [f"directory:{tmp_path / 'store'}"]},
    )
    assert equal(engine.prefetch(PROMPT).pages, pages)


@pytest.mark.parametrize(("rank", "ranks", "is_latent"), [(0, 1, False), (0, 1, True), (1, 4, False), (3, 8, True)])
def test_sglangs_own_test_of_a_storage(
    server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, is_latent: bool
) -> None:
    """The batch test that SGLang ships for its Mooncake backend, with its configurations and its pool, on ours."""
    from sglang.srt.mem_cache.storage.mooncake_store import test_mooncake_store as theirs

    from kvtier.connect.sglang import KvtierStorage, host_pools

    stores: list[Any] = []

    class Ours(KvtierStorage):
        """Attached to their pool by the one call that they make."""

        def __init__(self, config: Any) -> None:
            tier = {"kind": "directory", "path": str(tmp_path / "store"), "shared": True}
            config.extra_config = {"interface_v1": 1, "tiers": [tier]}
            super().__init__(config)
            stores.append(self)

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            mem_pool_host.size = 1 << 16
            super().register_mem_pool_host(mem_pool_host)
            self.on_host_pools_registered()

    monkeypatch.setattr(theirs, "MooncakeStore", Ours)
    monkeypatch.setattr(host_pools, "POOLS", {"MockHostKVCache": frozenset({"page_first"})})
    config = theirs.make_hicache_storage_config(is_mla_model=is_latent, tp_rank=rank, tp_size=ranks)
    try:
        theirs.test_batch_operation(config)
    finally:
        stores[0].close()
