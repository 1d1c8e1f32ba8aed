"""Ranks with equal parts have one copy in host memory; what cannot be shared is counted as often as it is held."""

import gc
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.codec.frame import frame_bytes
from kvtier.errors import ConfigError
from kvtier.layout import ELSEWHERE, GroupLayout, History, KvLayout, Part, Window
from kvtier.runtime import shared_memory
from kvtier.runtime.arena import Arena, chunk_bytes, slots_for
from kvtier.runtime.shared_memory import SharedMemory, share

CAPACITY = 1 << 20
LATENT, HEADS = (70_000, 4096), (5_000,)


def _layout(*parts: tuple[Part | None, int], pages: str = "test") -> KvLayout:
    groups = (GroupLayout(History(), LATENT, pages), GroupLayout(Window(16), HEADS, pages))
    return KvLayout(16, groups).with_parts(parts)


def _mla(rank: int, **options: str) -> KvLayout:
    """The first group is on every rank, the second is divided."""
    return _layout((Part(0, 2, 0, 1), rank), (Part(0, 1, rank, rank + 1), 0), **options)


def _told(ranks: int) -> Callable[[int], Callable[[Any], list[Any]]]:
    """The exchange of each rank, all of them in threads of this process."""
    barrier, told = threading.Barrier(ranks, timeout=30), [None] * ranks

    def of(rank: int) -> Callable[[Any], list[Any]]:
        def exchange(own: Any) -> list[Any]:
            told[rank] = own
            barrier.wait()
            found = list(told)
            barrier.wait()
            return found

        return exchange

    return of


def _shared(*layouts: KvLayout) -> list[SharedMemory]:
    exchange = _told(len(layouts))
    with ThreadPoolExecutor(len(layouts)) as pool:
        running = [pool.submit(share, it, CAPACITY, exchange(rank)) for rank, it in enumerate(layouts)]
        return [it.result() for it in running]


def _arenas(layouts: list[KvLayout], memories: list[SharedMemory], **options: Any) -> list[Arena]:
    return [
        Arena(it, slots_for(it, CAPACITY, memory.chunk_bytes), shared=memory.regions, **options)
        for it, memory in zip(layouts, memories, strict=True)
    ]


