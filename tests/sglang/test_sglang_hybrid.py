"""Models with several pools: sliding windows, recurrent states and compressed latents, through SGLang's controller."""

import contextlib
import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import (
    PAGE,
    Engine,
    buffers,
    chain,
    compressor_states,
    content_of,
    equal,
    hybrid,
    indexer,
    latents_in_pages,
    mamba,
    mha,
    mla,
)
from sglang.srt.mem_cache import pool_host
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache

from kvtier.connect.sglang.host_pools import POOLS as POOL_KINDS
from kvtier.connect.sglang.host_pools import describe
from kvtier.errors import ConfigError

pytestmark = pytest.mark.sglang_core

PAGES = 8
PROMPT = range(PAGES * PAGE)
LONGER = [*PROMPT, *range(9000, 9000 + 2 * PAGE)]
TRAILING, ALL = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES
StartHybrid = Callable[..., Engine]


@pytest.fixture
def start_hybrid(server: None, tmp_path: Path) -> Iterator[StartHybrid]:
    """Starts controllers with several pools; detaches them at the end."""
    with ExitStack() as stack:

        def begin(further: dict[Any, Any], pools: Any = None, store: str = "store", backend: str = "dynamic") -> Engine:
            place = str(tmp_path / store)
            settings = {"file_storage_path": place} if backend == "file" else {"tiers": [f"directory:{place}"]}
            return stack.enter_context(hybrid(settings, pools or mha("page_first"), further, backend))

        yield begin


def transfer(engine: Engine, name: Any, keys: Sequence[str], policy: Any, seed: int) -> tuple[Any, list[torch.Tensor]]:
    """A transfer of filled pages of a further pool, and their content."""
    pool = engine.pools[str(name)]
    engine.fill(seed, pool)
    count = len(keys) * pool.page_size
    is_derived = type(pool).__name__ == "DeepSeekV4StateHostPool"  # its positions are another pool's
    indices = torch.arange(count) if is_derived else pool.alloc(count)
    content = content_of(pool, indices)
    return PoolTransfer(name, host_indices=indices, keys=list(keys), hit_policy=policy), content


def contents(engine: Engine, it: Any) -> list[torch.Tensor]:
    """The pages of a transfer."""
    return content_of(engine.pools[str(it.name)], it.host_indices)


POOLS: dict[str, tuple[Any, Callable[[], Any], int]] = {
    "sliding window": (PoolName.SWA, lambda: mha("page_first", layers=2), 2),
    "window of layers": (PoolName.SWA, lambda: mha("layer_first", layers=2), 2),
    "recurrent states": (PoolName.MAMBA, mamba, 1),
}


@pytest.mark.parametrize("kind", POOLS)
def test_trailing_pages_come_back_byte_equal(start_hybrid: StartHybrid, kind: str) -> None:
    """The last pages of a second pool, also in a new engine."""
    name, make, width = POOLS[kind]
    first = start_hybrid({name: make()})
    given, content = transfer(first, name, chain(PROMPT)[-width:], TRAILING, seed=1)
    stored, pages = first.backup(PROMPT, transfers=[given])
    assert stored == len(PROMPT)
    for is_new in (False, True):
        engine = first
        if is_new:
            first.controller.detach_storage_backend()
            engine = start_hybrid({name: make()})
        asked = PoolTransfer(name, keys=["?"] * width, hit_policy=TRAILING)
        found = engine.prefetch(LONGER, transfers=[asked])
        assert (found.hit, found.completed) == (len(PROMPT), len(PROMPT))
        assert found.pools == {name: width}
        assert equal(found.pages, pages)
        assert equal(contents(engine, asked), content)


EVERY_POOL: dict[str, Callable[[], Any]] = {
    "DSAIndexerPoolHost": indexer,
    "AsymmetricMHATokenToKVPoolHost": lambda: mha("page_first", layers=3, value_dim=32),
    "DeepSeekV4StateHostPool": compressor_states,
    "DeepSeekV4PagedHostPool": lambda: latents_in_pages("c4"),
    "MambaPoolHost": mamba,
    "MHATokenToKVPoolHost": lambda: mha("page_first"),
    "MLATokenToKVPoolHost": lambda: mla("page_first"),
}


