"""The measured side of `kvtier bench io`. A mover drives the tiers, and a session drives host memory."""

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Barrier
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from kvtier.codec.frame import frame_bytes
from kvtier.config import tier_list
from kvtier.config.sections import Config
from kvtier.config.value_types import shown_place
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.core.operations import WAITING_MAX
from kvtier.device.control_groups import text_of
from kvtier.errors import ConfigError, KvError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion
from kvtier.runtime.mover import Mover, Threads
from kvtier.runtime.observers.guards import Feature, Guards, Observer
from kvtier.runtime.session import Session
from kvtier.testing.host_copier import HostCopier
from kvtier.tier import registry
from kvtier.tier.base import Tier
from kvtier.tier.registry import SMALL_BYTES_IN_FLIGHT, TierSettings
from kvtier.tools.probe.links import timed
from kvtier.types import (
    ChunkKey,
    Direction,
    Event,
    LoadDone,
    Outcome,
    Place,
    Prefix,
    RequestId,
    StoreDone,
    Transfer,
)

FINGERPRINT = bytes(32)
CHUNK_TOKENS = 256
BLOCKS = 16
"""Blocks in a chunk, as with vLLM's blocks of 16 tokens."""
DEADLINE_S = 120.0
LAYER_BYTES = 1 << 20
"""Least bytes of a layer, unless the whole chunk has fewer."""
GRAIN_BYTES = BLOCKS * 256
"""A layer's bytes are a multiple of this, so that each block has at least 256 bytes."""
COMPARED_BYTES = 4096
"""Bytes of each slot that are compared after the timed part. The timed part verifies every checksum."""
PROC_IO = Path("/proc/self/io")

Blocks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class IoSample:
    """One timed store, load or mix."""

    seconds: float
    cpu_s: float
    latencies_s: list[float] = field(default_factory=list[float])
    device_bytes: int | None = None
    """Bytes that the kernel read from a device for this process."""


