"""Layers are scattered lowest first over all chunks in host memory; an error fails its own chunks only."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.device.layers import ChunkScatter, LayerOrder, LayerReadiness

WAIT_S = 30.0


class Chunk(ChunkScatter):
    def __init__(self, name: int, kind: str = "history", layers: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__(kind, layers)
        self.name = name


def test_the_first_layer_of_every_chunk_comes_before_the_second_of_any() -> None:
    moved: list[tuple[int, int]] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def move(jobs: list[ChunkScatter]) -> None:
        begun.set()
        assert may_go_on.wait(WAIT_S)
        moved.extend((job.step, job.name) for job in jobs)  # type: ignore[attr-defined]

    order = LayerOrder(move, at_once=10)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(order.run, Chunk(0))
        assert begun.wait(WAIT_S)
        rest = [pool.submit(order.run, Chunk(name)) for name in range(1, 6)]
        while len(order._waiting) < 5:
            assert not first.done()
        may_go_on.set()
        for future in (first, *rest):
            future.result(WAIT_S)
    assert moved[0] == (0, 0)
    assert sorted(moved[1:6]) == [(0, name) for name in range(1, 6)]
    assert [step for step, _ in moved] == [0] * 6 + [1] * 6 + [2] * 6


def test_groups_take_turns_by_the_models_layers() -> None:
    moved: list[tuple[str, int]] = []
    begun, may_go_on = threading.Event(), threading.Event()

    def move(jobs: list[ChunkScatter]) -> None:
        begun.set()
        assert may_go_on.wait(WAIT_S)
        moved.append((str(jobs[0].kind), jobs[0].layers[jobs[0].step]))

    order = LayerOrder(move, at_once=10)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(order.run, Chunk(0, "window", (0, 2, 4)))]
        assert begun.wait(WAIT_S)
        futures += [pool.submit(order.run, Chunk(n, "history", (1, 3, 5))) for n in (1, 2)]
        while len(order._waiting) < 2:
            assert not futures[0].done()
        may_go_on.set()
        for future in futures:
            future.result(WAIT_S)
    assert [rank for _, rank in moved] == [0, 1, 2, 3, 4, 5]


def test_every_step_of_every_chunk_is_moved_once() -> None:
    counts: dict[tuple[int, int], int] = {}
    lock, rng = threading.Lock(), random.Random(3)
    inside = [0, 0]

    def move(jobs: list[ChunkScatter]) -> None:
        with lock:
            inside[0] += 1
            inside[1] = max(inside)
            for job in jobs:
                place = (job.name, job.step)  # type: ignore[attr-defined]
                counts[place] = counts.get(place, 0) + 1
        with lock:
            inside[0] -= 1

    order = LayerOrder(move, at_once=2)
    chunks = [Chunk(name, rng.choice("ab"), tuple(range(rng.randint(1, 6)))) for name in range(60)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(order.run, chunks))
    assert counts == {(chunk.name, step): 1 for chunk in chunks for step in range(len(chunk.layers))}
    assert inside[1] <= 1


def test_an_error_is_raised_for_its_chunks_only() -> None:
    def move(jobs: list[ChunkScatter]) -> None:
        if any(job.name == 7 and job.step == 1 for job in jobs):  # type: ignore[attr-defined]
            raise OSError("planned")

    order = LayerOrder(move, at_once=1)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(order.run, Chunk(name)) for name in range(12)]
        failed = [name for name, future in enumerate(futures) if future.exception(WAIT_S) is not None]
    assert failed == [7]
    with pytest.raises(OSError, match="planned"):
        futures[7].result()
    order.run(Chunk(8))  # and it goes on


def test_a_thread_that_ends_leaves_no_other_waiting() -> None:
    def move(_jobs: list[ChunkScatter]) -> None:
        raise SystemExit

    order = LayerOrder(move, at_once=1)
    with pytest.raises(SystemExit):
        order.run(Chunk(1))
    order._move = lambda _jobs: None
    order.run(Chunk(2))


class Event:
    def __init__(self) -> None:
        self.held = 0

    def query(self) -> bool:
        return True

    def hold(self) -> None:
        self.held += 1


def test_a_layer_is_there_when_all_its_chunks_are() -> None:
    readiness, event = LayerReadiness({0: 2, 1: 1}), Event()
    assert not readiness.wait(0, 0.0)
    readiness.arrived([0], 1, [event])
    assert not readiness.wait(0, 0.0)
    assert not event.held
    readiness.arrived([0], 1)
    assert readiness.wait(0, 0.0)
    assert event.held == 1
    assert not readiness.wait(1, 0.01)
    threading.Thread(target=readiness.arrived, args=([1], 1)).start()
    assert readiness.wait(1, WAIT_S)
    assert readiness.wait(2, 0.0), "a layer of which nothing is to come"
