"""Moves parts of payloads between host memory and an engine's scattered memory, at the speed of the bus.

    scatter   payload --bus--> stage --kernel--> engine
    gather    engine --kernel--> stage --bus--> payload

A chunk lies in the engine in pieces of some KiB, too small for the bus. So a part crosses in one piece, to a stage laid
out like the payload, and a kernel takes the stage apart. Bus and kernel are queues of their own with a ring of stages
between them, so that one part crosses while the one before it is taken apart; each direction has its own, so that they
run both ways at once. Where the pieces are large they cross by themselves, without stage and kernel.

Nothing here waits for the device, nor for what the engine has queued, but for the event that it is given.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from kvtier.device.pieces import ADDRESS, BYTES, OFFSET, Pieces, is_whole, joined, table
from kvtier.device.streams import Crossing, Event, Stream, Streams

STAGE_BYTES = 16 << 20
"""Of one stage; larger where a single part is. Four of them lie on the device."""
RING = 2
"""Stages in each direction."""
DIRECT_BYTES_MIN = 256 << 10
"""Mean size of pieces from which on each crosses the bus by itself."""
_STAGE_ALIGNMENT = 256


class PayloadPart(NamedTuple):
    """A run of a payload's bytes, and where each of them is in the engine."""

    payload: memoryview
    pieces: Pieces
    """(offset in `payload`, address, bytes), by offset, none of them empty (see `pieces.merged`)."""


class _Stage:
    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes
        self.free: Event | None = None
        """Behind its last use."""


class _Direction:
    """One direction: its queues and its stages. The lock makes one thread at a time fill them."""

    def __init__(self, streams: Streams) -> None:
        self.lock = threading.Lock()
        self.bus: Stream = streams.stream()
        self.kernel: Stream = streams.stream()
        self._streams = streams
        self._ring: list[_Stage] = []
        self._next = 0

    def stage(self, size_bytes: int) -> _Stage:
        """The next of the ring, with room for so many bytes."""
        if len(self._ring) < RING:
            self._ring.append(self._made(size_bytes))
            self._next = 0
            return self._ring[-1]
        number, self._next = self._next, (self._next + 1) % RING
        if self._ring[number].size_bytes < size_bytes:
            # Rare: the old one stays where it is, since copies may still be under way in it.
            self._ring[number] = self._made(size_bytes)
        return self._ring[number]

    def _made(self, size_bytes: int) -> _Stage:
        size_bytes = max(size_bytes, STAGE_BYTES)
        return _Stage(self._streams.stage(size_bytes, self.bus), size_bytes)

    def settle(self) -> None:
        """Wait for all that was begun."""
        self.bus.settle()
        self.kernel.settle()


class StagedCopy:
    """Moves parts of one device. Thread-safe.

    Args:
        streams: the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._in, self._out = _Direction(streams), _Direction(streams)

    def now(self) -> Event:
        """See `Streams.now`."""
        return self._streams.now()

    def scatter(self, parts: Sequence[PayloadPart], after: Event | None = None) -> Event:
        """Begin to copy payloads to the engine.

        Args:
            parts: each with the pieces that are wanted; bytes without a piece stay where they are.
            after: what must have happened before the engine's memory is written.

        Returns:
            An event behind the last byte.
        """
        direction = self._in
        with direction.lock:
            try:
                return self._scatter(direction, parts, after)
            except BaseException:
                # What was begun must have ended before anybody hears that the copy failed.
                direction.settle()
                raise

    def gather(self, parts: Sequence[PayloadPart], after: Event | None = None) -> Event:
        """Begin to copy from the engine to payloads.

        Args:
            parts: their pieces cover the whole payload.
            after: what must have happened before the engine's memory is read.

        Raises:
            ValueError: some byte of a payload has no piece, or several; it would hold what was there before.
        """
        direction = self._out
        with direction.lock:
            try:
                return self._gather(direction, parts, after)
            except BaseException:
                direction.settle()
                raise

    @staticmethod
    def _scatter(direction: _Direction, parts: Sequence[PayloadPart], after: Event | None) -> Event:
        direct, staged = _sorted(parts)
        if after is not None:
            direction.kernel.wait(after)
        if direct:
            if after is not None:
                direction.bus.wait(after)
            direction.bus.to_device([crossing for part in direct for crossing in _pieces(part)])
            direction.kernel.wait(direction.bus.record())
        for batch in _batches(staged):
            stage = direction.stage(batch[-1].stop)
            if stage.free is not None:
                direction.bus.wait(stage.free)
            direction.bus.to_device([Crossing(part.payload, stage.address + start) for part, start, _ in batch])
            direction.kernel.wait(direction.bus.record())
            direction.kernel.copy(_on_device(batch, stage))
            stage.free = direction.kernel.record()
        return direction.kernel.record()

    @staticmethod
    def _gather(direction: _Direction, parts: Sequence[PayloadPart], after: Event | None) -> Event:
        direct, staged = _sorted(parts)
        for part in (*direct, *staged):
            if not is_whole(part.pieces, part.payload.nbytes):
                raise ValueError(f"the pieces of a part do not make up its {part.payload.nbytes} bytes")
        if after is not None:
            direction.kernel.wait(after)
        if direct:
            if after is not None:
                direction.bus.wait(after)
            direction.bus.to_host([crossing for part in direct for crossing in _pieces(part)])
        for batch in _batches(staged):
            stage = direction.stage(batch[-1].stop)
            if stage.free is not None:
                direction.kernel.wait(stage.free)
            direction.kernel.copy(_on_device(batch, stage)[:, (ADDRESS, OFFSET, BYTES)])
            direction.bus.wait(direction.kernel.record())
            direction.bus.to_host([Crossing(part.payload, stage.address + start) for part, start, _ in batch])
            stage.free = direction.bus.record()
        return direction.bus.record()


class _Placed(NamedTuple):
    part: PayloadPart
    start: int
    """Of the part in its stage."""
    stop: int


def _sorted(parts: Sequence[PayloadPart]) -> tuple[list[PayloadPart], list[PayloadPart]]:
    """(those whose pieces cross the bus by themselves, those that go over a stage)."""
    direct: list[PayloadPart] = []
    staged: list[PayloadPart] = []
    for part in parts:
        if len(part.pieces):
            is_large = int(part.pieces[:, BYTES].sum()) >= DIRECT_BYTES_MIN * len(part.pieces)
            (direct if is_large else staged).append(part)
    return direct, staged


def _pieces(part: PayloadPart) -> Iterator[Crossing]:
    flat = part.payload.cast("B")
    rows: list[tuple[int, int, int]] = cast("Any", part.pieces).tolist()
    for offset, address, size in rows:
        yield Crossing(flat[offset : offset + size], address)


def _batches(parts: Sequence[PayloadPart]) -> Iterator[list[_Placed]]:
    """Parts that fit in one stage together."""
    batch: list[_Placed] = []
    for part in parts:
        start = -(-batch[-1].stop // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT if batch else 0
        if batch and start + part.payload.nbytes > STAGE_BYTES:
            yield batch
            batch, start = [], 0
        batch.append(_Placed(part, start, start + part.payload.nbytes))
    if batch:
        yield batch


def _on_device(batch: Sequence[_Placed], stage: _Stage) -> Pieces:
    """(address in the stage, address in the engine, bytes) of all pieces of a batch."""
    return joined(
        table(part.pieces[:, OFFSET] + stage.address + start, part.pieces[:, ADDRESS], part.pieces[:, BYTES])
        for part, start, _ in batch
    )