def layout_of(size: int) -> KvLayout:
    """Return a layout of one group whose chunks have `size` bytes, in layers of about a MiB."""
    layers = next(n for n in range(max(1, size // LAYER_BYTES), 0, -1) if size % (n * GRAIN_BYTES) == 0)
    return KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (size // layers,) * layers, "bench"),))


def chunk_key(number: int) -> ChunkKey:
    """Return the key of chunk `number`."""
    return ChunkKey(number.to_bytes(32, "big"))


class FullTier:
    """A tier at its capacity with a mover, but without a core or an engine.

    Args:
        word: name of a kind, or a tier as `--tier` takes it; see `trial_settings`.
        root: directory of its store.
        size: payload bytes of an object.
        count: objects per sample.
        threads: number of read threads, and of write threads.
        streams: number of engines whose objects are interleaved. Each engine keeps its own order.
        read_percent: percentage of reads in the mix with the most stores. Stores of a mix need capacity beyond the
            loaded objects. 100 means no mix.
        seed: seed for the order of the streams.
    """

    def __init__(
        self,
        word: str,
        root: Path,
        size: int,
        count: int,
        threads: int,
        *,
        streams: int = 1,
        read_percent: int = 100,
        seed: int = 1,
    ) -> None:
        self.layout = layout_of(size)
        self.count = count
        self._in_flight = in_flight(size, threads)
        self.slots = self._in_flight * (1 if read_percent == 100 else 2)
        self.streams = min(streams, count)
        self._round = 0
        self._random = random.Random(seed)  # noqa: S311 - an order, no secret
        self.frame_bytes = frame_bytes(self.layout.groups[0])
        extra = -(-count * (100 - read_percent) // 100)
        self.tier = open_trial(word, root, count + extra + threads, self.frame_bytes)
        self.name = self.tier.name
        self.root = root
        self.arena = Arena(self.layout, (self.slots,), populate=True)
        for slot in range(self.slots):
            payload = np.frombuffer(self.arena.payload(0, slot), np.uint8)
            payload[:] = np.random.default_rng(slot).integers(0, 256, len(payload), np.uint8)
        self._own = [bytes(self.arena.payload(0, slot)[:COMPARED_BYTES]) for slot in range(self.slots)]
        self._kept: dict[int, int] = {}
        """The slot from which each object of the last store was written, by the object's number."""
        layers = self.layout.groups[0].layer_bytes
        tiers: dict[str, Tier] = {self.name: self.tier}
        self._mover = Mover(
            CommandRunner(
                layout=self.layout,
                model=FINGERPRINT[:16],
                arena=self.arena,
                copier=HostCopier(self.layout, [[np.zeros((1, layer), np.uint8) for layer in layers]]),
                tiers=tiers,
            ),
            threads=Threads(read=threads, write=threads),
        )
        self._completions: SimpleQueue[Completion] = SimpleQueue()
        self._mover.complete_to(self._completions.put)

    @property
    def direct_io(self) -> bool:
        """Whether the tier bypasses the page cache."""
        return bool(self.tier.figures().direct_io)

    def store(self) -> IoSample:
        """Store `count` new objects."""
        self._round += 1
        first = self._round * self.count
        return self._run(
            [(Direction.DEMOTE, first + n) for n in interleaved(self.count, self.streams, self._random)], replaces=True
        )

    def load(self) -> IoSample:
        """Load the objects of the last store, and compare them with the stored bytes."""
        first = min(self._kept)
        return self._run([(Direction.PROMOTE, first + n) for n in interleaved(self.count, self.streams, self._random)])

    def mix(self, read_percent: int) -> IoSample:
        """Load objects of the last store, and store new ones. `read_percent` percent of `count` objects are loaded."""
        first = min(self._kept)
        self._round += 1
        new = self._round * self.count
        stores = self.count * (100 - read_percent) // 100
        writes = set(self._random.sample(range(self.count), max(1, stores)))
        work = [
            (Direction.DEMOTE, new + place) if place in writes else (Direction.PROMOTE, first + n)
            for place, n in enumerate(interleaved(self.count, self.streams, self._random))
        ]
        return self._run(work)

    def close(self) -> None:
        """Close the mover, the arena and the tier."""
        self._mover.close(10.0)
        self.arena.close()
        self.tier.close()

    def _run(self, work: Sequence[tuple[Direction, int]], *, replaces: bool = False) -> IoSample:
        before = read_bytes()
        cpu_s, start_s = time.process_time(), time.perf_counter()
        used, latencies_s = self._move(work)
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        after = read_bytes()
        device_bytes = None if before is None or after is None else after - before
        self._check(work, used)
        if replaces:
            self._kept = {number: slot for (_, number), slot in zip(work, used, strict=True)}
        return IoSample(seconds, cpu_s, latencies_s, device_bytes)

    def _check(self, work: Sequence[tuple[Direction, int]], used: Sequence[int]) -> None:
        """Compare the loaded slots with the stored bytes, and restore each slot's own bytes for the next store."""
        last = {
            slot: number for (direction, number), slot in zip(work, used, strict=True) if direction is Direction.PROMOTE
        }
        for slot, number in last.items():
            payload = self.arena.payload(0, slot)
            if bytes(payload[:COMPARED_BYTES]) != self._own[self._kept[number]]:
                raise KvError("the benchmark read back different bytes from those it stored")
            payload[:COMPARED_BYTES] = self._own[slot]

    def _move(self, work: Sequence[tuple[Direction, int]]) -> tuple[list[int], list[float]]:
        """Run all transfers. Return the slots and the seconds of the transfers.

        Loads and stores use different slots, so that the stored bytes are known. In a mix, only loads are timed.

        Raises:
            KvError: a transfer failed or timed out.
        """
        kinds = {direction for direction, _ in work}
        free = {
            direction: list(range(number, self._in_flight * len(kinds), len(kinds)))
            for number, direction in enumerate(sorted(kinds, key=str))
        }
        used: list[int] = []
        latencies_s: list[float] = []
        out = 0
        until = time.monotonic() + DEADLINE_S
        while len(used) < len(work) or out:
            transfers: list[Transfer] = []
            while len(used) < len(work) and free[work[len(used)][0]]:
                direction, number = work[len(used)]
                slot = free[direction].pop()
                transfers.append(self._transfer(len(used), number, direction, slot))
                used.append(slot)
            self._mover.submit(*transfers)
            out += len(transfers)
            for completion in taken(self._completions, 1.0):
                command = completion.command
                assert isinstance(command, Transfer)
                if completion.outcome is not Outcome.DONE:
                    raise KvError(f"the benchmark's {command.direction.value} failed: {completion.detail}")
                free[command.direction].append(command.slot)
                out -= 1
                if len(kinds) == 1 or command.direction is Direction.PROMOTE:
                    latencies_s.append(completion.seconds)
            if time.monotonic() > until:
                raise KvError(f"the benchmark's transfers took longer than {DEADLINE_S:g} s")
        return used, latencies_s

    def _transfer(self, number: int, key: int, direction: Direction, slot: int) -> Transfer:
        deadline_s = time.monotonic() + DEADLINE_S
        return Transfer(number, direction, chunk_key(key), 0, slot, self.name, None, (), None, number, deadline_s, None)


def taken(completions: SimpleQueue[Completion], wait_s: float) -> list[Completion]:
    """Return the completions since the last call. Wait up to `wait_s` seconds for the first."""
    found: list[Completion] = []
    with suppress(Empty):
        if wait_s > 0:
            found.append(completions.get(timeout=wait_s))
        while True:
            found.append(completions.get_nowait())
    return found


def in_flight(size: int, threads: int) -> int:
    """Return a session's default number of objects in flight: 4 per thread, or more if the objects are small."""
    return max(4 * threads, SMALL_BYTES_IN_FLIGHT // size)


def interleaved(count: int, streams: int, draw: random.Random) -> list[int]:
    """Split the numbers below `count` into `streams` ascending runs, and interleave the runs at random."""
    if streams == 1:
        return list(range(count))
    edges = [count * stream // streams for stream in range(streams + 1)]
    turns = [stream for stream in range(streams) for _ in range(edges[stream + 1] - edges[stream])]
    draw.shuffle(turns)
    places = edges[:-1]
    order: list[int] = []
    for stream in turns:
        order.append(places[stream])
        places[stream] += 1
    return order


def read_bytes(path: Path = PROC_IO) -> int | None:
    """Return the bytes that the kernel has read from devices for this process, or None if unknown."""
    return next((int(line.split()[1]) for line in text_of(path).splitlines() if line.startswith("read_bytes:")), None)


def trial_settings(word: str, root: Path) -> TierSettings:
    """Return the settings of a temporary tier in `root`.

    Args:
        word: name of a kind, or a tier as `--tier` takes it, whose location is ignored.
        root: the directory.

    Raises:
        ConfigError: the kind is unknown or has no temporary stores, or a setting is wrong.
    """
    kind = tier_list.kind_of(word, "--tier")
    if kind.open_trial is None:
        raise ConfigError(
            f"--tier {shown_place(word)}: tiers of kind {kind.name} have no temporary store to measure; "
            "`kvtier bench tier` uses the store itself"
        )
    return tier_list.parse(word, "--tier", where=root)


def open_trial(word: str, root: Path, count: int, frame: int) -> Tier:
    """Open a temporary tier in `root` with room for `count` frames of `frame` bytes; see `trial_settings`."""
    settings = trial_settings(word, root)
    opened = registry.kind_of(settings).open_trial
    assert opened is not None
    return opened(settings, root, count * frame, frame)


def engine_blocks(size: int, count: int) -> list[Blocks]:
    """Return an engine's KV of `count` chunks of `size` bytes, as an array [blocks, bytes] for each layer."""
    layers = layout_of(size).groups[0].layer_bytes
    return [
        np.random.default_rng(number).integers(0, 256, (count * BLOCKS, layer // BLOCKS), np.uint8)
        for number, layer in enumerate(layers)
    ]


def host_sample(op: str, size: int, count: int, engine: list[Blocks], threads: int) -> IoSample:
    """Store `count` chunks from the engine's blocks to host slots, or load them, through core and mover.

    Raises:
        KvError: a chunk was dropped, came back with other bytes, or timed out.
    """
    layout = layout_of(size)
    arena = Arena(layout, (count + 2,), populate=True)
    prefix = Prefix(tuple(chunk_key(number) for number in range(count)), CHUNK_TOKENS)
    places = [Place(0, n, tuple(range(n * BLOCKS, (n + 1) * BLOCKS))) for n in range(count)]
    try:
        with open_session(layout, arena, count + 2, engine, threads=Threads(device=threads)) as session:
            stored = _timed(lambda: session_store(session, prefix, places))
            if op == "store":
                return stored
            wanted = [blocks.copy() for blocks in engine]
            for blocks in engine:
                blocks[:] = 0
            loaded = _timed(lambda: session_load(session, prefix, places))
            if any(not np.array_equal(*pair) for pair in zip(wanted, engine, strict=True)):
                raise KvError("the benchmark read back different bytes from those it stored")
            return loaded
    finally:
        arena.close()


@contextmanager
def open_session(
    layout: KvLayout,
    arena: Arena,
    slots: int,
    engine: list[Blocks],
    tiers: Sequence[tuple[Tier, TierRules]] = (),
    *,
    threads: Threads,
    observer: Observer | None = None,
) -> Generator[Session]:
    """Open an empty session, and close it at the end.

    Args:
        layout: layout of the session's chunks.
        arena: the session's host memory.
        slots: number of slots in the arena.
        engine: memory of the engine's blocks, by layer.
        tiers: the tiers below host memory.
        threads: thread counts, for copies and for each tier.
        observer: observer of the session's commands.
    """
    mover = Mover(
        CommandRunner(
            layout=layout,
            model=FINGERPRINT[:16],
            arena=arena,
            copier=HostCopier(layout, [engine]),
            tiers={tier.name: tier for tier, _ in tiers},
        ),
        threads=threads,
    )
    cache = Cache(
        layout=layout,
        slots=(slots,),
        tiers=[rules for _, rules in tiers],
        evictor=lambda: make_evictor(Config().host.evictor),
        limits=Limits(load_deadline_s=DEADLINE_S, store_deadline_s=DEADLINE_S),
    )
    guards = Guards()
    if observer is not None:
        guards.register(Feature.METRICS, observer)
    session = Session(cache, mover, guards=guards)
    try:
        yield session
    finally:
        session.close(10.0)


def session_store(session: Session, prefix: Prefix, places: Sequence[Place]) -> None:
    """Store chunks. Return when the engine may reuse its blocks.

    Raises:
        KvError: a chunk was dropped, or the store took too long.
    """
    for at in range(0, len(places), WAITING_MAX):
        session.store(RequestId("store"), prefix, places[at : at + WAITING_MAX])
        done = next(event for event in session_events(session) if isinstance(event, StoreDone))
        if done.dropped:
            raise KvError(f"the benchmark's store dropped {done.dropped} chunks")


def session_load(session: Session, prefix: Prefix, places: Sequence[Place]) -> None:
    """Load all chunks of `prefix`.

    Raises:
        KvError: a chunk is missing, or the load took too long.
    """
    tokens = len(prefix.keys) * CHUNK_TOKENS
    session.load(RequestId("load"), prefix, tokens, places)
    for event in session_events(session):
        if isinstance(event, LoadDone):
            if event.tokens != tokens:
                raise KvError(f"the benchmark's load restored {event.tokens} of {tokens} tokens")
            return


def session_events(session: Session) -> Generator[Event, None, NoReturn]:
    """Yield the session's events for `DEADLINE_S`.

    Raises:
        KvError: the deadline passed while the caller still wanted events.
    """
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        yield from session.poll(0.5)
    raise KvError(f"the benchmark's request did not end within {DEADLINE_S:g} s")


def _timed(act: Callable[[], None]) -> IoSample:
    cpu_s, start_s = time.process_time(), time.perf_counter()
    act()
    return IoSample(time.perf_counter() - start_s, time.process_time() - cpu_s)


def memcpy(source: list[Blocks], target: list[Blocks], threads: int) -> float:
    """Return the GB/s of a plain copy by `threads` threads."""
    ready = Barrier(threads)  # makes each thread copy exactly one part

    def copy(_worker: int, part: int) -> int:
        ready.wait(DEADLINE_S)
        for blocks, twin in zip(source, target, strict=True):
            half = len(blocks) // threads
            np.copyto(twin[part * half : (part + 1) * half], blocks[part * half : (part + 1) * half])
        return 1

    seconds, _ = timed(copy, threads, threads, DEADLINE_S, "a copy of memory")
    return sum(blocks.nbytes for blocks in source) / seconds / 1e9