@pytest.mark.parametrize("kind", sorted(POOL_KINDS))
def test_every_kind_of_pool_comes_back_byte_equal(start_hybrid: StartHybrid, kind: str) -> None:
    """What is stored at all is what is tested."""
    device, host = EVERY_POOL[kind]()
    assert type(host).__name__ == kind
    engine = start_hybrid({PoolName.INDEXER: (device, host)})
    keys = chain(PROMPT)[:5]
    given, content = transfer(engine, PoolName.INDEXER, keys, ALL, seed=4)
    assert any(page.any() for page in content)
    assert engine.storage.batch_set_v2([given]) == {PoolName.INDEXER: [True] * 5}
    for buffer in buffers(host):
        buffer.zero_()
    places = torch.flip(given.host_indices.reshape(5, -1), (0,)).reshape(-1)  # other places
    back = PoolTransfer(PoolName.INDEXER, host_indices=places, keys=keys)
    assert engine.storage.batch_get_v2([back]) == {PoolName.INDEXER: [True] * 5}
    assert equal(contents(engine, back), content)


def test_without_its_window_a_prefix_is_not_restorable(start_hybrid: StartHybrid) -> None:
    """KV of eight pages, and windows that end after four and after eight: nothing between them can be resumed."""
    engine = start_hybrid({PoolName.SWA: mha("page_first", layers=2)})
    keys = chain(PROMPT)
    early, _ = transfer(engine, PoolName.SWA, keys[2:4], TRAILING, seed=1)
    engine.backup(PROMPT[: 4 * PAGE], transfers=[early])
    late, _ = transfer(engine, PoolName.SWA, keys[6:8], TRAILING, seed=1)
    engine.backup(PROMPT, transfers=[late])
    asked = [PoolTransfer(PoolName.SWA, keys=["?", "?"], hit_policy=TRAILING)]
    for count, ends in ((8, [4, 8]), (7, [4]), (3, [])):
        result = engine.storage.batch_exists_v2(keys[:count], asked)
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (ends[-1] if ends else 0, ends)


def test_answers_equal_those_of_sglangs_file_backend(start_hybrid: StartHybrid) -> None:
    """Random sets of stored pages, policies and widths; SGLang's backend is the reference."""
    rng = random.Random(7)
    further = {PoolName.SWA: 2, PoolName.MAMBA: 1, PoolName.INDEXER: 1}
    made = [
        start_hybrid(
            {name: mamba() if name == PoolName.MAMBA else mha("page_first", layers=1) for name in further},
            store=f"store-{backend}",
            backend=backend,
        )
        for backend in ("dynamic", "file")
    ]
    for number in range(25):
        keys = chain([token + 1000 * number for token in PROMPT])
        kv = keys[: rng.choice((3, 8, 8))]
        sets = {name: [key for key in keys if rng.random() < 0.7] for name in further}
        for engine in made:
            for name, some in sets.items():
                given, _ = transfer(engine, name, some, ALL, seed=number)
                assert engine.storage.batch_set_v2([given]) == {name: [True] * len(some)}
                engine.pools[str(name)].free(given.host_indices)
            indices = engine.host.alloc(len(kv) * PAGE)
            engine.controller.page_set_func(kv, indices)
            engine.host.free(indices)
        asked = [
            PoolTransfer(name, keys=["?"] * width, hit_policy=rng.choice((ALL, TRAILING)))
            for name, width in further.items()
            if rng.random() < 0.7
        ]
        ours, own = (engine.storage.batch_exists_v2(keys, asked) for engine in made)
        assert ours == own


