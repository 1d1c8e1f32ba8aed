"""Three paths to one store: the store's raw client, the tier, and a session above the tier."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np

from kvtier.codec.frame import frame_bytes
from kvtier.core.limits import TierRules
from kvtier.errors import KvError, TierError
from kvtier.keys.object_names import object_names
from kvtier.runtime.arena import Arena, page_aligned
from kvtier.runtime.executor import Completion
from kvtier.runtime.mover import Threads
from kvtier.runtime.observers.guards import Observer
from kvtier.runtime.session import Session
from kvtier.tier.base import Tier
from kvtier.tools.bench.io_harness import (
    BLOCKS,
    CHUNK_TOKENS,
    COMPARED_BYTES,
    DEADLINE_S,
    engine_blocks,
    layout_of,
    open_session,
    session_load,
    session_store,
)
from kvtier.tools.bench.io_harness import in_flight as default_in_flight
from kvtier.tools.probe.links import timed
from kvtier.types import (
    ChunkKey,
    Direction,
    ObjectName,
    Outcome,
    Place,
    Prefix,
    Presence,
    RequestId,
    Transfer,
)

TIER_NAMES = 23
"""Number of names in a lookup of the tier. The core asks a remote tier for about as many at a time."""
SESSION_NAMES = 512
"""Number of chunks in a lookup through the session. The tier has all of them."""
SMALL_BYTES = 4096
"""Payload of a chunk for lookups."""
Move = Callable[[ObjectName, memoryview], None]
"""Stores or loads one object."""


def new_names(count: int) -> list[ObjectName]:
    """Return random names."""
    content = os.urandom(32 * count)
    return [ObjectName(content[at : at + 32]) for at in range(0, len(content), 32)]


def put(tier: Tier, name: ObjectName, frame: memoryview) -> None:
    """Write an object to a tier, with the signature of a raw client's `put`.

    Raises:
        TierError: the tier did not admit the object.
    """
    if not tier.write(name, frame):
        raise TierError(tier.name, "an object was not admitted: the store has too little room")


def get(tier: Tier, name: ObjectName, into: memoryview) -> None:
    """Read an object of a tier, with the signature of a raw client's `get`.

    Raises:
        TierError: the tier does not have the object.
    """
    if tier.read(name, into) != into.nbytes:
        raise TierError(tier.name, "an object that was stored is missing")


class ClientPath:
    """Moves whole buffers through a client, with one thread per buffer.

    The methods here and in `SessionPath` raise if an operation fails, or loads bytes that differ from the stored ones.

    Args:
        put: stores a buffer.
        get: fills a buffer with a stored object, possibly as another node would.
        delete: deletes an object.
        subject: name of the client in error messages.
        size: bytes of an object.
        in_flight: number of threads.
    """

    def __init__(
        self, put: Move, get: Move, delete: Callable[[ObjectName], None], subject: str, size: int, in_flight: int
    ) -> None:
        self._put, self._get, self._delete, self._subject = put, get, delete, subject
        self._buffers = [page_aligned(size).data for _ in range(in_flight)]
        for number, buffer in enumerate(self._buffers):
            np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(number).integers(0, 256, size, np.uint8)
        self._tail = bytes(self._buffers[0][-COMPARED_BYTES:])
        for buffer in self._buffers:
            buffer[-COMPARED_BYTES:] = self._tail

    def store(self, names: Sequence[ObjectName]) -> float:
        """Store one new object under each name. Return how many seconds this took."""
        return self._each(self._put, names)[0]

    def load(self, names: Sequence[ObjectName]) -> float:
        """Load the objects. Return how many seconds this took."""
        for buffer in self._buffers:
            buffer[-COMPARED_BYTES:] = bytes(len(self._tail))
        seconds, used = self._each(self._get, names)
        is_wrong = any(bytes(self._buffers[worker][-COMPARED_BYTES:]) != self._tail for worker in used)
        for buffer in self._buffers:
            buffer[-COMPARED_BYTES:] = self._tail
        if is_wrong:
            raise KvError(f"{self._subject} read back different bytes from those it stored")
        return seconds

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Delete the objects."""
        self._each(lambda name, _buffer: self._delete(name), names)

    def _each(self, act: Move, names: Sequence[ObjectName]) -> tuple[float, set[int]]:
        """Call `act` for all names, with one thread per buffer. Return the seconds, and which buffers were used."""

        def one(worker: int, number: int) -> int:
            act(names[number], self._buffers[worker])
            return 1

        seconds, done = timed(one, len(names), len(self._buffers), DEADLINE_S, self._subject)
        if len(done) < len(names):
            raise KvError(f"{self._subject} moved {len(done)} of {len(names)} objects within {DEADLINE_S:g} s")
        return seconds, {it.worker for it in done}


