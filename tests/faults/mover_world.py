"""A small engine, arena and mover with known contents, and the fakes that make them fail. Used by the mover's tests."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import pytest
from tests.completions import taking
from tests.memory_tier import MemoryTier

from kvtier.codec import registry
from kvtier.codec.base import Codec
from kvtier.device.copier import Copier, Fence
from kvtier.errors import TierError
from kvtier.keys.object_names import object_name
from kvtier.layout import GroupLayout, History, KvLayout, State
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion, Threads, Work
from kvtier.runtime.mover import Mover
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.testing.host_copier import HostCopier
from kvtier.tier.base import About, Figures, OneByOneTier, Tier
from kvtier.types import ChunkKey, Direction, Drop, ObjectName, Outcome, Probe, RequestId, Transfer

WAIT_S = 20.0
"""How long a test waits for what must happen soon."""

CHUNK_BLOCKS = 4
CHUNKS = 6
"""Chunks with known content. Chunk c begins at block c * CHUNK_BLOCKS; as many blocks behind are targets of copies."""

FINGERPRINT = bytes(range(32))
NEVER_S = float("inf")


def small_layout() -> KvLayout:
    history = GroupLayout(History(), tuple(CHUNK_BLOCKS * size for size in (1000, 4096, 24)), "test")
    state = GroupLayout(State(), (CHUNK_BLOCKS * 5001,), "test")
    return KvLayout(CHUNK_BLOCKS * 16, (history, state))


def key_of(chunk: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(f"chunk {chunk}".encode()).digest())


def blocks_of(place: int) -> tuple[int, ...]:
    return tuple(range(place * CHUNK_BLOCKS, (place + 1) * CHUNK_BLOCKS))


def codec_of(name: str) -> Codec:
    """The codec of that name, or the test is skipped where its package is missing."""
    if name == "zstd":
        pytest.importorskip("zstandard")
    return registry.by_name(name)


class ManualClock:
    """Time that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """One rank: places 0..CHUNKS-1 of the engine hold the chunks, the places behind them nothing."""

    def __init__(
        self,
        tiers: Mapping[str, Tier] | None = None,
        *,
        slots: int = 8,
        threads: Threads | None = None,
        tier_threads: dict[str, Threads] | None = None,
        codec: Codec | None = None,
        rank: int = 0,
        wrap: Callable[[Copier], Copier] = lambda copier: copier,
        clock: Callable[[], float] = time.monotonic,
        writes_all: bool = True,
    ) -> None:
        self.layout = small_layout().on_rank(rank, rank + 1)
        rng = np.random.default_rng(7)
        self.memory = [
            [
                np.concatenate(
                    [
                        rng.integers(0, 256, (CHUNKS * CHUNK_BLOCKS, size // CHUNK_BLOCKS), np.uint8),
                        np.zeros((CHUNKS * CHUNK_BLOCKS, size // CHUNK_BLOCKS), np.uint8),
                    ]
                )
                for size in group.layer_bytes
            ]
            for group in self.layout.groups
        ]
        self.truth = [[layer.copy() for layer in layers] for layers in self.memory]
        self.arena = Arena(self.layout, (slots,) * len(self.layout.groups))
        self.tiers: Mapping[str, Tier] = {"memory": MemoryTier(capacity_bytes=1 << 24)} if tiers is None else tiers
        self.copier: Any = wrap(HostCopier(self.layout, self.memory))
        self.mover = taking(
            Mover(
                CommandRunner(
                    layout=self.layout,
                    model=FINGERPRINT[:16],
                    arena=self.arena,
                    copier=self.copier,
                    tiers=self.tiers,
                    forms={name: StoredForm(codec) for name in self.tiers},
                    clock=clock,
                    writes_all=writes_all,
                ),
                threads=threads,
                tier_threads=tier_threads or {},
            )
        )
        self._ids = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.mover.close(WAIT_S), "threads are left over"
        self.arena.close()

    # ---- commands

    def transfer(
        self,
        direction: Direction,
        chunk: int,
        slot: int,
        *,
        group: int = 0,
        place: int | None = None,
        tier: str = "memory",
        deadline_s: float = NEVER_S,
    ) -> Transfer:
        self._ids += 1
        is_copy = direction in (Direction.GATHER, Direction.SCATTER)
        return Transfer(
            self._ids,
            direction,
            key_of(chunk),
            group,
            slot,
            "" if is_copy else tier,
            RequestId("r") if is_copy else None,
            blocks_of(chunk if place is None else place) if is_copy else (),
            key_of(chunk - 1) if chunk and not group else None,
            chunk,
            deadline_s,
            None,
        )

    def probe(self, objects: Sequence[tuple[int, int]], tier: str = "memory", deadline_s: float = NEVER_S) -> Probe:
        self._ids += 1
        return Probe(self._ids, tier, tuple((key_of(chunk), group) for chunk, group in objects), deadline_s)

    def drop(self, chunk: int, group: int = 0, tier: str = "memory") -> Drop:
        return Drop(tier, key_of(chunk), group)

    def name(self, chunk: int, group: int = 0) -> ObjectName:
        return object_name(key_of(chunk), group, self.layout.part(group), self.layout.digest(group))

    # ---- running them

    def take(self, count: int) -> list[Completion]:
        """The next `count` answers; fails when they do not come."""
        taken: list[Completion] = []
        until_s = time.monotonic() + WAIT_S
        while len(taken) < count:
            assert time.monotonic() < until_s, f"{len(taken)} of {count} answers came"
            taken += self.mover.take(0.5)
        assert len(taken) == count, "an answer too many"
        return taken

    def run(self, *commands: Work) -> list[Completion]:
        """Submit all at once, and their answers in the order of the commands."""
        for command in commands:
            self.mover.submit(command)
        answers = {id(completion.command): completion for completion in self.take(len(commands))}
        return [answers[id(command)] for command in commands]

    def done(self, *commands: Work) -> None:
        """Submit one after the other; each must be DONE."""
        for command in commands:
            (completion,) = self.run(command)
            assert completion.outcome is Outcome.DONE, completion

    def stored(self, *chunks: int, tier: str = "memory") -> None:
        """Bring chunks of both groups to a tier, through slot 0."""
        for chunk in chunks:
            for group in range(len(self.layout.groups)):
                self.done(
                    self.transfer(Direction.GATHER, chunk, 0, group=group),
                    self.transfer(Direction.DEMOTE, chunk, 0, group=group, tier=tier),
                )

    # ---- looking at bytes

    def is_in_slot(self, chunk: int, slot: int, group: int = 0) -> bool:
        payload = self.arena.payload(group, slot)
        known = self.layout.groups[group]
        return all(
            payload[offset : offset + size] == self._content(self.truth, chunk, group, layer)
            for layer, (offset, size) in enumerate(zip(known.layer_offsets, known.layer_bytes, strict=True))
        )

    def is_at(self, chunk: int, place: int, group: int = 0) -> bool:
        return all(
            self._content(self.memory, place, group, layer) == self._content(self.truth, chunk, group, layer)
            for layer in range(len(self.layout.groups[group].layer_bytes))
        )

    def spoil(self, slot: int, group: int = 0) -> None:
        """Overwrite a slot, so that later content must come from a transfer."""
        self.arena.frame(group, slot)[:] = b"\xee" * len(self.arena.frame(group, slot))

    @staticmethod
    def _content(memory: list[list[np.ndarray]], place: int, group: int, layer: int) -> bytes:
        return memory[group][layer][list(blocks_of(place))].tobytes()


class WrappedTier(OneByOneTier):
    """Another tier with something before, around or instead of each call."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner.name)
        self.inner = inner

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        return self.inner.contains(names)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        return self.inner.read(name, into, offset)

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        return self.inner.write(name, frame, about)

    def delete(self, name: ObjectName) -> None:
        self.inner.delete(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        return self.inner.scan()

    def figures(self) -> Figures:
        return self.inner.figures()

    def close(self) -> None:
        self.inner.close()


class HangingTier(WrappedTier):
    """Calls of the methods in `hanging` begin, and go on only when `release` is set."""

    def __init__(self, inner: Tier, *hanging: str) -> None:
        super().__init__(inner)
        self.hanging = set(hanging)
        self.release = threading.Event()
        self.begun = threading.Semaphore(0)

    def _call(self, method: str) -> None:
        if method in self.hanging:
            self.begun.release()
            assert self.release.wait(6 * WAIT_S), "a test forgot to release a tier"

    def wait_begun(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.begun.acquire(timeout=WAIT_S), "a call never came"

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        self._call("contains")
        return super().contains(names)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        self._call("read")
        return super().read_one(name, into, offset)

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        self._call("write")
        return super().write_one(name, frame, about)

    def delete(self, name: ObjectName) -> None:
        self._call("delete")
        super().delete(name)


class NthCallTier(WrappedTier):
    """The n-th call, of whatever method, goes wrong in one way; all others go right. n = 0: none does."""

    WAYS = ("raise", "bug", "exit", "forget", "truncate", "too long", "flip", "flip padding", "other", "keep half")

    def __init__(self, inner: Tier, n: int, way: str) -> None:
        super().__init__(inner)
        self.n, self.way = n, way
        self.calls = 0
        self._lock = threading.Lock()

    def _is_nth(self) -> bool:
        with self._lock:
            self.calls += 1
            if self.calls != self.n:
                return False
        if self.way == "raise":
            raise TierError(self.name, "planned")
        if self.way == "bug":
            raise KeyError("planned")
        if self.way == "exit":
            raise SystemExit("planned")
        return True

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        if self._is_nth():
            return [] if self.way == "truncate" else [True] * len(names)
        return super().contains(names)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        is_nth = self._is_nth()
        if is_nth and self.way == "forget":
            return None
        size = super().read_one(name, into, offset)
        if not is_nth or size is None:
            return size
        if self.way == "truncate":
            into[size // 2 :] = bytes(len(into) - size // 2)
            return size // 2
        if self.way == "too long":
            return size + 4096
        if self.way == "flip":
            into[size - 8000] ^= 0x10
        if self.way == "flip padding":
            into[size - 1] ^= 0x10
        if self.way == "other":
            for other, _ in self.inner.scan():
                if other != name:
                    return super().read_one(other, into, offset)
        return size

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        if self._is_nth():
            if self.way == "forget":
                return False
            if self.way == "keep half":
                return super().write_one(name, frame[: len(frame) // 2], about)
            if self.way == "flip":
                damaged = bytearray(frame)
                damaged[-8000] ^= 1
                return super().write_one(name, memoryview(damaged), about)
        return super().write_one(name, frame, about)

    def delete(self, name: ObjectName) -> None:
        if self._is_nth() and self.way == "forget":
            return
        super().delete(name)


class FencedCopier:
    """A slow device: it copies when its fence is polled, and is done once `release` is set."""

    def __init__(self, inner: Copier) -> None:
        self.inner = inner
        self.release = threading.Event()
        self.asked = threading.Semaphore(0)

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        return lambda: self.inner.gather(request, group, blocks, payload)

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        return lambda: self.inner.scatter(request, group, blocks, payload)

    def done(self, fence: Fence) -> bool:
        self.asked.release()
        if not self.release.is_set():
            return False
        fence()  # type: ignore[operator]
        return True


class NthCallCopier:
    """The n-th gather, scatter or question after a fence raises."""

    def __init__(self, inner: Copier, n: int, error: type[BaseException] = RuntimeError) -> None:
        self.inner, self.n, self.error = inner, n, error
        self.calls = 0
        self._lock = threading.Lock()

    def _count(self) -> None:
        with self._lock:
            self.calls += 1
            if self.calls == self.n:
                raise self.error("planned")

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        self._count()
        self.inner.gather(request, group, blocks, payload)
        return object()

    def scatter(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        self._count()
        self.inner.scatter(request, group, blocks, payload)
        return object()

    def done(self, fence: Fence) -> bool:
        self._count()
        return True