def _is_one(arenas: list[Arena], group: int) -> bool:
    """Whether the last slot of a group is the same memory in all arenas."""
    slot = arenas[0].slots[group] - 1
    arenas[0].payload(group, slot)[-1] = 7
    is_one = [it.payload(group, slot)[-1] == 7 for it in arenas]
    arenas[0].payload(group, slot)[-1] = 0
    return all(is_one)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_equal_part_counts_once_and_is_one_memory(ranks: int) -> None:
    layouts = [_mla(rank) for rank in range(ranks)]
    memories = _shared(*layouts)
    latent, heads = (frame_bytes(group) for group in layouts[0].groups)
    assert {it.chunk_bytes for it in memories} == {latent + ranks * heads}
    assert [set(it.regions) for it in memories] == [{0}] * ranks
    arenas = _arenas(layouts, memories, populate=True)
    assert {it.slots for it in arenas} == {(CAPACITY // (latent + ranks * heads),) * 2}
    assert arenas[0].slots > slots_for(layouts[0], CAPACITY, ranks * chunk_bytes(layouts[0])), "more than one copy each"
    assert _is_one(arenas, 0)
    assert not _is_one(arenas, 1)
    assert [set(it.filled_elsewhere) for it in arenas] == [set(), *[{0}] * (ranks - 1)]
    assert sum(it.size_bytes for it in arenas) - (ranks - 1) * latent * arenas[0].slots[0] <= CAPACITY


def test_of_copied_heads_each_has_a_memory() -> None:
    layouts = [_layout((Part(0, 2, rank // 2, rank // 2 + 1), rank % 2), (None, 0)) for rank in range(4)]
    memories = _shared(*layouts)
    heads, unnamed = (frame_bytes(group) for group in layouts[0].groups)
    assert {it.chunk_bytes for it in memories} == {2 * heads + 4 * unnamed}
    arenas = _arenas(layouts, memories)
    assert _is_one(arenas[:2], 0)
    assert _is_one(arenas[2:], 0)
    assert not _is_one(arenas[1:3], 0)


@pytest.mark.parametrize(
    "layouts",
    [
        (_mla(0),),
        (_layout((Part(0, 2, 0, 1), 0), (None, 0)), _layout((Part(0, 2, 1, 2), 0), (None, 0))),
        (_mla(0), _mla(1, pages="another arrangement")),
        (_mla(1), _mla(2)),  # nobody says that it is the first
    ],
)
def test_what_is_not_equal_is_not_shared(layouts: tuple[KvLayout, ...]) -> None:
    memories = _shared(*layouts)
    assert [it.regions for it in memories] == [{}] * len(layouts)
    assert {it.chunk_bytes for it in memories} == {sum(map(chunk_bytes, layouts))}


def test_what_only_other_ranks_hold_takes_no_memory() -> None:
    """The first group is on ranks 0 and 2, the second on rank 1."""
    latent, heads = Part(0, 2, 0, 1), Part(0, 1, 0, 1)
    held = [((latent, 0), (heads, ELSEWHERE)), ((latent, ELSEWHERE), (heads, 0)), ((latent, 1), (heads, ELSEWHERE))]
    layouts = [_layout(*parts) for parts in held]
    memories, sizes = _shared(*layouts), [frame_bytes(group) for group in layouts[0].groups]
    assert {it.chunk_bytes for it in memories} == {sum(sizes)}
    assert [set(it.regions) for it in memories] == [{0}, set(), {0}]
    locked: list[int] = []
    arenas = _arenas(
        layouts, memories, populate=True, page_lock=lambda _, size, _slot: locked.append(size) or (lambda: None)
    )
    assert [set(it.filled_elsewhere) for it in arenas] == [{1}, {0}, {0, 1}]
    assert _is_one([arenas[0], arenas[2]], 0)
    assert [it.size_bytes for it in arenas] == [sizes[group] * arenas[0].slots[group] for group in (0, 1, 0)]
    assert [sum(map(len, it.memory)) for it in arenas] == [it.size_bytes for it in arenas] == locked


@pytest.mark.parametrize("act", ["_made", "_opened"])
def test_a_rank_that_cannot_map_has_a_copy_that_counts_and_says_so_once(
    act: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner, calls = getattr(shared_memory, act), threading.Semaphore(1)

    def first_fails(*arguments: Any) -> Any:
        if calls.acquire(blocking=False):
            raise OSError("planned")
        return inner(*arguments)

    monkeypatch.setattr(shared_memory, act, first_fails)
    layouts = [_layout((Part(0, 2, 0, 1), rank), (Part(0, 1, 0, 1), rank)) for rank in range(3)]
    memories = _shared(*layouts)
    first, second = (frame_bytes(group) for group in layouts[0].groups)
    alone = {"_made": 3 * first + second, "_opened": 2 * first + second}[act]
    assert {it.chunk_bytes for it in memories} == {alone}
    arenas = _arenas(layouts, memories)
    assert sum(it.size_bytes for it in arenas) >= alone * arenas[0].slots[0]
    assert [len(it.filled_elsewhere) for it in arenas].count(1) == {"_made": 2, "_opened": 1}[act]
    assert [it.getMessage() for it in caplog.records] == [
        "this rank keeps its own slots, so host memory holds fewer chunks: planned"
    ]


def test_another_file_at_the_place_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another PID namespace."""
    named = shared_memory._named
    monkeypatch.setattr(shared_memory, "_named", lambda descriptor: named(descriptor)._replace(inode=1))
    memories = _shared(_mla(0), _mla(1))
    assert [set(it.regions) for it in memories] == [{0}, set()]
    assert {it.chunk_bytes for it in memories} == {2 * chunk_bytes(_mla(0))}


def test_a_rank_that_has_failed_stops_the_others() -> None:
    exchange = _told(2)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(share, _mla(0), CAPACITY, exchange(0))
        exchange(1)(None)
        with pytest.raises(ConfigError, match="rank 1 has failed to start"):
            running.result()


def test_memory_ends_with_its_last_view_and_no_descriptor_stays() -> None:
    def kept() -> set[str]:
        gc.collect()
        maps = set(re.findall(r"/memfd:kvtier\S*", Path("/proc/self/maps").read_text("utf-8")))
        return maps | {os.readlink(it) for it in Path("/proc/self/fd").iterdir() if "memfd:kvtier" in _target(it)}

    assert not kept()
    layouts = [_mla(0), _mla(1)]
    arenas = _arenas(layouts, _shared(*layouts))
    view: Any = np.frombuffer(arenas[1].payload(0, 0), np.uint8)
    assert kept()
    for arena in arenas:
        arena.close()
    assert kept()
    del view
    assert not kept()


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_each_rank_page_locks_its_own_mapping_in_parts() -> None:
    locked: list[dict[int, int]] = [{}, {}]

    def lock_of(rank: int) -> Callable[..., Callable[[], None]]:
        def lock(address: int, size_bytes: int, slot_bytes: int) -> Callable[[], None]:
            assert not size_bytes % slot_bytes
            locked[rank][address] = size_bytes
            return lambda: locked[rank].__delitem__(address)

        return lock

    layouts = [_mla(0), _mla(1)]
    memories = _shared(*layouts)
    arenas = [
        *_arenas(layouts[:1], memories[:1], page_lock=lock_of(0)),
        *_arenas(layouts[1:], memories[1:], page_lock=lock_of(1)),
    ]
    del memories
    for arena, own in zip(arenas, locked, strict=True):
        assert set(own) == {np.frombuffer(it, np.uint8).__array_interface__["data"][0] for it in arena.memory}
        assert sum(own.values()) == arena.size_bytes
    assert not set(locked[0]) & set(locked[1])
    for arena in arenas:
        arena.close()
    gc.collect()
    assert locked == [{}, {}]