class SessionPath:
    """Moves chunks between an engine's blocks and a tier through a session. The blocks are in host memory.

    A store ends when the tier has all chunks.

    Each store, load and lookup opens a new session, whose host memory is empty.

    Args:
        tier: the tier.
        reader: the tier for loads and lookups: `tier`, or the same store opened as another node would open it.
        is_remote: whether an answer of the tier costs a round trip.
        size: payload bytes of a chunk.
        in_flight: number of threads that load, and that store. As many objects wait for them as by default.
        count: largest number of chunks in a store or load.
    """

    def __init__(self, tier: Tier, reader: Tier, size: int, in_flight: int, count: int, *, is_remote: bool) -> None:
        self._tier, self._reader, self._in_flight = tier, reader, in_flight
        waiting = default_in_flight(size, in_flight)
        self._rules = TierRules(
            name=tier.name,
            is_remote=is_remote,
            loads_in_flight=waiting,
            writes_in_flight=waiting,
            probe_deadline_s=DEADLINE_S,
            transfer_deadline_s=DEADLINE_S,
        )
        self.layout = layout_of(size)
        self._kinds = min(in_flight, count)
        """Number of different chunks in the engine's memory. Chunk n of a prompt is the one at n modulo this number."""
        self._blocks = engine_blocks(size, self._kinds)
        # The core gives the transfers of all tiers a quarter of the slots.
        self._slots = max(4 * waiting, count) + 4
        self._arena = Arena(self.layout, (self._slots,), populate=True)

    def store(self, names: Sequence[ObjectName]) -> float:
        """Store one new object under each name. Return how many seconds this took."""
        written = _Written(len(names))
        with self._session(self._tier, written) as session:
            start_s = time.perf_counter()
            session_store(session, _prefix(names), self._places(len(names)))
            written.ended()
            return time.perf_counter() - start_s

    def load(self, names: Sequence[ObjectName]) -> float:
        """Load the objects. Return how many seconds this took."""
        expected = [blocks[:, -1].copy() for blocks in self._blocks]
        for blocks in self._blocks:
            blocks[:, -1] = 0
        with self._session(self._reader) as session:
            self._look_up(session, names)
            start_s = time.perf_counter()
            session_load(session, _prefix(names), self._places(len(names)))
            seconds = time.perf_counter() - start_s
        if any(
            not np.array_equal(blocks[:, -1], wanted) for blocks, wanted in zip(self._blocks, expected, strict=True)
        ):
            raise KvError("the session read back different bytes from those it stored")
        return seconds

    def lookup(self, names: Sequence[ObjectName]) -> float:
        """Return the seconds that a lookup of stored objects takes."""
        with self._session(self._reader) as session:
            return self._look_up(session, names)

    def _look_up(self, session: Session, names: Sequence[ObjectName]) -> float:
        start_s = time.perf_counter()
        found = session.lookup(RequestId("load"), _prefix(names), wait_s=DEADLINE_S)
        seconds = time.perf_counter() - start_s
        if found.presence is Presence.PROBING or found.tokens != len(names) * CHUNK_TOKENS:
            raise KvError(f"the benchmark's lookup found {found.tokens // CHUNK_TOKENS} of {len(names)} chunks")
        return seconds

    def delete(self, names: Sequence[ObjectName]) -> None:
        """Delete the objects."""
        stored = object_names(map(ChunkKey, names), 0, self.layout.part(0), self.layout.digest(0))
        with ThreadPoolExecutor(self._in_flight) as threads:
            list(threads.map(self._tier.delete, stored))

    def close(self) -> None:
        """Release the host memory; the store stays open."""
        self._arena.close()

    def _places(self, count: int) -> list[Place]:
        return [
            Place(0, n, tuple(range(n % self._kinds * BLOCKS, (n % self._kinds + 1) * BLOCKS))) for n in range(count)
        ]

    def _session(self, tier: Tier, observer: "_Written | None" = None) -> AbstractContextManager[Session]:
        threads = Threads(read=self._in_flight, write=self._in_flight)
        tiers = [(tier, self._rules)]
        return open_session(
            self.layout, self._arena, self._slots, self._blocks, tiers, threads=threads, observer=observer
        )


class _Written(Observer):
    """Waits until all chunks of a store have been written to the tier, or one of these writes has failed."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._problem = ""
        self._done = threading.Event()

    def completed(self, completion: Completion) -> None:
        """Record that a command was completed."""
        command = completion.command
        if not isinstance(command, Transfer) or command.direction is not Direction.DEMOTE:
            return
        self._left -= 1
        if completion.outcome is not Outcome.DONE:
            self._problem = completion.detail or completion.outcome.name
        if not self._left or self._problem:
            self._done.set()

    def ended(self) -> None:
        if not self._done.wait(DEADLINE_S):
            raise KvError(f"{self._left} of the benchmark's chunks were not written within {DEADLINE_S:g} s")
        if self._problem:
            raise KvError(f"a session's write failed: {self._problem}")


def frame_bytes_of(size: int) -> int:
    """Return the frame bytes of a chunk with a payload of `size` bytes."""
    return frame_bytes(layout_of(size).groups[0])


def _prefix(names: Sequence[ObjectName]) -> Prefix:
    return Prefix(tuple(map(ChunkKey, names)), CHUNK_TOKENS)