def test_compressed_latents_without_a_pool_of_kv(start_hybrid: StartHybrid) -> None:
    """DeepSeek V4: the first pool has positions only, and others decide what can be restored."""
    positions = LogicalHostPool(64 * PAGE, PAGE, "page_first")
    device, _ = mha("page_first")
    name = PoolName.DEEPSEEK_V4_C4
    engine = start_hybrid({name: latents_in_pages("c4")}, pools=(device, positions))
    keys = chain(PROMPT)
    given, content = transfer(engine, name, keys[:5], ALL, seed=3)
    assert engine.storage.batch_set_v2([given]) == {name: [True] * 5}
    asked = PoolTransfer(name, keys=keys, hit_policy=ALL)
    assert engine.storage.batch_exists_v2(keys, [asked]).kv_hit_pages == 5
    pool = engine.pools[str(name)]
    back = PoolTransfer(name, host_indices=pool.alloc(5 * PAGE), keys=keys[:5])
    for buffer in buffers(pool):
        buffer.zero_()
    assert engine.storage.batch_get_v2([back]) == {name: [True] * 5}
    assert equal(contents(engine, back), content)


def test_a_pool_that_comes_later(start_hybrid: StartHybrid) -> None:
    """SGLang adds the pool of a draft model after the attach."""
    from sglang.srt.mem_cache.pool_host.group import PoolEntry

    engine = start_hybrid({PoolName.SWA: mha("page_first", layers=2)})
    given, _ = transfer(engine, PoolName.SWA, chain(PROMPT)[-2:], TRAILING, seed=1)
    _, pages = engine.backup(PROMPT, transfers=[given])
    device, host = mha("page_first", layers=1)
    engine.controller.register_host_pool_entry(PoolEntry(PoolName.DRAFT, host, device, lambda layer: layer))
    engine.pools[str(PoolName.DRAFT)] = host
    draft, content = transfer(engine, PoolName.DRAFT, chain(PROMPT), ALL, seed=2)
    assert engine.storage.batch_set_v2([draft]) == {PoolName.DRAFT: [True] * PAGES}
    found = engine.prefetch(PROMPT, transfers=[PoolTransfer(PoolName.SWA, keys=["?"] * 2, hit_policy=TRAILING)])
    assert equal(found.pages, pages)
    for buffer in buffers(host):
        buffer.zero_()
    assert engine.storage.batch_get_v2([draft]) == {PoolName.DRAFT: [True] * PAGES}
    assert equal(contents(engine, draft), content)


def test_unknown_policies_and_pools_are_misses(start_hybrid: StartHybrid) -> None:
    """What SGLang might ask and kvtier does not know."""
    engine = start_hybrid({PoolName.SWA: mha("page_first", layers=2)})
    engine.backup(PROMPT)
    keys = chain(PROMPT)
    groups = PoolTransfer(PoolName.SWA, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert engine.storage.batch_exists_v2(keys, [groups]).kv_hit_pages == 0
    unknown = PoolTransfer(PoolName.INDEXER, keys=keys, host_indices=torch.arange(PAGES * PAGE))
    assert engine.storage.batch_get_v2([unknown]) == {PoolName.INDEXER: [False] * PAGES}
    assert engine.storage.batch_exists_v2(keys, [PoolTransfer(PoolName.INDEXER, keys=keys)]).kv_hit_pages == 0
    assert engine.storage.batch_exists_v2(keys, None).kv_hit_pages == PAGES


def test_every_other_pool_of_sglang_is_refused_by_its_name() -> None:
    """Among them that of its unified memory. kvtier does not know what their bytes mean."""
    for module in pkgutil.iter_modules(pool_host.__path__, f"{pool_host.__name__}."):
        with contextlib.suppress(ImportError):  # of another accelerator
            importlib.import_module(module.name)
    others = [it for it in set(below(HostKVCache)) if it.__name__ not in POOL_KINDS]
    assert {"UnifiedPageEnvelopeHostPool", "MHATokenToKVPoolMXFP8Host"} <= {it.__name__ for it in others}
    for kind in others:
        pool = kind.__new__(kind)
        pool.layout = "page_first"
        with pytest.raises(ConfigError, match=rf"host pool 'kv' is a sglang\.[\w.]*\.{kind.__name__}; allowed: "):
            describe("kv", pool, SimpleNamespace(), torch.arange(PAGE), 0)


def below(kind: type) -> Iterator[type]:
    """All classes that inherit from `kind`."""
    for each in kind.__subclasses__():
        yield each
        yield from below(each)
