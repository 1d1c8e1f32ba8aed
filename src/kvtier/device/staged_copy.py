"""Copies between payloads in host memory and an engine's scattered blocks on a device, at the speed of the bus.

    scatter   payload --bus--> stage --kernel--> engine
    gather    engine --kernel--> stage --bus--> payload

In the engine a chunk consists of runs of a few KiB, too short for efficient bus transfers. So each part of a payload
crosses the bus in one transfer, to a staging buffer of the same layout, and a kernel scatters the buffer. Bus and
kernel have separate streams with a ring of stages between them: one part crosses while the kernel scatters the one
before. Each direction has its own streams and stages.

Nothing here blocks on the device. Copies are ordered behind the event that the caller passes, and behind no other work
of the engine.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvtier.device.copy_descriptors import ADDRESS, BYTES, OFFSET, CopyDescriptors, is_whole, joined, table
from kvtier.device.streams import BusCopy, Event, Stream, Streams

STAGE_BYTES = 16 << 20
"""Bytes of one stage; more for a larger part. The device holds four."""
RING = 2
"""Stages in each direction."""
_STAGE_ALIGNMENT = 256


class PayloadPart(NamedTuple):
    """Consecutive bytes of a payload, and their addresses in the engine."""

    payload: memoryview
    descriptors: CopyDescriptors
    """Rows of (offset in `payload`, address, bytes), ordered by offset, none empty (`merged`)."""


class _Stage:
    def __init__(self, address: int, size_bytes: int) -> None:
        self.address, self.size_bytes = address, size_bytes
        self.free: Event | None = None
        """Event behind the last use of the stage."""


class _Direction:
    """Streams and stages of one direction. One thread at a time queues work, under `lock`."""

    def __init__(self, streams: Streams) -> None:
        self.lock = threading.Lock()
        self.bus: Stream = streams.stream()
        self.kernel: Stream = streams.stream()
        self._streams = streams
        self._ring: list[_Stage] = []
        self._next = 0

    def stage(self, size_bytes: int) -> _Stage:
        """The next stage of the ring, of at least `size_bytes`."""
        if len(self._ring) < RING:
            self._ring.append(self._made(size_bytes))
            self._next = 0
            return self._ring[-1]
        number, self._next = self._next, (self._next + 1) % RING
        if self._ring[number].size_bytes < size_bytes:
            # Rare: the old buffer is not reused, because copies may still run in it.
            self._ring[number] = self._made(size_bytes)
        return self._ring[number]

    def _made(self, size_bytes: int) -> _Stage:
        size_bytes = max(size_bytes, STAGE_BYTES)
        return _Stage(self._streams.stage(size_bytes, self.bus), size_bytes)

    def settle(self) -> None:
        """Wait for all queued work."""
        self.bus.settle()
        self.kernel.settle()


class StagedCopy:
    """Copies parts to and from one device. Thread-safe.

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
        """Queue copies from payloads to the engine.

        Args:
            parts: bytes of a payload without a descriptor are not copied.
            after: precedes the first write to the engine's memory.

        Returns:
            An event behind the last byte.
        """
        direction = self._in
        with direction.lock:
            try:
                return self._scatter(direction, parts, after)
            except BaseException:
                # The caller may reuse the memory after a failure, so queued copies must end first.
                direction.settle()
                raise

    def gather(self, parts: Sequence[PayloadPart], after: Event | None = None) -> Event:
        """Queue copies from the engine to payloads.

        Args:
            parts: their descriptors cover the whole payload.
            after: precedes the first read of the engine's memory.

        Raises:
            ValueError: a byte of a payload has no descriptor, or several; it could keep bytes of another chunk.
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
        if after is not None:
            direction.kernel.wait(after)
        for batch in _batches(parts):
            stage = direction.stage(batch[-1].stop)
            if stage.free is not None:
                direction.bus.wait(stage.free)
            direction.bus.to_device([BusCopy(part.payload, stage.address + start) for part, start, _ in batch])
            direction.kernel.wait(direction.bus.record())
            direction.kernel.copy(_on_device(batch, stage))
            stage.free = direction.kernel.record()
        return direction.kernel.record()

    @staticmethod
    def _gather(direction: _Direction, parts: Sequence[PayloadPart], after: Event | None) -> Event:
        for part in parts:
            if len(part.descriptors) and not is_whole(part.descriptors, part.payload.nbytes):
                raise ValueError(f"the descriptors of a part do not cover its {part.payload.nbytes} bytes once each")
        if after is not None:
            direction.kernel.wait(after)
        for batch in _batches(parts):
            stage = direction.stage(batch[-1].stop)
            if stage.free is not None:
                direction.kernel.wait(stage.free)
            direction.kernel.copy(_on_device(batch, stage)[:, (ADDRESS, OFFSET, BYTES)])
            direction.bus.wait(direction.kernel.record())
            direction.bus.to_host([BusCopy(part.payload, stage.address + start) for part, start, _ in batch])
            stage.free = direction.bus.record()
        return direction.bus.record()


class _Placed(NamedTuple):
    part: PayloadPart
    start: int
    """Offset of the part in its stage."""
    stop: int


def _batches(parts: Sequence[PayloadPart]) -> Iterator[list[_Placed]]:
    """Parts with descriptors, grouped so that each group fits in one stage."""
    batch: list[_Placed] = []
    for part in parts:
        if not len(part.descriptors):
            continue
        start = -(-batch[-1].stop // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT if batch else 0
        if batch and start + part.payload.nbytes > STAGE_BYTES:
            yield batch
            batch, start = [], 0
        batch.append(_Placed(part, start, start + part.payload.nbytes))
    if batch:
        yield batch


def _on_device(batch: Sequence[_Placed], stage: _Stage) -> CopyDescriptors:
    """Rows of (address in the stage, address in the engine, bytes) of a batch."""
    return joined(
        table(
            part.descriptors[:, OFFSET] + stage.address + start,
            part.descriptors[:, ADDRESS],
            part.descriptors[:, BYTES],
        )
        for part, start, _ in batch
    )
